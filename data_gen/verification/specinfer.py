"""SpecInfer: recursive rejection (Miao et al. 2024, algorithm 2); without replacement as in MDSD (RRSw, RRSw/o).

At each node, from the root down:

    while there are children left:
        x = one of them, at random;  go there with probability min(1, p(x) / q(x))
        else  p <- (p - q)+, normalised;  leave out this entry
    stop, the extra token is drawn from p

The walk is not sampled here: how likely it goes to each child follows from the rounds' scalars, in closed form.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from data_gen.verification.base import IID, WITHOUT_REPLACEMENT, TopDown
from data_gen.verification.profile import NodeDistributions, divide, pooled

MOST_SHUFFLED = 12  # entries; beyond (copies in wide trees) they are tried in their own order, which is lossless too


class SpecInfer(TopDown):
    """Round i accepts a remaining child with `min(1, p_i/q_i)`; a rejection makes `p_{i+1} = (p_i - q_i)+~`.

    I.i.d.: a random remaining child, `q_i = q`; `p_i` does not depend on which child was rejected, so the rounds are
    the same in every order. Without replacement: in the order of the draws, `q_i` is `q` off the rejected tokens.
    """

    name = "specinfer"
    styles = (IID, WITHOUT_REPLACEMENT)

    def branching(self, profile: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        k = entries_Mk.shape[-1]
        p_Mk, q_Mk = profile.at(entries_Mk)
        steps_Mk = draft_steps(profile, entries_Mk, self.style)
        accept_Mkk = torch.stack(  # [node, round, entry]
            [
                divide((a_M1 * p_Mk - b_M1 * q_Mk).clamp(min=0), step_M1 * q_Mk).clamp(max=1)
                for a_M1, b_M1, step_M1 in _columns(*rounds(profile, steps_Mk), steps_Mk)
            ],
            dim=1,
        )
        if self.style == IID and k <= MOST_SHUFFLED:
            pull_Mk = profile.by_count(entries_Mk, lambda count: _in_random_order(accept_Mkk[:, :count, :count]))
            return pooled(pull_Mk, entries_Mk)
        accept_Mk = accept_Mkk.diagonal(dim1=1, dim2=2)
        reached_Mk = torch.cat([torch.ones_like(accept_Mk[:, :1]), (1 - accept_Mk[:, :-1]).cumprod(-1)], dim=-1)
        return pooled(accept_Mk * reached_Mk, entries_Mk)

    def leftover(self, profile: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        a_Mr, b_Mr = rounds(profile, draft_steps(profile, entries_Mk, self.style))
        # a rejected token has nothing left in exact arithmetic; a rounding error must not return it as extra token
        return profile.cleared(profile.residual(a_Mr[:, -1], b_Mr[:, -1]), entries_Mk)


def draft_steps(profile: NodeDistributions, entries_Mk: Tensor, style: str) -> Tensor:
    """By what factor the law of each entry exceeds `q` off the entries before it, [M, k].

    1 for i.i.d. draws (0 where there is no entry, and so no rejection); without replacement
    `1 / (1 - q(earlier entries))`. On the earlier entries themselves both laws differ, but there nothing of the target
    is left.
    """
    if style == IID:
        return profile.present(entries_Mk)
    return 1 / profile.draft_mass_off(entries_Mk)[:, :-1]


def rounds(profile: NodeDistributions, steps_Mk: Tensor) -> tuple[Tensor, Tensor]:
    """The scalars of `p_i = (a_i p - b_i q)+` before the first and after every rejection, [M, k + 1] each."""
    a_M, b_M = profile.ones(), 0 * profile.ones()
    scalars = [(a_M, b_M)]
    for step_M in steps_Mk.unbind(-1):
        mass_M = profile.excess(a_M, b_M + step_M)
        a_M, b_M = divide(a_M, mass_M), divide(b_M + step_M, mass_M)
        scalars.append((a_M, b_M))
    a_Mr, b_Mr = (torch.stack(column, dim=-1) for column in zip(*scalars, strict=True))
    return a_Mr, b_Mr


def _columns(*tensors: Tensor) -> zip[tuple[Tensor, ...]]:
    return zip(*(tensor.split(1, dim=-1) for tensor in tensors), strict=False)  # the last round accepts nothing


def _in_random_order(accept_Mkk: Tensor) -> Tensor:
    """P(each entry is the accepted one) when every round takes a random remaining entry, [M, k].

    Followed over the sets of entries that are rejected so far, of which there are 2^k.

    Args:
        accept_Mkk: P(accepted) by round and entry.
    """
    k = accept_Mkk.shape[-1]
    rejected_MS = accept_Mkk.new_zeros(len(accept_Mkk), 1 << k)
    rejected_MS[:, 0] = 1.0
    pull_Mk = torch.zeros_like(accept_Mkk[:, 0])
    for round_, (from_T, entry_T, to_T) in enumerate(_rejections(k, pull_Mk.device)):
        taken_MT = rejected_MS[:, from_T] / (k - round_)
        accept_MT = accept_Mkk[:, round_, entry_T]
        pull_Mk.index_add_(1, entry_T, taken_MT * accept_MT)
        rejected_MS.index_add_(1, to_T, taken_MT * (1 - accept_MT))
    return pull_Mk


@cache
def _rejections(k: int, device: torch.device) -> list[tuple[Tensor, Tensor, Tensor]]:
    """By round: the set rejected before, the entry taken, and the set with it, as bit masks; int64 [T] each."""
    rounds_: list[list[tuple[int, int, int]]] = [[] for _ in range(k)]
    for rejected in range(1 << k):
        for entry in range(k):
            if not rejected >> entry & 1:
                rounds_[rejected.bit_count()].append((rejected, entry, rejected | 1 << entry))
    return [tuple(torch.tensor(moves, device=device).unbind(-1)) for moves in rounds_]  # type: ignore[misc]
