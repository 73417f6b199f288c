"""Static trees and stopping rules, tuned on the training split for one clock.

Legend: B roots, S samples, T trunk tokens, A actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from selector.actions import Action, ActionSpace
from selector.data import Roots, kind_number
from selector.deciding import outcome

STATIC = "static"
SPACE = ActionSpace.default()
QUANTILES = 24  # entropy thresholds that are tried


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
    """

    roots: dict[str, Roots]
    kinds: Sequence[str]

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
        """Chains are verified alike by all bottom-up verifiers: one that is there, or else any."""
        names = [name for name in self.roots if name in ("block", "traversal") or name.startswith("lifted")]
        return self.roots[(names or list(self.roots))[0]]

    def entropy_stop(self) -> tuple[float, int]:
        """Threshold in nats and longest chain of `EntropyStop`, by what they would have drafted on recorded trunks."""
        roots = self._any_roots
        entropy_BST = roots.trunk_entropy_BST
        chains_T = torch.tensor([SPACE.index(SPACE.chain(t)) for t in range(SPACE.decisions + 2)])
        best = (0.0, float("inf"), 1)
        for threshold in torch.quantile(entropy_BST[..., :4].flatten(), torch.linspace(0.05, 1, QUANTILES)).tolist():
            sure_BS = (entropy_BST <= threshold).long().cumprod(-1).sum(-1) + 1  # tokens until the first doubt, with it
            for longest in range(1, SPACE.decisions + 2):
                action_BS = chains_T[sure_BS.clamp(max=longest)]
                speed = outcome(roots, action_BS, roots.static_seconds_BA).speed()
                best = max(best, (speed, threshold, longest))
        return best[1:]
