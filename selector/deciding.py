"""Decisions along the trunk, played on recorded trunks: what they would have drafted, and what it would have yielded.

A decision after `t` drafted tokens, the first at the root with none, compares what every further action adds with what
it costs, `argmax gain - g time` (algorithms sheet, section 7); to stop adds and costs nothing. The best further action
is carried out up to its next trunk token, where the question is asked again with what is known then. So each decision
maximises over plans that are not revised: a lower bound of optimal stopping that needs no value function of a machine's
times.

Legend: B roots, S samples, T trunk tokens, A actions.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from selector.actions import EMPTY, ActionSpace, trunk_tokens
from selector.data import Roots
from selector.network import further_actions
from selector.speed import by_text, over_texts
from selector.tuned import LONGEST

SPACE = ActionSpace.default()
STOP = SPACE.index(EMPTY)
TRUNK_TOKENS = torch.tensor([trunk_tokens(action) for action in SPACE])


@dataclass(frozen=True)
class Played:
    """What was drafted on every sample of every root, [B, S]: action index, tokens it yields, seconds it takes; both
    times the steps that the root stands for. `prompt_B` numbers the roots' prompts."""

    action_BS: Tensor
    tokens_BS: Tensor
    seconds_BS: Tensor
    prompt_B: Tensor
    times_A: Tensor | None = None  # how often each further action was the best along the trunk

    def speed(self) -> float:
        """Tokens per second, over whole texts."""
        return float(over_texts(*self._by_text()))

    def seconds_per_token(self) -> Tensor:
        """Of each prompt, float64 [P], in the order of their numbers."""
        tokens_P, seconds_P = self._by_text()
        return seconds_P / tokens_P

    def _by_text(self) -> list[Tensor]:
        return [by_text(values_BS.double().sum(-1), self.prompt_B) for values_BS in (self.tokens_BS, self.seconds_BS)]


def play(roots: Roots, gains_BSTA: Callable[[int], Tensor], cost_BTA: Tensor, first: int = 0) -> tuple[Tensor, Tensor]:
    """The action that decisions along the trunk lead to, for every sample, int64 [B, S]; and how often each further
    action was the best, [A].

    Args:
        gains_BSTA: predicted gains of further actions after t tokens, [B, S, A], by t.
        cost_BTA: as from `further_cost`.
        first: trunk tokens before which nothing is decided; 0 is the root.
    """
    shape = roots.trunk_BSA.shape[:2]
    whole_TA = further_actions(SPACE)
    branches_now = torch.tensor([action.K > 1 and action.L1 == 0 for action in SPACE])
    action_BS = torch.full(shape, SPACE.index(LONGEST))
    open_BS = torch.ones(shape, dtype=torch.bool)
    times_A = torch.zeros(len(SPACE), dtype=torch.int64)
    for t in range(first, SPACE.decisions + 1):
        best_BS = (gains_BSTA(t) - cost_BTA[:, t].unsqueeze(1)).argmax(-1)
        times_A += best_BS[open_BS].bincount(minlength=len(SPACE))
        action_BS = torch.where(open_BS, whole_TA[t][best_BS], action_BS)
        open_BS &= ~((best_BS == STOP) | branches_now[best_BS])
    return action_BS, times_A


def outcome(roots: Roots, action_BS: Tensor, seconds_BA: Tensor, times_A: Tensor | None = None) -> Played:
    """What the given actions yield on the samples' own trunks, and what they take."""
    tokens_BS = roots.trunk_BSA.gather(-1, action_BS.unsqueeze(-1))[..., 0]
    weight_B1 = roots.weight_B.unsqueeze(-1)
    seconds_BS = seconds_BA.gather(-1, action_BS)
    return Played(action_BS, weight_B1 * tokens_BS, weight_B1 * seconds_BS, roots.prompt_B, times_A)
