"""Distributions in the order of rank: by ascending `q/p`, ties by token id.

Tokens with `q/p < a/b` stand first, and the sum of `(a p - b q)+` is `a P - b Q` with two prefix
sums. So along a text, where hundreds of trees ask for different `a` and `b` at one position, all
share one sort. The rules that need the order itself read it at a tree's nodes, too.

Legend: P rows, M nodes taken at once, V vocabulary, S tokens that the draft can say, n draws for
each of M rows, k child-list entries.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from data_gen.verification.distributions import (
    Array,
    HostRows,
    Integers,
    NodeDistributions,
    Rows,
    host,
)
from selector.jit import jit

DIGIT = 11  # bits that one pass of a sort takes in
PASSES = 3  # for the 31 bits of a non-negative float32


class SortedRows(Rows):
    """As `Rows`, with each row's tokens in order of rank and prefix sums of p and q in float64.
    Only tokens that the draft can say are sorted; the others have `q/p = 0`, so they come before
    all of these."""

    def __init__(self, p_PV: Tensor, q_PV: Tensor, said_S: Tensor | None = None) -> None:
        """Outside the tokens `said_S`, int64, all q are 0; None: any token may have some."""
        super().__init__(p_PV, q_PV)
        p_PS = self.p_NV
        q_PS = self.q_NV
        if said_S is not None:
            p_PS = p_PS.index_select(-1, said_S)
            q_PS = q_PS.index_select(-1, said_S)
        ranked = _ranked if self.device.type == "cpu" else _ranked_on_gpu
        self.ratio_PS, self.tokens_PS, self.p_sum_PS, self.q_sum_PS = ranked(
            p_PS, q_PS, *self.scale_2N
        )
        if said_S is not None:
            self.tokens_PS = said_S[self.tokens_PS]
            # of all tokens with q = 0
            self.p_sum_PS += (1 - self.p_sum_PS[:, -1:]).clamp(min=0)

    @cached_property
    def on_host(self) -> tuple[Array, Array, Array, Array]:
        scale_2P = torch.ones_like(self.scale_2N)
        tensors = self.ratio_PS, self.p_sum_PS, self.q_sum_PS, scale_2P
        return cast(Any, tuple(map(host, tensors)))

    @cached_property
    def tokens_on_host(self) -> Integers:
        return cast(Integers, host(self.tokens_PS))

    def at(self, nodes_M: Tensor) -> SortedDistributions:
        return SortedDistributions(self, nodes_M.to(self.device))

    def draw(self, nodes_M: Tensor, uniform_Mn: Tensor) -> Tensor:
        """Tokens drawn from the draft's distributions, int64 [M, n], from uniform numbers in [0,
        1)."""
        total_M1 = self.q_sum_PS[nodes_M, -1:]
        below_total_M1 = torch.nextafter(total_M1, torch.zeros_like(total_M1))
        wanted_Mn = torch.minimum(uniform_Mn * total_M1, below_total_M1)
        start_Mn = nodes_M.unsqueeze(-1).expand_as(wanted_Mn) * self.q_sum_PS.shape[-1] + 1
        rank_Mn = self.leading(self.q_sum_PS, start_Mn, lambda sum_Mn: sum_Mn <= wanted_Mn)
        rank_Mn = rank_Mn.clamp(max=self.tokens_PS.shape[-1] - 1)
        return self.tokens_PS[nodes_M.unsqueeze(-1), rank_Mn]

    def leading(self, values: Tensor, start_M: Tensor, holds: Callable[[Tensor], Tensor]) -> Tensor:
        """How many of S consecutive values fulfil `holds`, which is true for leading ones alone;
        one bisection for all questions. `start_M` is the position of each question's first value in
        `values`."""
        most = self.tokens_PS.shape[-1]
        count_M = torch.zeros_like(start_M)
        for bit in reversed(range(most.bit_length())):
            probe_M = count_M + (1 << bit)
            value_M = values.take(start_M + (probe_M - 1).clamp(max=most - 1))
            count_M = torch.where(holds(value_M) & (probe_M <= most), probe_M, count_M)
        return count_M


class SortedDistributions(NodeDistributions):
    rows: SortedRows

    def excess(self, a_M: Tensor, b_M: Tensor) -> Tensor:
        start_M = self.nodes_M * self.rows.ratio_PS.shape[-1]
        threshold_M = a_M / b_M
        below_M = self.rows.leading(
            self.rows.ratio_PS, start_M, lambda ratio_M: ratio_M < threshold_M
        )
        at_M = self.nodes_M * self.rows.p_sum_PS.shape[-1] + below_M
        q_M = self.rows.q_sum_PS.take(at_M)
        return (a_M * self.rows.p_sum_PS.take(at_M) - b_M * q_M).clamp_(min=0)

    @property
    def on_host(self) -> HostRows:
        return (*self.rows.on_host, host(self.nodes_M))

    def draft_mass_off(self, entries_Mk: Tensor) -> Tensor:
        """As in `NodeDistributions`, with one sum over the vocabulary for all equal questions."""
        asked_M = torch.cat([self.nodes_M.unsqueeze(-1), entries_Mk.sort(dim=-1).values], dim=-1)
        asked_m, inverse_M = asked_M.unique(dim=0, return_inverse=True)
        return NodeDistributions(self.rows, asked_m[:, 0]).draft_mass_off(asked_m[:, 1:])[inverse_M]

    def ratios(self, entries_Mk: Tensor) -> Tensor:
        """`q/p` of the entries, as the rows are sorted by it, [M, k]."""
        nodes_M1 = self.nodes_M.unsqueeze(-1)
        p_Mk = self.rows.p_NV[nodes_M1, entries_Mk]
        q_Mk = self.rows.q_NV[nodes_M1, entries_Mk]
        return _ratio(p_Mk, q_Mk, (self._scale_2M[1] / self._scale_2M[0]).unsqueeze(-1))


def in_rank_order(node: NodeDistributions) -> SortedDistributions:
    """The same distributions, sorted; those of a tree's nodes are sorted now, and once."""
    if isinstance(node, SortedDistributions):
        return node
    if node.in_order is None:
        said_S = (node.q_MV > 0).any(0).nonzero()[:, 0]  # of top-p and top-k, few
        rows = SortedRows(node.p_MV, node.q_MV, said_S)
        node.in_order = rows.at(torch.arange(len(node.nodes_M)))
    return cast(SortedDistributions, node.in_order)


def _ratio(p_PS: Tensor, q_PS: Tensor, scale_P1: Tensor) -> Tensor:
    """`q/p` by the normalised probabilities; infinite where p is 0."""
    return (q_PS / p_PS * scale_P1.to(p_PS.dtype)).masked_fill_(p_PS == 0, torch.inf)


def _ranked_on_gpu(
    p_PS: Tensor, q_PS: Tensor, p_scale_P: Tensor, q_scale_P: Tensor
) -> tuple[Tensor, ...]:
    """`q/p`, the places of the tokens and the sums of p and q, in order of rank."""
    ratio_PS = _ratio(p_PS, q_PS, (q_scale_P / p_scale_P).unsqueeze(-1))
    ratio_PS, order_PS = ratio_PS.sort(dim=-1, stable=True)
    p_sum_PS = p_PS.gather(-1, order_PS).cumsum(-1, dtype=torch.float64) * p_scale_P.unsqueeze(-1)
    q_sum_PS = q_PS.gather(-1, order_PS).cumsum(-1, dtype=torch.float64) * q_scale_P.unsqueeze(-1)
    return ratio_PS, order_PS, pad(p_sum_PS, (1, 0)), pad(q_sum_PS, (1, 0))


def _ranked(p_PS: Tensor, q_PS: Tensor, p_scale_P: Tensor, q_scale_P: Tensor) -> tuple[Tensor, ...]:
    """As `_ranked_on_gpu`, a row at a time."""
    scale_P = (q_scale_P / p_scale_P).to(p_PS.dtype)
    arrays = [tensor.numpy() for tensor in (p_PS, q_PS, p_scale_P, q_scale_P, scale_P)]
    return tuple(map(torch.from_numpy, _ranked_rows(*arrays)))


@jit
def _ranked_rows(
    p_PS: Array, q_PS: Array, p_scale_P: Array, q_scale_P: Array, scale_P: Array
) -> tuple[Array, Integers, Array, Array]:
    rows, size = p_PS.shape
    ratio_PS = np.empty_like(p_PS)
    order_PS = np.empty((rows, size), np.int64)
    p_sum_PS = np.empty((rows, size + 1))
    q_sum_PS = np.empty((rows, size + 1))
    unsorted_S = np.empty_like(p_PS[0])
    for n in range(rows):
        p_S = p_PS[n]
        q_S = q_PS[n]
        for x in range(size):
            unsorted_S[x] = q_S[x] / p_S[x] * scale_P[n] if p_S[x] > 0 else np.inf
        order_S = _ascending(unsorted_S)
        p_sum = q_sum = 0.0
        p_sum_PS[n, 0] = q_sum_PS[n, 0] = 0.0
        for rank in range(size):
            x = order_S[rank]
            p_sum += p_S[x]
            q_sum += q_S[x]
            ratio_PS[n, rank] = unsorted_S[x]
            order_PS[n, rank] = x
            p_sum_PS[n, rank + 1] = p_sum * p_scale_P[n]
            q_sum_PS[n, rank + 1] = q_sum * q_scale_P[n]
    return ratio_PS, order_PS, p_sum_PS, q_sum_PS


@jit
def _ascending(values_S: Array) -> Integers:
    """The order in which non-negative values ascend, ties by position."""
    if values_S.itemsize == 8 or len(values_S) < 1 << DIGIT:
        return np.argsort(values_S, kind="mergesort")
    # A radix sort: every pass orders by one digit of the values, seen as integers, the last digit
    # first, and keeps the order of equal ones.
    keys_S = values_S.view(np.int32)
    from_S = np.empty(len(values_S), np.int64)  # value and position
    to_S = np.empty_like(from_S)
    mask = (1 << DIGIT) - 1
    counts_dD = np.zeros((PASSES, 1 << DIGIT), np.int64)
    for x in range(len(values_S)):
        key = np.int64(keys_S[x])
        from_S[x] = key << 32 | x
        for d in range(PASSES):
            counts_dD[d, key >> d * DIGIT & mask] += 1
    for d in range(PASSES):
        start_D = np.cumsum(counts_dD[d]) - counts_dD[d]
        for x in range(len(from_S)):
            digit = from_S[x] >> 32 + d * DIGIT & mask
            to_S[start_D[digit]] = from_S[x]
            start_D[digit] += 1
        from_S, to_S = to_S, from_S
    return from_S & 0xFFFFFFFF
