"""SpecInfer: recursive rejection, a child picked uniformly at a time (Miao et al. 2024, algorithm 2)."""

from __future__ import annotations

from functools import cache
from itertools import permutations

import torch
from torch import Tensor

from data_gen.verification.base import TopDown
from data_gen.verification.profile import Profile, divide, pooled


class SpecInfer(TopDown):
    """Round i accepts a random remaining child with `min(1, p_i/q)`; a rejection makes `p_{i+1} = (p_i - q)+~`.

    For i.i.d. children `p_i` does not depend on which child was rejected, so the rounds are the same in every order.
    """

    name = "specinfer"

    def branching(self, profile: Profile, entries_Mk: Tensor) -> Tensor:
        k = entries_Mk.shape[-1]
        p_Mk, q_Mk = profile.at(entries_Mk)
        accept_Mkk = torch.stack(  # [node, round, entry]
            [
                divide((a.unsqueeze(-1) * p_Mk - b.unsqueeze(-1) * q_Mk).clamp(min=0), q_Mk).clamp(max=1)
                for a, b in rounds(profile, k)
            ],
            dim=1,
        )
        if k == 1:
            return accept_Mkk[:, 0]
        orders_Ok = _orders(k).to(entries_Mk.device)
        accept_MOk = accept_Mkk[:, torch.arange(k, device=entries_Mk.device), orders_Ok]
        reached_MOk = torch.cat([torch.ones_like(accept_MOk[..., :1]), (1 - accept_MOk[..., :-1]).cumprod(-1)], dim=-1)
        pull_MOk = accept_MOk * reached_MOk / len(orders_Ok)
        pull_Mk = torch.zeros_like(p_Mk).index_add_(1, orders_Ok.flatten(), pull_MOk.flatten(1))
        return pooled(pull_Mk, entries_Mk)

    def leftover(self, profile: Profile, weights_M: Tensor, entries_Mk: Tensor) -> Tensor:
        *_, (a_M, b_M) = rounds(profile, entries_Mk.shape[-1] + 1)
        # a rejected token has nothing left in exact arithmetic; a rounding error must not return it as extra token
        return profile.residual(a_M, b_M).scatter_(-1, entries_Mk, 0.0)


def rounds(profile: Profile, count: int) -> list[tuple[Tensor, Tensor]]:
    """The scalars of `p_i = (a_i p - b_i q)+` for the first `count` rounds; zeros once nothing is left."""
    a_M, b_M = profile.ones(), 0 * profile.ones()
    scalars = [(a_M, b_M)]
    for _ in range(count - 1):
        mass_M = profile.excess(a_M, b_M + 1)
        a_M, b_M = divide(a_M, mass_M), divide(b_M + 1, mass_M)
        scalars.append((a_M, b_M))
    return scalars


@cache
def _orders(k: int) -> Tensor:
    """All orders in which k children may be tried, int64 [k!, k]."""
    return torch.tensor(list(permutations(range(k))))
