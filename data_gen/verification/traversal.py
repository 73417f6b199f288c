"""Traversal Verification (Weng et al. 2025, algorithm 2), in the form that is lossless for i.i.d. drafts.

Equal siblings share one merged subtree, visited at the first copy; a rejection updates the node once per *entry* of
its child list, further copies included (algorithms sheet, section 3). On a chain this is Block Verification.
"""

from __future__ import annotations

import torch
from torch import Tensor

from data_gen.verification.base import BottomUp
from data_gen.verification.profile import Profile, divide, first_copies


class Traversal(BottomUp):
    """Child `x` of `v` is entered with `min(1, w p/q)`; rejected, `w p <- (w p - q)+` and the rest is renormalised."""

    name = "traversal"

    def enter(self, profile: Profile, weights_M: Tensor, entries_Mk: Tensor) -> Tensor:
        k = entries_Mk.shape[-1]
        p_Mk, q_Mk = profile.at(entries_Mk)
        if k == 1:
            return divide(weights_M.unsqueeze(-1) * p_Mk, q_Mk).clamp_(max=1)
        states = _updates(profile, weights_M, k - 1)
        a_Mk, b_Mk, w_Mk = (torch.stack(column, dim=-1) for column in zip(*states, strict=True))
        entry_Mk = divide(w_Mk * (a_Mk * p_Mk - b_Mk * q_Mk).clamp(min=0), q_Mk).clamp(max=1)
        entry_Mk[first_copies(entries_Mk) != torch.arange(k, device=entries_Mk.device)] = 0
        return entry_Mk

    def leave(self, profile: Profile, weights_M: Tensor, entries_Mk: Tensor) -> Tensor:
        return _updates(profile, weights_M, entries_Mk.shape[-1])[-1][2]

    def leftover(self, profile: Profile, weights_M: Tensor, entries_Mk: Tensor) -> Tensor:
        a_M, b_M, _ = _updates(profile, weights_M, entries_Mk.shape[-1])[-1]
        return profile.residual(a_M, b_M)


def _updates(profile: Profile, w_M: Tensor, count: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The node's state before the first and after each of `count` rejections: its target `(a p - b q)+`, and `w`."""
    a_M, b_M = torch.ones_like(w_M), torch.zeros_like(w_M)
    states = [(a_M, b_M, w_M)]
    for _ in range(count):
        a_M, b_M = w_M * a_M, w_M * b_M + 1
        mass_M = profile.excess(a_M, b_M)
        a_M, b_M = divide(a_M, mass_M), divide(b_M, mass_M)
        # a weight of 1 stays 1: 1 - w vanishes, and the root must accept in the end
        w_M = torch.where(w_M < 1, divide(mass_M, mass_M + 1 - w_M), w_M)
        states.append((a_M, b_M, w_M))
    return states
