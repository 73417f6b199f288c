"""What is drafted under a sampling setting that a selector was not trained for, by what the steps accept.

Under another setting drafted tokens are accepted more often or less often than under the nearest trained one. One
number says by how much: every survival `P(tau >= t)` of the trained setting is raised to the power `theta`, that is,
all hazards are multiplied by it. The best tree is known for each power beforehand. `theta` is the power at which the
latest steps should have accepted as many tokens as they did. Plain decoding accepts nothing and so tells nothing:
where it is the best choice, another tree is drafted now and then, less and less often.

The lookup rule of the nearest trained setting copies as long as its copies pay. Each has a credit of tokens, to which
it adds what it accepts beyond what the tree would yield in the same time. While the credit is used up, the tree is
drafted instead.

Legend: T trees, S survivals, G powers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selector.actions import ActionSpace, Choice, Lookup, Tree
from selector.decision import Mode

POWERS = tuple(2 ** (n / 4) for n in range(-12, 13))
PRIOR = 10.0  # steps under the trained setting that count as seen
MEMORY = 0.998  # the weight of a step that drafts, relative to the next one
LATER, LATEST = 0.5, 50.0  # by how many steps plain decoding lasts longer each time, and how long at most
CREDIT, RETRY = 10.0, 0.01  # the most that copies can have, and what each gets that is not made for want of credit
DECIMALS = 9  # of tokens per step, so that equal trees are equal whatever the linear algebra rounds


class Online:
    """The tree with the most tokens per second at the power that fits the latest steps, and lookups while they pay.

    It keeps what it has learned from one text to the next. `action` is the tree to draft.
    """

    def __init__(self, space: ActionSpace, mode: Mode, seconds: Tensor, allowed: Sequence[int]) -> None:
        """
        Args:
            mode: of the nearest trained setting: its best tree, its rule if there is one, and its mean efficiencies.
            seconds: of a step with each of `space.trees`, and with the rule's lookup.
            allowed: positions of the actions that may be drafted, at least one tree.
        """
        trees, self._rule = [space.trees[a] for a in allowed if a < len(space.trees)], mode.rule
        self._position = {tree: position for position, tree in enumerate(space.trees)}
        at = [self._position[tree] for tree in trees]
        tokens_GT = scaled(space, mode.mean_efficiency)
        speed_GT = tokens_GT[:, at] / seconds[at].double()
        self._speed_G, self._copy_seconds = speed_GT.amax(-1).tolist(), float(seconds[-1])
        self._best_G = [trees[best] for best in speed_GT.argmax(-1).tolist()]
        self._accepted_TG = (tokens_GT - 1).T.tolist()
        self._power = trained = POWERS.index(1.0)
        self._best_G[trained] = self.action = mode.action
        probes = [tree for tree in trees if tree.nodes > 0] if mode.action.nodes == 0 else []
        probe_speeds = dict(zip(trees, speed_GT[trained].tolist(), strict=True))
        self._probe = max(probes, key=probe_speeds.__getitem__, default=mode.action)
        own_G = self._accepted_TG[self._position[self._probe]]
        self._prior_G = [PRIOR * (accepted - own_G[trained]) for accepted in own_G]
        self._excess_G = [0.0] * len(POWERS)  # by which the latest steps should have accepted more at each power
        self._plain, self._lasts = 0, 0.0  # steps of plain decoding in a row, and how many there shall be
        self._credit = CREDIT

    def choose(self, match: float) -> Choice:
        """The choice at a root after a match of so many tokens."""
        if self._rule is None or not self._rule.copies(match):
            return self.action
        if self._credit > 0:
            return self._rule.lookup
        self._credit += RETRY
        return self.action

    def observe(self, action: Choice, accepted: int) -> None:
        """Learn from a step: what was drafted, and tau."""
        if isinstance(action, Lookup):
            instead = self._copy_seconds * self._speed_G[self._power] - 1
            self._credit = min(CREDIT, self._credit + accepted - instead)
        elif action.nodes == 0:
            self._plain += 1
            self.action = self._probe if self._plain >= self._lasts else action
        else:
            self._fit(action, accepted)

    def _fit(self, tree: Tree, accepted: int) -> None:
        expected_G = self._accepted_TG[self._position[tree]]
        self._excess_G = [MEMORY * e + more - accepted for e, more in zip(self._excess_G, expected_G, strict=True)]
        off_G = [abs(prior + e) for prior, e in zip(self._prior_G, self._excess_G, strict=True)]
        self._power, self._plain = off_G.index(min(off_G)), 0
        self.action = self._best_G[self._power]
        self._lasts = min(self._lasts + LATER, LATEST) if self.action.nodes == 0 else 0.0


def scaled(space: ActionSpace, mean_efficiency: Sequence[float]) -> Tensor:
    """Tokens per step of all trees at every power, float64 [G, T]."""
    trees = len(space.trees)
    sums_ST = space.sums_SA[: space.tree_survivals, :trees].double()
    tokens_T1 = torch.tensor(mean_efficiency, dtype=torch.float64).unsqueeze(-1)
    survivals_S = torch.linalg.lstsq(sums_ST.T, tokens_T1 - 1).solution[:, 0].clamp(1e-9, 1)
    tokens_GT: Tensor = 1 + survivals_S ** torch.tensor(POWERS, dtype=torch.float64).unsqueeze(-1) @ sums_ST
    return tokens_GT.round(decimals=DECIMALS)
