"""Arithmetic on rows of probabilities that every verifier shares.

Every residual of Naive, SpecInfer, K-SEQ and Traversal is `(a p - b q)+` with two scalars: subtracting a multiple of
`q` from such a residual, and scaling it, gives another one. So a rule carries `a` and `b` per node, and reads the
vocabulary only through `excess`. To sort 152,000 tokens takes as long as some 25 such passes (`make bench`), so only
the rules that need the order itself sort (`ranked`).

Legend: N tree nodes, M nodes taken at once, V vocabulary, k child-list entries. Scalars are float64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

BLOCK = 256
SMALL = 1 << 16  # elements; below, the call of torch itself takes as long as the sum
ROW_BY_ROW = 1 << 14  # on the CPU, rows longer than this are taken one at a time: they fill the cache


def normalised(probs_V: Tensor) -> Tensor:
    """Rows [..., V] in float64, divided by their sum: float32 and bf16 rows do not sum to one exactly."""
    probs_V = probs_V.double()
    return probs_V / probs_V.sum(-1, keepdim=True)


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient of non-negative numbers, and 0 where the denominator is 0, for what never happens has weight 0."""
    return (numerator / denominator).nan_to_num_(nan=0.0, posinf=0.0)


def row_sums(rows_NV: Tensor) -> Tensor:
    """Sums over the vocabulary, [..., N] float64: blocks are summed in the rows' own precision, then in float64."""
    if rows_NV.dtype == torch.float64 or rows_NV.is_cuda or rows_NV.numel() < SMALL:
        return rows_NV.sum(-1, dtype=torch.float64)
    whole = rows_NV.shape[-1] // BLOCK * BLOCK  # on the CPU a wide sum in float64 first copies its rows
    blocks = rows_NV[..., :whole].unflatten(-1, (-1, BLOCK)).sum(-1)
    return blocks.sum(-1, dtype=torch.float64) + rows_NV[..., whole:].sum(-1, dtype=torch.float64)


class Rows:
    """The target's and the draft's distributions after all nodes, and the factors that make each row sum to one.

    Arithmetic over the vocabulary is done in the rows' own precision (at least float32), sums and scalars in float64.
    So float32 and bf16 rows, which do not sum to one exactly, stand for the distributions they are proportional to.
    """

    def __init__(self, p_NV: Tensor, q_NV: Tensor) -> None:
        wide = torch.promote_types(p_NV.dtype, torch.float32)
        self.p_NV, self.q_NV = p_NV.to(wide), q_NV.to(wide)
        self.p_scale_N = 1 / row_sums(self.p_NV)
        self.q_scale_N = 1 / row_sums(self.q_NV)  # NaN at leaves that hold NaN; never read

    def at(self, nodes_M: Tensor) -> NodeDistributions:
        return NodeDistributions(self, nodes_M)

    @property
    def device(self) -> torch.device:
        return self.p_NV.device


class Ranked(NamedTuple):
    """Rows in descending `p/q`, ties by token id; tokens that the draft never takes (q = 0) stand last."""

    tokens_MV: Tensor
    places_MV: Tensor  # of each token
    p_MV: Tensor
    q_MV: Tensor


class NodeDistributions:
    """The distributions at M nodes. Rules read the vocabulary only through these methods.

    `on_slots` overrides some of them for nodes that have fewer entries than others.
    """

    allows_host_sync: ClassVar[bool] = True  # whether a rule may read numbers back to decide what it does next

    def __init__(self, rows: Rows, nodes_M: Tensor) -> None:
        self.rows, self.nodes_M = rows, nodes_M
        self._p_scale_M, self._q_scale_M = rows.p_scale_N[nodes_M], rows.q_scale_N[nodes_M]

    def at(self, entries_Mk: Tensor) -> tuple[Tensor, Tensor]:
        """p and q of the given tokens, [M, k] each."""
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
        if not self._long:
            return row_sums(self.residual(a_M, b_M))
        # one row at a time, as a (p - b/a q)+: three passes over the row, with one temporary
        p_rate, q_rate = (a_M * self._p_scale_M).tolist(), (b_M * self._q_scale_M).tolist()
        most = torch.finfo(self.rows.p_NV.dtype).max  # where a weight is tiny, nothing is left of p
        sums = [
            a * row_sums(torch.sub(self.rows.p_NV[n], self.rows.q_NV[n], alpha=min(b / a, most)).relu_())
            if a > 0
            else a_M.new_zeros(())
            for n, a, b in zip(self.nodes_M.tolist(), p_rate, q_rate, strict=True)
        ]
        return torch.stack(sums)

    def excess_and_slope(self, a_M: Tensor, b_M: Tensor) -> tuple[Tensor, Tensor]:
        """`excess`, and the draft's mass on the tokens that it sums over (its slope in b, negated); [M] each."""
        residual_MV = self.residual(a_M, b_M)
        mass_M = row_sums((residual_MV > 0) * self._q_MV) * self._q_scale_M
        return row_sums(residual_MV), mass_M

    @cached_property
    def ranked(self) -> Ranked:
        """The vocabulary in the order of `p/q`; float64."""
        p_MV, q_MV = self.exact()
        ratio_MV = torch.where(q_MV > 0, p_MV / q_MV, -1.0)
        tokens_MV = ratio_MV.argsort(dim=-1, descending=True, stable=True)
        return Ranked(tokens_MV, tokens_MV.argsort(-1), p_MV.gather(-1, tokens_MV), q_MV.gather(-1, tokens_MV))

    def exact(self) -> tuple[Tensor, Tensor]:
        """p and q, float64 [M, V], summing to one."""
        p_MV = self._p_MV.double() * self._p_scale_M.unsqueeze(-1)
        return p_MV, self._q_MV.double() * self._q_scale_M.unsqueeze(-1)

    def draft_mass_off(self, entries_Mk: Tensor) -> Tensor:
        """`q`'s mass off the entries before each one, and off all of them, [M, k + 1]; summed, to full precision."""
        q_MV = self._q_MV.clone()
        masses = [q_MV.sum(-1, dtype=torch.float64)]
        for entry_M in entries_Mk.unbind(-1):
            masses.append(q_MV.scatter_(-1, entry_M.unsqueeze(-1), 0.0).sum(-1, dtype=torch.float64))
        return torch.stack(masses, dim=-1) * self._q_scale_M.unsqueeze(-1)

    def ones(self) -> Tensor:
        return torch.ones_like(self._p_scale_M)

    def count(self, entries_Mk: Tensor) -> float | Tensor:
        """Entries of each node."""
        return entries_Mk.shape[-1]

    def present(self, entries_Mk: Tensor) -> Tensor:
        """1 where there is an entry, float64 [M, k]."""
        return torch.ones_like(entries_Mk, dtype=torch.float64)

    def cleared(self, rows_MV: Tensor, entries_Mk: Tensor) -> Tensor:
        """Rows with 0 at the entries; in place."""
        return rows_MV.scatter_(-1, entries_Mk, 0.0)

    def by_count(self, entries_Mk: Tensor, values: Callable[[int], Tensor]) -> Tensor:
        """What `values` gives for the nodes' number of entries, [M, k]."""
        return values(entries_Mk.shape[-1])

    @cached_property
    def _p_MV(self) -> Tensor:
        return _take(self.rows.p_NV, self.nodes_M)

    @cached_property
    def _q_MV(self) -> Tensor:
        return _take(self.rows.q_NV, self.nodes_M)

    @property
    def _long(self) -> bool:
        return self.rows.device.type == "cpu" and self.rows.p_NV.shape[-1] > ROW_BY_ROW


def _take(rows_NV: Tensor, nodes_M: Tensor) -> Tensor:
    if len(nodes_M) == 1 and not nodes_M.is_cuda:
        return rows_NV[int(nodes_M)].unsqueeze(0)  # a view: no copy of a long row
    return rows_NV.index_select(0, nodes_M)  # copies whole rows: several times faster than indexing


def powers(a: Tensor, b: Tensor, k: int) -> Tensor:
    """`(a^k - b^k) / (a - b)` without cancellation: tokens of tiny probability would otherwise drown in rounding."""
    return torch.stack([a ** (k - 1 - j) * b**j for j in range(k)]).sum(0)


def first_copies(entries_Mk: Tensor) -> Tensor:
    """For each entry, the position of the first entry with the same token, [M, k] int64."""
    equal_Mkk = entries_Mk.unsqueeze(-1) == entries_Mk.unsqueeze(-2)
    return equal_Mkk.to(torch.uint8).argmax(-1)


def pooled(weights_Mk: Tensor, entries_Mk: Tensor) -> Tensor:
    """The weights of equal tokens added up at their first entry, 0 at the others, [M, k]."""
    return torch.zeros_like(weights_Mk).scatter_add_(-1, first_copies(entries_Mk), weights_Mk)


def is_copy(entries_Mk: Tensor) -> Tensor:
    """Whether an equal token stands before this entry, bool [M, k]."""
    return first_copies(entries_Mk) != torch.arange(entries_Mk.shape[-1], device=entries_Mk.device)


def by_ratio(node: NodeDistributions, entries_Mk: Tensor) -> Tensor:
    """Positions of the entries in descending `p/q`, ties by token id; int64 [M, k]."""
    p_Mk, q_Mk = node.at(entries_Mk)
    by_token_Mk = entries_Mk.argsort(dim=-1, stable=True)
    ratio_Mk = divide(p_Mk, q_Mk).gather(-1, by_token_Mk)
    return by_token_Mk.gather(-1, ratio_Mk.argsort(dim=-1, descending=True, stable=True))


def sample(probs_V: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` i.i.d. draws from each row, int64 [..., count]; never a token of probability 0.

    Args:
        probs_V: [..., V], not necessarily normalised; summed in float64.
    """
    shape = (*probs_V.shape[:-1], count)
    return invert(probs_V, torch.rand(shape, generator=generator, dtype=torch.float64, device=probs_V.device))


def invert(probs_V: Tensor, u: Tensor) -> Tensor:
    """The tokens at which the rows' distribution functions pass `u`, in [0, 1); int64 in the shape of `u`, [..., n]."""
    cdf_V = probs_V.cumsum(-1, dtype=torch.float64)
    # rounding may put u * total on the total itself, one past the last token with mass
    below_total = torch.nextafter(cdf_V[..., -1:], torch.zeros_like(cdf_V[..., -1:]))
    drawn = torch.searchsorted(cdf_V, torch.minimum(u * cdf_V[..., -1:], below_total), right=True)
    return drawn.clamp_(max=probs_V.shape[-1] - 1)  # rows of NaN: an index beyond the last would kill a GPU's context
