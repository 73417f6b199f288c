"""Greedy drafts (Hu et al. 2025): the draft's top k-1 tokens, and one drawn from the rest."""

from __future__ import annotations

from torch import Tensor

from data_gen.verification.base import GREEDY, TopDown
from data_gen.verification.profile import NodeDistributions, divide


class Greedy(TopDown):
    """Accept the drawn child with `min(1, p/q')`; else the token is drawn from `(p - q')+`.

    `q'` is `q` off the top tokens, renormalised; so the top tokens have their whole `p` in the residual. Optimal for
    such drafts: `alpha = p(top) + sum_off_top min(p, q')`. The drawn child is the last entry.
    """

    name = "greedy"
    styles = (GREEDY,)

    def branching(self, profile: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        p_Mk, q_Mk = profile.at(entries_Mk)
        scale_M, taken_M = self._drawn(profile, entries_Mk)
        accept_M = divide(p_Mk[:, -1], scale_M * q_Mk[:, -1]).clamp(max=1)
        top_Mk = (1 - accept_M).unsqueeze(-1) * divide(p_Mk, (1 - taken_M).unsqueeze(-1))
        top_Mk[:, -1] = accept_M
        return top_Mk

    def leftover(self, profile: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        scale_M, _ = self._drawn(profile, entries_Mk)
        return profile.residual(profile.ones(), scale_M).scatter_(-1, entries_Mk, 0.0)

    @staticmethod
    def _drawn(profile: NodeDistributions, entries_Mk: Tensor) -> tuple[Tensor, Tensor]:
        """What `q` is multiplied by off the top tokens, and `sum_off_top min(p, q')`; [M] each."""
        scale_M = 1 / profile.draft_mass_off(entries_Mk[:, :-1])[:, -1]
        p_Mk, q_Mk = (values_Mk[:, :-1] for values_Mk in profile.at(entries_Mk))
        on_top_M = p_Mk.minimum(scale_M.unsqueeze(-1) * q_Mk).sum(-1)
        return scale_M, (1 - profile.excess(profile.ones(), scale_M) - on_top_M).clamp(min=0)


class SpecHub(Greedy):
    """SpecHub (Sun et al. 2024, arXiv 2411.05289): pairs of the top token, the hub, and another one.

    A pair `{hub, x}` comes with probability `q'(x)`, as in Greedy with k = 2; so do the acceptance of `x` and what the
    hub is given of the rest.
    """

    name = "spechub"

    def branching(self, profile: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        if entries_Mk.shape[-1] > 2:
            raise ValueError(f"spechub verifies pairs; a node has {entries_Mk.shape[-1]} children")
        p_M2, q_M2 = profile.at(entries_Mk)
        scale_M, taken_M = self._drawn(profile, entries_Mk)
        other_M = divide(p_M2[:, 1], scale_M * q_M2[:, 1]).clamp(max=1)
        hub_M = divide(p_M2[:, 0], 1 - taken_M).clamp(max=1)  # of the mass that `x` has not taken
        pull_M2 = p_M2.clone()
        pull_M2[:, 0], pull_M2[:, 1] = (1 - other_M) * hub_M, other_M
        return pull_M2
