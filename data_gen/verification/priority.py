"""The priority rule, which is new here: close to optimal transport in one pass over the vocabulary.

The first alive child in descending `m/q` is selected. At each node with k children:

    A = 1
    for x in the vocabulary, by descending m(x) / q(x):
        a(x) = 1 if A^k - (A - q(x))^k <= m(x), else (A - (A^k - m(x))^(1/k)) / q(x)
        A <- A - a(x) q(x)
    each child is alive with probability a(x);  the first alive one in this order is selected
    if none is alive, the extra token is drawn from m less the flow

A token that is always alive (`a = 1`) takes `q` from `A`, and one whose target is the limit takes
`m` from `A^k`. So a run of tokens that are treated alike needs nothing but the sums of their q and
p, whatever their order. With prefix sums the pass goes over whole runs, whose ends it finds by
bisection: at most a few hundred steps for any vocabulary. The flow of one draft of mass q,
`A^k - (A - q)^k`, is concave in q and grows with A, and this tells when all tokens of a range are
treated alike:

    all are always alive  if  m/q >= k A^(k-1)  for the last one;
    m limits all          if  m/q < (B^k - (B - Q)^k) / Q  for the first one, where Q is the mass of
                          the range, and B the A after it if m limits all.

The pass is compiled, and distributions on a GPU are copied to the host for it.

Legend: M nodes taken at once (questions), P rows, V vocabulary, S tokens in order of rank, k
child-list entries.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from data_gen.verification.distributions import (
    Array,
    HostRows,
    Integers,
    NodeDistributions,
    host,
)
from data_gen.verification.ranking import in_rank_order
from data_gen.verification.selection import Lifted, Selection, TopDownRule
from selector.jit import jit

NOTHING = 1e-14  # of `A^k`: below this only rounding errors are left
MARGIN = 1 + 1e-6  # float32 ratios, by which ranges are judged, are rounded

Run = tuple[int, float, bool]  # the rank of its first token, A there, and whether m is the limit
Row = tuple[Integers, Array, Array, Array]  # tokens, q/p, and the sums of p and q in order of rank


class FirstInRank:
    """A token is alive with the largest probability for which its flow stays below `m`, given those
    before it."""

    def select(self, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Selection:
        ranked = in_rank_order(node)
        entries = entries_Mk, ranked.ratios(entries_Mk), *ranked.at(entries_Mk)
        arrays = _selected(
            ranked.rows.tokens_on_host,
            ranked.on_host,
            host(weights_M),
            tuple(map(host, entries)),
        )
        return Selection(*(torch.from_numpy(array).to(node.rows.device) for array in arrays))

    def remainder(self, node: NodeDistributions, weights_M: Tensor, k: int) -> Tensor:
        ranked = in_rank_order(node)
        p_MV, q_MV = map(host, ranked.exact())
        left_MV = _left(
            ranked.rows.tokens_on_host, ranked.on_host, host(weights_M), (p_MV, q_MV), k
        )
        return torch.from_numpy(left_MV).to(node.rows.device)


@jit
def _selected(
    tokens_PS: Integers, rows: HostRows, weights_M: Array, entries: tuple[Array, ...]
) -> tuple[Array, Array, Array]:
    """P(an entry is the first alive one), the whole flow, and `m - F` at the entries."""
    tokens_Mk, ratio_Mk, p_Mk, q_Mk = entries
    k = tokens_Mk.shape[1]
    chosen_Mk = np.ones(tokens_Mk.shape)
    left_Mk = np.empty(tokens_Mk.shape)
    flow_M = np.empty(len(weights_M))
    rank_k = np.empty(k, np.int64)
    alive_k = np.empty(k)
    for n in range(len(weights_M)):
        row = _row(tokens_PS, rows, n)
        weight = weights_M[n]
        runs, flow_M[n] = _runs(row, weight, k)
        for i in range(k):
            rank_k[i] = _rank(row, tokens_Mk[n, i], ratio_Mk[n, i])
            m = weight * p_Mk[n, i]
            alive_k[i], flow = _alive(runs, row, weight, k, rank_k[i], m, q_Mk[n, i])
            left_Mk[n, i] = max(m - flow, 0.0)
        for i in range(k):
            chosen_Mk[n, i] = alive_k[i]
            for j in range(k):
                if rank_k[j] < rank_k[i] or (rank_k[j] == rank_k[i] and j < i):
                    chosen_Mk[n, i] *= 1 - alive_k[j]
    return chosen_Mk, flow_M, left_Mk


@jit
def _left(
    tokens_PS: Integers,
    rows: HostRows,
    weights_M: Array,
    probs: tuple[Array, Array],
    k: int,
) -> Array:
    """`m - F` of all tokens, [M, V]. Those that the draft cannot say keep their target."""
    p_MV, q_MV = probs
    left_MV = np.empty(p_MV.shape)
    for n in range(len(weights_M)):
        weight = weights_M[n]
        left_MV[n] = weight * p_MV[n]
        row = _row(tokens_PS, rows, n)
        runs, _ = _runs(row, weight, k)
        for r in range(len(runs)):
            begin, A, is_limited = runs[r]
            end = runs[r + 1][0] if r + 1 < len(runs) else len(row[0])
            if A**k <= NOTHING:
                break
            for rank in range(begin, end):
                x = row[0][rank]
                flow = left_MV[n, x]
                if not is_limited:
                    flow = _flow(_before(rank, runs[r], row, weight, k), q_MV[n, x], k)
                left_MV[n, x] = max(left_MV[n, x] - flow, 0.0)
    return left_MV


@jit
def _row(tokens_PS: Integers, rows: HostRows, question: int) -> Row:
    ratio_PS, p_sum_PS, q_sum_PS, _, nodes_M = rows
    node = nodes_M[question]
    return tokens_PS[node], ratio_PS[node], p_sum_PS[node], q_sum_PS[node]


@jit
def _runs(row: Row, weight: float, k: int) -> tuple[list[Run], float]:
    """The runs of tokens that are treated alike, in order of rank, and the whole flow. Once `A^k`
    is lost in rounding nothing is left, and no later token is alive, which is lossless, too."""
    _, ratio_S, p_sum, q_sum = row
    runs = [(0, 1.0, False)]
    ranges = [(0, len(ratio_S))]
    A = 1.0
    while len(ranges) > 0:
        begin, end = ranges.pop()
        A = _before(begin, runs[-1], row, weight, k)
        if A**k <= NOTHING:
            runs.append((begin, 0.0, False))
            break
        M = weight * (p_sum[end] - p_sum[begin])
        Q = q_sum[end] - q_sum[begin]
        B = max(A**k - M, 0.0) ** (1 / k)
        if end == begin + 1:
            is_limited = _flow(A, Q, k) > M
        elif weight >= MARGIN * k * A ** (k - 1) * ratio_S[end - 1]:
            is_limited = False
        elif MARGIN * weight * Q < _flow(B, Q, k) * ratio_S[begin]:
            is_limited = True
        else:
            middle = (begin + end) // 2
            ranges.append((middle, end))
            ranges.append((begin, middle))
            continue
        if is_limited != runs[-1][2]:
            runs.append((begin, A, is_limited))
        A = _before(end, runs[-1], row, weight, k)
    return runs, 1 - A**k


@jit
def _before(rank: int, run: Run, row: Row, weight: float, k: int) -> float:
    """`A` before the token of that rank in the run, or after its last one."""
    _, _, p_sum, q_sum = row
    first, A, is_limited = run
    if is_limited:
        return max(A**k - weight * (p_sum[rank] - p_sum[first]), 0.0) ** (1 / k)
    return max(A - (q_sum[rank] - q_sum[first]), 0.0)


@jit
def _flow(A: float, q: float, k: int) -> float:
    """`A^k - (A - q)^k`, without cancellation."""
    return min(q, A) * _powers(A, max(A - q, 0.0), k)


@jit
def _powers(a: float, b: float, k: int) -> float:
    """`(a^k - b^k) / (a - b)`, by the binary digits of k."""
    total = 0.0
    b_before = doubled = (
        1.0  # b to the power of the digits before this one; the quotient of this one
    )
    while k > 0:
        if k & 1:
            total = total * a + b_before * doubled
            b_before *= b
        doubled *= a + b
        a *= a
        b *= b
        k >>= 1
    return total


@jit
def _alive(
    runs: list[Run], row: Row, weight: float, k: int, rank: int, m: float, q: float
) -> tuple[float, float]:
    """P(a draw of the token is alive), and the token's flow."""
    r = len(runs) - 1
    while runs[r][0] > rank:
        r -= 1
    A = _before(rank, runs[r], row, weight, k)
    if A**k <= NOTHING or min(m, q) <= 0:
        return 0.0, 0.0
    if not runs[r][2]:
        return 1.0, _flow(A, q, k)
    after = _before(rank + 1, runs[r], row, weight, k)
    return min(m / (q * _powers(A, after, k)), 1.0), m


@jit
def _rank(row: Row, token: int, ratio: float) -> int:
    """The rank of a token of that ratio, which may be rounded differently, by bisection."""
    tokens_S, ratio_S, _, _ = row
    low = 0
    high = len(tokens_S) - 1
    while low < high:
        middle = (low + high) // 2
        if ratio_S[middle] * MARGIN < ratio:
            low = middle + 1
        else:
            high = middle
    rank = low
    while rank < len(tokens_S) - 1 and ratio_S[rank] <= ratio * MARGIN:
        if tokens_S[rank] == token:
            return rank
        rank += 1
    return rank


class Priority(TopDownRule):
    name = "priority"
    rule = FirstInRank()


class LiftedPriority(Lifted):
    name = "lifted_priority"
    rule = FirstInRank()
