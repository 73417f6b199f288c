"""The static tree for a sampling setting that a selector was not trained for, chosen from what the steps accept.

Under another setting drafted tokens are accepted more often or less often than under the nearest trained one. One
number says by how much: every survival `P(tau >= t)` of the trained setting is raised to the power `theta`, that is,
all hazards are multiplied by it. The best tree is known for each power beforehand. `theta` is the power at which the
latest steps should have accepted as many tokens as they did.

Legend: T trees, S survivals, G powers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from selector.actions import ActionSpace, Tree

POWERS = tuple(2 ** (n / 4) for n in range(-12, 13))
PRIOR = 40.0  # steps under the trained setting that count as seen
MEMORY = 0.998  # the weight of a step, relative to the one after it
DECIMALS = 9  # of tokens per step, so that equal trees are equal whatever the linear algebra rounds


class OnlineTree:
    """The tree with the most tokens per second at the power that fits the latest steps.

    It keeps what it has learned from one text to the next. `action` is the tree to draft.
    """

    def __init__(
        self,
        space: ActionSpace,
        mean_efficiency: Sequence[float],
        seconds_T: Tensor,
        allowed: Sequence[int],
        first: Tree,
    ) -> None:
        """
        Args:
            mean_efficiency: tokens per step of all trees under the trained setting, in the order of `space.trees`.
            seconds_T: of a step with each tree.
            allowed: positions of the trees that may be drafted, at least one.
            first: the best tree under the trained setting.
        """
        tokens_GT = scaled(space, mean_efficiency)
        speed_GT = (tokens_GT / seconds_T.double())[:, list(allowed)]
        self._trees = [space.trees[allowed[best]] for best in speed_GT.argmax(-1).tolist()]
        self._position = {tree: position for position, tree in enumerate(space.trees)}
        self._accepted_TG = (tokens_GT - 1).T.tolist()
        trained = POWERS.index(1.0)
        self.action = self._trees[trained] = first
        own_G = self._accepted_TG[self._position[self.action]]
        self._prior_G = [PRIOR * (accepted - own_G[trained]) for accepted in own_G]
        self._excess_G = [0.0] * len(POWERS)  # by which the latest steps should have accepted more at each power

    def observe(self, action: Tree, accepted: int) -> None:
        """Learn from a step: its tree, and tau."""
        expected_G = self._accepted_TG[self._position[action]]
        self._excess_G = [MEMORY * e + more - accepted for e, more in zip(self._excess_G, expected_G, strict=True)]
        off_G = [abs(prior + e) for prior, e in zip(self._prior_G, self._excess_G, strict=True)]
        self.action = self._trees[off_G.index(min(off_G))]


def scaled(space: ActionSpace, mean_efficiency: Sequence[float]) -> Tensor:
    """Tokens per step of all trees at every power, float64 [G, T]."""
    trees = len(space.trees)
    sums_ST = space.sums_SA[: space.tree_survivals, :trees].double()
    tokens_T1 = torch.tensor(mean_efficiency, dtype=torch.float64).unsqueeze(-1)
    survivals_S = torch.linalg.lstsq(sums_ST.T, tokens_T1 - 1).solution[:, 0].clamp(1e-9, 1)
    tokens_GT: Tensor = 1 + survivals_S ** torch.tensor(POWERS, dtype=torch.float64).unsqueeze(-1) @ sums_ST
    return tokens_GT.round(decimals=DECIMALS)
