"""Arithmetic on next-token distributions that all verifiers share.

Every residual of Naive, SpecInfer, K-SEQ and Traversal is `(a p - b q)+` with two scalars: to
subtract a multiple of `q` from such a residual, or to scale it, gives another one. So a rule
carries `a` and `b` for each node, and reads the vocabulary only through `excess`. Sorting is
slower, and only the rules that need the order itself sort (`ranking.SortedRows`).

On the CPU the sums over the vocabulary are compiled: one pass over a row, without temporaries.

Legend: N tree nodes, M nodes taken at once, V vocabulary, k child-list entries, n draws for each of
M rows. Scalars are float64.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from selector.jit import jit

Array = NDArray[np.float64]  # or float32
Integers = NDArray[np.int64]
# For compiled rules: q/p in order of rank, the sums of p and q in that order, and their scales, 1;
# where it is not sorted no q/p, p and q themselves, and what makes them sum to one
Row = tuple[Array, Array, Array, float, float]
HostRows = tuple[Array, Array, Array, Array, Integers]  # rows, and which of them M questions are of

BLOCK = 256


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient of non-negative numbers, and 0 where the denominator is 0: impossible events
    have weight 0."""
    return (numerator / denominator).nan_to_num_(nan=0.0, posinf=0.0)


def row_sums(rows_NV: Tensor) -> Tensor:
    """Sums over the vocabulary, float64 [..., N]."""
    if rows_NV.device.type != "cpu":
        return rows_NV.sum(-1, dtype=torch.float64)
    flat_MV = rows_NV.flatten(0, -2)
    return torch.from_numpy(_sums(flat_MV.numpy())).view(rows_NV.shape[:-1])


@jit
def _sum(row_V: Array) -> float:
    total = 0.0
    for x in range(len(row_V)):
        total += row_V[x]
    return total


@jit
def _sums(rows_NV: Array) -> Array:
    sums_N = np.empty(len(rows_NV))
    for n in range(len(rows_NV)):
        sums_N[n] = _sum(rows_NV[n])
    return sums_N


@jit
def _ratio(p_V: Array, q_V: Array, token: int) -> float:
    if q_V[token] <= 0:
        return 0.0
    return p_V[token] / _sum(p_V) / (q_V[token] / _sum(q_V))


@jit
def _excess(row: Row, a: float, b: float) -> float:
    ratio_S, p_S, q_S, p_scale, q_scale = row
    if len(ratio_S) > 0:
        below = np.searchsorted(ratio_S, a / b)
        return max(a * p_S[below] - b * q_S[below], 0.0)
    a *= p_scale
    b *= q_scale
    total = 0.0
    for x in range(len(p_S)):
        total += max(a * p_S[x] - b * q_S[x], 0.0)
    return total


@jit
def _row(rows: HostRows, question: int) -> Row:
    ratio_PS, p_PS, q_PS, scale_2P, nodes_M = rows
    n = nodes_M[question]
    return ratio_PS[n], p_PS[n], q_PS[n], scale_2P[0, n], scale_2P[1, n]


@jit
def _excesses(rows: HostRows, a_M: Array, b_M: Array) -> Array:
    excess_M = np.empty(len(a_M))
    for m in range(len(a_M)):
        excess_M[m] = _excess(_row(rows, m), a_M[m], b_M[m])
    return excess_M


@jit
def _rejections(rows: HostRows, w_M: Array, steps_Mk: Array) -> Array:
    """As `NodeDistributions.rejections`."""
    states_3Mr = np.empty((3, len(w_M), steps_Mk.shape[1] + 1))
    for m in range(len(w_M)):
        row = _row(rows, m)
        a = w_M[m]
        b = 0.0
        lost = 1 - a
        states_3Mr[:, m, 0] = a, b, 1 - lost
        for r in range(steps_Mk.shape[1]):
            b += steps_Mk[m, r]
            total = _excess(row, a, b) + lost
            share = 1 / total if total > 0 else 0.0  # 0 where nothing is left
            a *= share
            b *= share
            lost *= share
            states_3Mr[:, m, r + 1] = a, b, 1 - lost
    return states_3Mr


class Rows:
    """The target's and the draft's distributions after all nodes, and the factors that make each
    row sum to one.

    Tensors over the vocabulary have the rows' own precision (at least float32), sums and scalars
    float64.
    """

    def __init__(self, p_NV: Tensor, q_NV: Tensor) -> None:
        wide = torch.promote_types(p_NV.dtype, torch.float32)
        self.p_NV = p_NV.to(wide).contiguous()
        self.q_NV = q_NV.to(wide).contiguous()

    @cached_property
    def scale_2N(self) -> Tensor:
        """Of p and q. NaN at leaves that hold NaN, where it is never read."""
        return torch.stack([row_sums(self.p_NV), row_sums(self.q_NV)]).reciprocal_()

    def at(self, nodes_M: Tensor) -> NodeDistributions:
        return NodeDistributions(self, nodes_M.to(self.device))

    def ratio(self, token: int) -> float:
        """`p/q` of a token after the first node, on the CPU."""
        return float(_ratio(self.p_NV[0].numpy(), self.q_NV[0].numpy(), token))

    @property
    def device(self) -> torch.device:
        return self.p_NV.device


class NodeDistributions:
    """The distributions at M nodes."""

    in_order: Any = None  # the same, sorted, once a rule has asked for them

    def __init__(self, rows: Rows, nodes_M: Tensor) -> None:
        self.rows = rows
        self.nodes_M = nodes_M

    @cached_property
    def _scale_2M(self) -> Tensor:
        return self.rows.scale_2N[:, self.nodes_M]

    def at(self, entries_Mk: Tensor) -> tuple[Tensor, Tensor]:
        nodes_M1 = self.nodes_M.unsqueeze(-1)
        p_Mk = self.rows.p_NV[nodes_M1, entries_Mk].double() * self._scale_2M[0].unsqueeze(-1)
        q_Mk = self.rows.q_NV[nodes_M1, entries_Mk].double() * self._scale_2M[1].unsqueeze(-1)
        return p_Mk, q_Mk

    def residual(self, a_M: Tensor, b_M: Tensor) -> Tensor:
        """`(a p - b q)+`, [M, V] in the rows' precision."""
        a_M1 = (a_M * self._scale_2M[0]).unsqueeze(-1).to(self.rows.p_NV.dtype)
        b_M1 = (b_M * self._scale_2M[1]).unsqueeze(-1).to(self.rows.p_NV.dtype)
        return self.p_MV.mul(a_M1).sub_(self.q_MV * b_M1).clamp_(min=0)

    def excess(self, a_M: Tensor, b_M: Tensor) -> Tensor:
        """`sum_x (a p(x) - b q(x))+`, [M]. `sum_x min(a p, b q)` is `a` less this."""
        if self.rows.device.type != "cpu":
            return row_sums(self.residual(a_M, b_M))
        return torch.from_numpy(_excesses(self.on_host, host(a_M), host(b_M)))

    def exact(self) -> tuple[Tensor, Tensor]:
        """p and q, float64 [M, V], summing to one."""
        p_MV = self.p_MV.double() * self._scale_2M[0].unsqueeze(-1)
        return p_MV, self.q_MV.double() * self._scale_2M[1].unsqueeze(-1)

    @property
    def on_host(self) -> HostRows:
        ratio_M0 = torch.empty(len(self.nodes_M), 0)
        all_M = torch.arange(len(self.nodes_M))
        tensors = ratio_M0, self.p_MV, self.q_MV, self._scale_2M, all_M
        return cast(HostRows, tuple(map(host, tensors)))

    def rejections(self, w_M: Tensor, steps_Mk: Tensor) -> Tensor:
        """`a`, `b` and `w` of the targets `w p_i = (a p - b q)+` before and after every rejection
        of a draw whose law is `q` times its step; float64 [3, M, k + 1].

        A rejection makes `w p_i` into `(w p_i - q_i)+ / (S + 1 - w)`, and `1 - w` into `(1 - w) /
        (S + 1 - w)`; from `w = 1` that is recursive rejection. A weight of 1 stays 1, as the root
        must accept in the end.
        """
        states_3Mr = _rejections(self.on_host, host(w_M), host(steps_Mk))
        return torch.from_numpy(states_3Mr).to(self.rows.device)

    def draft_mass_off(self, entries_Mk: Tensor) -> Tensor:
        """`q`'s mass outside the entries, [M]."""
        return row_sums(self.q_MV.scatter(-1, entries_Mk, 0.0)) * self._scale_2M[1]

    def ones(self) -> Tensor:
        return torch.ones_like(self._scale_2M[0])

    @cached_property
    def p_MV(self) -> Tensor:  # up to a factor, in the rows' precision
        return self._taken(self.rows.p_NV)

    @cached_property
    def q_MV(self) -> Tensor:
        return self._taken(self.rows.q_NV)

    def _taken(self, rows_NV: Tensor) -> Tensor:
        if len(self.nodes_M) == 1 and not self.nodes_M.is_cuda:
            # a view, which saves the copy of a long row
            return rows_NV[int(self.nodes_M)].unsqueeze(0)
        return rows_NV.index_select(0, self.nodes_M)  # several times faster than indexing


def host(tensor: Tensor) -> Any:
    return tensor.cpu().contiguous().numpy()


def first_copies(entries_Mk: Tensor) -> Tensor:
    """For each entry, the position of the first entry with the same token, [M, k] int64."""
    return (entries_Mk.unsqueeze(-1) == entries_Mk.unsqueeze(-2)).to(torch.uint8).argmax(-1)


def pooled(weights_Mk: Tensor, entries_Mk: Tensor) -> Tensor:
    """The weights of equal tokens added up at their first entry, 0 at the others, [M, k]."""
    return torch.zeros_like(weights_Mk).scatter_add_(-1, first_copies(entries_Mk), weights_Mk)


def is_copy(entries_Mk: Tensor) -> Tensor:
    return first_copies(entries_Mk) != torch.arange(entries_Mk.shape[-1], device=entries_Mk.device)


def first_accepted(accept_Mk: Tensor) -> Tensor:
    """P(an entry is accepted and none before it was), if each is accepted independently, [M, k]."""
    reached_Mk = torch.cat(
        [torch.ones_like(accept_Mk[:, :1]), (1 - accept_Mk[:, :-1]).cumprod(-1)], dim=-1
    )
    return accept_Mk * reached_Mk


def by_ratio(node: NodeDistributions, entries_Mk: Tensor) -> Tensor:
    """Positions of the entries in descending `p/q`, ties by token id; int64 [M, k]."""
    p_Mk, q_Mk = node.at(entries_Mk)
    by_token_Mk = entries_Mk.argsort(dim=-1, stable=True)
    ratio_Mk = divide(p_Mk, q_Mk).gather(-1, by_token_Mk)
    return by_token_Mk.gather(-1, ratio_Mk.argsort(dim=-1, descending=True, stable=True))


def most_likely(probs_NV: Tensor, count: int, logits_NV: Tensor | None = None) -> Tensor:
    """The most probable tokens, then among those of probability 0 the ones with the largest logits
    (at temperature 0 one token has all the probability); int64 [N, count], or fewer where the
    vocabulary is smaller. Any leading axes."""
    count = min(count, probs_NV.shape[-1])
    top = probs_NV.topk(count)
    ranking_NV = probs_NV if logits_NV is None else logits_NV
    rest_NV = ranking_NV.masked_fill(probs_NV > 0, -torch.inf)
    possible_N1 = (top.values > 0).sum(-1, keepdim=True)
    places_NK = torch.arange(count, device=probs_NV.device) - possible_N1
    later_NK = rest_NV.topk(count).indices.gather(-1, places_NK.clamp(min=0))
    return torch.where(places_NK < 0, top.indices, later_NK)


def sample(probs_V: Tensor, count: int, generator: torch.Generator | None) -> Tensor:
    """`count` i.i.d. draws from each row, normalised or not, int64 [..., count]; no token of
    probability 0."""
    shape = (*probs_V.shape[:-1], count)
    u = torch.rand(shape, generator=generator, dtype=torch.float64, device=probs_V.device)
    return invert(probs_V, u)


def invert(probs_V: Tensor, u: Tensor) -> Tensor:
    """Tokens by inversion of the rows' cumulative distributions at `u`, in [0, 1); int64 in the
    shape of `u`, [..., n].

    First the block of tokens is found, then the token in it, because a GPU sums up one long row
    slowly."""
    vocabulary = probs_V.shape[-1]
    blocks_BW = pad(probs_V, (0, -vocabulary % BLOCK)).unflatten(-1, (-1, BLOCK))
    cdf_B = blocks_BW.sum(-1, dtype=torch.float64).cumsum(-1)
    block = _passed(cdf_B, u * cdf_B[..., -1:])
    left = u * cdf_B[..., -1:] - pad(cdf_B, (1, 0)).gather(-1, block)
    cdf_nW = blocks_BW.take_along_dim(block.unsqueeze(-1), -2).cumsum(-1, dtype=torch.float64)
    token = block * BLOCK + _passed(cdf_nW, left.unsqueeze(-1))[..., 0]
    # an index beyond the last, from rows of NaN, kills a GPU's context
    return token.clamp_(max=vocabulary - 1)


def _passed(cdf_V: Tensor, at: Tensor) -> Tensor:
    """The first places at which `cdf_V` is above the numbers `at`, int64 in their shape; where
    rounding leaves a number at the total or below 0, the last or the first place with mass."""
    below_total = torch.nextafter(cdf_V[..., -1:], torch.zeros_like(cdf_V[..., -1:]))
    drawn = torch.searchsorted(cdf_V, torch.minimum(at.clamp(min=0), below_total), right=True)
    return drawn.clamp_(max=cdf_V.shape[-1] - 1)
