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

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from selector.jit import jit

Array = NDArray[np.float64]  # or float32
Integers = NDArray[np.int64]

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
    all_M = torch.arange(len(flat_MV))
    return torch.from_numpy(_sums(flat_MV.numpy(), all_M.numpy())).view(rows_NV.shape[:-1])


@jit
def _sums(rows_NV: Array, nodes_M: Integers) -> Array:
    sums_M = np.empty(len(nodes_M))
    for m in range(len(nodes_M)):
        row_V = rows_NV[nodes_M[m]]
        total = 0.0
        for x in range(len(row_V)):
            total += row_V[x]
        sums_M[m] = total
    return sums_M


@jit
def _excess(p_NV: Array, q_NV: Array, nodes_M: Integers, a_M: Array, b_M: Array) -> Array:
    excess_M = np.empty(len(nodes_M))
    for m in range(len(nodes_M)):
        p_V = p_NV[nodes_M[m]]
        q_V = q_NV[nodes_M[m]]
        total = 0.0
        for x in range(len(p_V)):
            total += max(a_M[m] * p_V[x] - b_M[m] * q_V[x], 0.0)
        excess_M[m] = total
    return excess_M


class Rows:
    """The target's and the draft's distributions after all nodes, and the factors that make each
    row sum to one.

    Tensors over the vocabulary have the rows' own precision (at least float32), sums and scalars
    float64. On the CPU only `read_M` are normalised (None: all), and no other row may be read but
    up to a factor.
    """

    def __init__(self, p_NV: Tensor, q_NV: Tensor, read_M: Tensor | None = None) -> None:
        wide = torch.promote_types(p_NV.dtype, torch.float32)
        self.p_NV = p_NV.to(wide).contiguous()
        self.q_NV = q_NV.to(wide).contiguous()
        # NaN at leaves that hold NaN, where it is never read
        self.p_scale_N = 1 / _sums_at(self.p_NV, read_M)
        self.q_scale_N = 1 / _sums_at(self.q_NV, read_M)

    def at(self, nodes_M: Tensor) -> NodeDistributions:
        return NodeDistributions(self, nodes_M)

    @property
    def device(self) -> torch.device:
        return self.p_NV.device


def _sums_at(rows_NV: Tensor, read_M: Tensor | None) -> Tensor:
    if read_M is None or rows_NV.device.type != "cpu":
        return row_sums(rows_NV)
    sums_N = torch.full((len(rows_NV),), torch.nan, dtype=torch.float64)
    sums_N[read_M] = torch.from_numpy(_sums(rows_NV.numpy(), read_M.numpy()))
    return sums_N


class NodeDistributions:
    """The distributions at M nodes."""

    def __init__(self, rows: Rows, nodes_M: Tensor) -> None:
        self.rows = rows
        self.nodes_M = nodes_M
        self._p_scale_M = rows.p_scale_N[nodes_M]
        self._q_scale_M = rows.q_scale_N[nodes_M]

    def at(self, entries_Mk: Tensor) -> tuple[Tensor, Tensor]:
        nodes_M1 = self.nodes_M.unsqueeze(-1)
        p_Mk = self.rows.p_NV[nodes_M1, entries_Mk].double() * self._p_scale_M.unsqueeze(-1)
        q_Mk = self.rows.q_NV[nodes_M1, entries_Mk].double() * self._q_scale_M.unsqueeze(-1)
        return p_Mk, q_Mk

    def residual(self, a_M: Tensor, b_M: Tensor) -> Tensor:
        """`(a p - b q)+`, [M, V] in the rows' precision."""
        a_M1 = (a_M * self._p_scale_M).unsqueeze(-1).to(self.rows.p_NV.dtype)
        b_M1 = (b_M * self._q_scale_M).unsqueeze(-1).to(self.rows.p_NV.dtype)
        return self._p_MV.mul(a_M1).sub_(self._q_MV * b_M1).clamp_(min=0)

    def excess(self, a_M: Tensor, b_M: Tensor) -> Tensor:
        """`sum_x (a p(x) - b q(x))+`, [M]. `sum_x min(a p, b q)` is `a` less this."""
        if self.rows.device.type != "cpu":
            return row_sums(self.residual(a_M, b_M))
        rates_M = a_M * self._p_scale_M, b_M * self._q_scale_M
        arrays = (
            tensor.numpy() for tensor in (self.rows.p_NV, self.rows.q_NV, self.nodes_M, *rates_M)
        )
        return torch.from_numpy(_excess(*arrays))

    def exact(self) -> tuple[Tensor, Tensor]:
        """p and q, float64 [M, V], summing to one."""
        p_MV = self._p_MV.double() * self._p_scale_M.unsqueeze(-1)
        q_MV = self._q_MV.double() * self._q_scale_M.unsqueeze(-1)
        return p_MV, q_MV

    def draft_mass_off(self, entries_Mk: Tensor) -> Tensor:
        """`q`'s mass outside the entries, [M]."""
        return row_sums(self._q_MV.scatter(-1, entries_Mk, 0.0)) * self._q_scale_M

    def ones(self) -> Tensor:
        return torch.ones_like(self._p_scale_M)

    @cached_property
    def _p_MV(self) -> Tensor:
        return self._taken(self.rows.p_NV)

    @cached_property
    def _q_MV(self) -> Tensor:
        return self._taken(self.rows.q_NV)

    def _taken(self, rows_NV: Tensor) -> Tensor:
        if len(self.nodes_M) == 1 and not self.nodes_M.is_cuda:
            # a view, which saves the copy of a long row
            return rows_NV[int(self.nodes_M)].unsqueeze(0)
        return rows_NV.index_select(0, self.nodes_M)  # several times faster than indexing


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


def sample(probs_V: Tensor, count: int, generator: torch.Generator) -> Tensor:
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
