"""Static trees and stopping rules, tuned on the training split for one clock.

Legend: B roots, S samples, T trunk tokens, A actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from data_gen.verification import VERIFIERS
from selector.actions import Action, ActionSpace
from selector.data import Roots, kind_number
from selector.deciding import TRUNK_TOKENS, outcome
from selector.stopping import StoppingModule

STATIC = "static"
SPACE = ActionSpace.default()
QUANTILES = 24  # thresholds that are tried


@dataclass(frozen=True)
class Static:
    """A static tree of a verifier and its speed on the training split, in tokens per second."""

    verifier: str
    action: Action
    speed: float


@dataclass(frozen=True)
class Tuning:
    """What training data say under one sampling setting, on one clock.

    Attributes:
        roots: of that setting, by verifier.
        kinds: of prompts.
        revise: seconds of one decision at a drafted token.
    """

    roots: dict[str, Roots]
    kinds: Sequence[str]
    revise: float

    def static(self, verifier: str, kind: str | None = None, at_root: bool = False) -> Static:
        """A verifier's fastest tree; of those that branch at the root (chains among them), if `at_root`."""
        roots = self.roots[verifier]
        if kind is not None:
            mine = (roots.kind_B == kind_number(kind)).nonzero().flatten()
            roots = roots.rows(mine) if len(mine) else roots
        allowed = torch.tensor([action.L1 == 0 or action.K == 1 for action in SPACE]) if at_root else None
        index, speed = roots.best_static(allowed)
        return Static(verifier, SPACE.actions[index], speed)

    def best(self, verifiers: Sequence[str], kind: str | None = None) -> Static:
        """The fastest tree of any verifier."""
        return max((self.static(verifier, kind) for verifier in verifiers), key=lambda static: static.speed)

    @cached_property
    def _any_roots(self) -> Roots:
        """Those of a verifier that is Block Verification on a chain, or else of any."""
        names = [name for name in self.roots if VERIFIERS[name].on_a_chain == "block"]
        return self.roots[(names or list(self.roots))[0]]

    def entropy_stop(self) -> tuple[float, int]:
        """Threshold in nats and longest chain of `EntropyStop`."""
        entropy_BST = self._any_roots.trunk_entropy_BST
        shares = torch.linspace(0.05, 1, QUANTILES)
        return self._stop(entropy_BST, torch.quantile(entropy_BST[..., :4].flatten(), shares).tolist())

    def stopping_head(self, head: StoppingModule) -> tuple[float, int]:
        """Threshold and longest chain of `StoppingHead`."""
        rejected_BST = head.rejected(self._any_roots)
        shares = torch.linspace(0.02, 1, 2 * QUANTILES, dtype=rejected_BST.dtype)  # it grows along the whole trunk
        return self._stop(rejected_BST, torch.quantile(rejected_BST.flatten(), shares).tolist())

    def _stop(self, doubt_BST: Tensor, thresholds: Sequence[float]) -> tuple[float, int]:
        """The fastest threshold and longest chain of a rule that drafts on while its doubt is at most the threshold.

        By what it would have drafted on recorded trunks. A drafted token costs a decision, unless the chain is the
        longest one there.
        """
        roots = self._any_roots
        chains_T = torch.tensor([SPACE.index(SPACE.chain(t)) for t in range(SPACE.decisions + 2)])
        best = (0.0, float("inf"), 1)
        for threshold in thresholds:
            sure_BS = (doubt_BST <= threshold).long().cumprod(-1).sum(-1) + 1  # tokens until the first doubt, with it
            for longest in range(1, SPACE.decisions + 2):
                action_BS = chains_T[sure_BS.clamp(max=longest)]
                seconds_BA = roots.static_seconds_BA + self.revise * TRUNK_TOKENS.clamp(max=longest - 1)
                best = max(best, (outcome(roots, action_BS, seconds_BA).speed(), threshold, longest))
        return best[1:]
