"""Arithmetic on next-token distributions that all verifiers share.

Every residual of Naive, SpecInfer, K-SEQ and Traversal is `(a p - b q)+` with two scalars: to
subtract a multiple of `q` from such a residual, or to scale it, gives another one. So a rule
carries `a` and `b` for each node, and reads the vocabulary only through `excess`. Sorting is far
slower, and only the rules that need the order itself sort (`ranked`).

Along a text, though, hundreds of trees ask for different `a` and `b` at one position, and share one
sort (`SortedRows`): with the tokens in ascending `q/p`, those with `q/p < a/b` stand first, and the
sum of `(a p - b q)+` is `a P - b Q` with two prefix sums.

Legend: N tree nodes, P positions of a text, M nodes taken at once, V vocabulary, S tokens that the
draft can say, k child-list entries, n draws for each of M rows. Scalars are float64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

BLOCK = 256
SMALL = 1 << 16  # elements; below, the call of torch itself takes as long as the sum
# on the CPU, rows longer than this are taken one at a time: they fill the cache
ROW_BY_ROW = 1 << 14


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient of non-negative numbers, and 0 where the denominator is 0: impossible events
    have weight 0."""
    return (numerator / denominator).nan_to_num_(nan=0.0, posinf=0.0)


def row_sums(rows_NV: Tensor) -> Tensor:
    """Sums over the vocabulary, float64 [..., N]; long rows are summed in blocks in their own
    precision first."""
    if rows_NV.dtype == torch.float64 or rows_NV.is_cuda or rows_NV.numel() < SMALL:
        return rows_NV.sum(-1, dtype=torch.float64)
    # on the CPU a wide sum in float64 first copies its rows
    whole = rows_NV.shape[-1] // BLOCK * BLOCK
    blocks = rows_NV[..., :whole].unflatten(-1, (-1, BLOCK)).sum(-1)
    return blocks.sum(-1, dtype=torch.float64) + rows_NV[..., whole:].sum(-1, dtype=torch.float64)


class Ranked(NamedTuple):
    """Distributions in descending `p/q`, ties by token id; tokens that the draft never takes (q =
    0) stand last. On the host, because rules that need the order read one token after another."""

    places_NV: Tensor  # of each token
    p_NV: Tensor
    q_NV: Tensor


class Rows:
    """The target's and the draft's distributions after all nodes, and the factors that make each
    row sum to one.

    Arithmetic over the vocabulary is done in the rows' own precision (at least float32), sums and
    scalars in float64.
    """

    def __init__(self, p_NV: Tensor, q_NV: Tensor) -> None:
        wide = torch.promote_types(p_NV.dtype, torch.float32)
        self.p_NV = p_NV.to(wide)
        self.q_NV = q_NV.to(wide)
        self.p_scale_N = 1 / row_sums(self.p_NV)
        # NaN at leaves that hold NaN, where it is never read
        self.q_scale_N = 1 / row_sums(self.q_NV)
        self._ranked: Ranked | None = None
        self._is_ranked_N = torch.zeros(len(p_NV), dtype=torch.bool)

    def at(self, nodes_M: Tensor) -> NodeDistributions:
        return NodeDistributions(self, nodes_M)

    @property
    def device(self) -> torch.device:
        return self.p_NV.device

    def ranked(self, nodes_M: Tensor) -> Ranked:
        """The rows in rank order, of which those at the given nodes may be read; each row is sorted
        once."""
        if self._ranked is None:
            self._ranked = self._new_ranked()
        ranked = self._ranked
        new_m = nodes_M.cpu().unique()
        new_m = new_m[~self._is_ranked_N[new_m]]
        for part_m in new_m.split(max(1, SMALL // self.p_NV.shape[-1])):
            p_mV, q_mV = self.at(part_m.to(self.device)).exact()
            p_mV = p_mV.cpu()
            q_mV = q_mV.cpu()
            ratio_mV = torch.where(q_mV > 0, p_mV / q_mV, -1.0)
            tokens_mV = ratio_mV.argsort(dim=-1, descending=True, stable=True)
            ranked.p_NV[part_m] = p_mV.gather(-1, tokens_mV)
            ranked.q_NV[part_m] = q_mV.gather(-1, tokens_mV)
            places_mV = torch.empty_like(tokens_mV)
            in_order_mV = torch.arange(tokens_mV.shape[-1]).expand_as(tokens_mV)
            ranked.places_NV[part_m] = places_mV.scatter_(-1, tokens_mV, in_order_mV)
        self._is_ranked_N[new_m] = True
        return ranked

    def _new_ranked(self) -> Ranked:
        shape = self.p_NV.shape
        return Ranked(
            places_NV=torch.empty(shape, dtype=torch.int64),
            p_NV=torch.empty(shape, dtype=torch.float64),
            q_NV=torch.empty(shape, dtype=torch.float64),
        )


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
        all_at_once = len(self.nodes_M) == 0 or self.rows.p_NV.shape[-1] <= ROW_BY_ROW
        if all_at_once or self.rows.device.type != "cpu":
            return row_sums(self.residual(a_M, b_M))
        # one row at a time, as a (p - b/a q)+, which needs three passes over the row and one
        # temporary
        p_rates = (a_M * self._p_scale_M).tolist()
        q_rates = (b_M * self._q_scale_M).tolist()
        # b/a overflows at tiny weights, where nothing is left of p
        most = torch.finfo(self.rows.p_NV.dtype).max
        sums: list[Tensor] = []
        for n, a, b in zip(self.nodes_M.tolist(), p_rates, q_rates, strict=True):
            if a > 0:
                p_V = self.rows.p_NV[n]
                q_V = self.rows.q_NV[n]
                ratio = min(b / a, most)
                sums.append(a * row_sums(torch.sub(p_V, q_V, alpha=ratio).relu_()))
            else:
                sums.append(a_M.new_zeros(()))
        return torch.stack(sums)

    def excess_and_slope(self, a_M: Tensor, b_M: Tensor) -> tuple[Tensor, Tensor]:
        """`excess`, and the draft's mass on the tokens that it sums over, which is minus its slope
        in b."""
        residual_MV = self.residual(a_M, b_M)
        mass_M = row_sums((residual_MV > 0) * self._q_MV) * self._q_scale_M
        return row_sums(residual_MV), mass_M

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


class SortedRows(Rows):
    """As `Rows`, with each row's tokens in ascending `q/p` and prefix sums of p and q in float64.
    Only tokens that the draft can say are sorted; the others have `q/p = 0`, so they come before
    all of these."""

    def __init__(
        self,
        p_PV: Tensor,
        q_PV: Tensor,
        before: SortedRows | None = None,
        kept: int = 0,
        said_S: Tensor | None = None,
    ) -> None:
        """The last `kept` rows of `before` stand before the new ones. Its memory is reused, because
        new memory takes as long as the sorts; so `before` must not be used any more. Outside the
        tokens `said_S`, int64, all q are 0; None: any token may have some."""
        self._said_S = said_S
        self._memory: dict[str, Tensor] = {}
        self._old = slice(0)  # the rows that are kept
        if before is not None:
            self._memory = before._memory
            self._old = slice(len(before.p_NV) - kept, len(before.p_NV))
        self._count = kept + len(p_PV)
        vocabulary = p_PV.shape[-1]
        wide = torch.promote_types(p_PV.dtype, torch.float32)
        all_p_PV = self._rows("p", vocabulary, wide, p_PV.device)
        all_q_PV = self._rows("q", vocabulary, wide, p_PV.device)
        all_p_PV[kept:] = p_PV
        all_q_PV[kept:] = q_PV
        super().__init__(all_p_PV, all_q_PV)
        support_size = vocabulary if said_S is None else len(said_S)
        self.ratio_PS = self._rows("ratio", support_size, wide, self.device)
        self.tokens_PS = self._rows("tokens", support_size, torch.int64, self.device)
        sums = support_size + 1
        self.p_sum_PS = self._rows("sums of p", sums, torch.float64, self.device)
        self.q_sum_PS = self._rows("sums of q", sums, torch.float64, self.device)
        if self.device.type == "cpu":
            rows_at_once = max(1, SMALL // support_size)
        else:
            rows_at_once = len(p_PV)
        for begin in range(kept, self._count, rows_at_once):
            self._sort(slice(begin, begin + rows_at_once))
        if before is not None and before._ranked is not None:
            self._ranked = self._new_ranked()
            self._is_ranked_N[:kept] = before._is_ranked_N[self._old]

    def _sort(self, rows: slice) -> None:
        p_PS = self.p_NV[rows]
        q_PS = self.q_NV[rows]
        if self._said_S is not None:
            p_PS = p_PS.index_select(-1, self._said_S)
            q_PS = q_PS.index_select(-1, self._said_S)
        p_scale_P1 = self.p_scale_N[rows].unsqueeze(-1)
        q_scale_P1 = self.q_scale_N[rows].unsqueeze(-1)
        scale_P1 = (q_scale_P1 / p_scale_P1).to(p_PS.dtype)
        ratio_PS, order_PS = torch.where(p_PS > 0, q_PS / p_PS * scale_P1, torch.inf).sort(dim=-1)
        self.ratio_PS[rows] = ratio_PS
        self.tokens_PS[rows] = order_PS
        self.p_sum_PS[rows, 0] = 0
        self.p_sum_PS[rows, 1:] = _sums_in_order(p_PS, order_PS) * p_scale_P1
        self.q_sum_PS[rows, 0] = 0
        self.q_sum_PS[rows, 1:] = _sums_in_order(q_PS, order_PS) * q_scale_P1
        if self._said_S is not None:
            self.tokens_PS[rows] = self._said_S[order_PS]
            # of all tokens with q = 0
            self.p_sum_PS[rows] += (1 - self.p_sum_PS[rows, -1:]).clamp(min=0)

    def _rows(self, name: str, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        old = self._memory.get(name, torch.empty(0, width, dtype=dtype, device=device))
        kept = old[self._old].clone()
        if len(old) < self._count:
            capacity = self._count + self._count // 4  # later blocks also hold rows that were kept
            self._memory[name] = torch.empty(capacity, width, dtype=dtype, device=device)
        rows = self._memory[name][: self._count]
        rows[: len(kept)] = kept
        return rows

    def _new_ranked(self) -> Ranked:
        vocabulary = self.p_NV.shape[-1]
        host = torch.device("cpu")
        return Ranked(
            places_NV=self._rows("places", vocabulary, torch.int64, host),
            p_NV=self._rows("ranked p", vocabulary, torch.float64, host),
            q_NV=self._rows("ranked q", vocabulary, torch.float64, host),
        )

    def at(self, nodes_M: Tensor) -> SortedDistributions:
        return SortedDistributions(self, nodes_M)

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


def _sums_in_order(probs_PS: Tensor, order_PS: Tensor) -> Tensor:
    """Prefix sums of the probabilities, taken in an order."""
    return probs_PS.gather(-1, order_PS).cumsum(-1, dtype=torch.float64)


class SortedDistributions(NodeDistributions):
    rows: SortedRows

    def excess(self, a_M: Tensor, b_M: Tensor) -> Tensor:
        return self.excess_and_slope(a_M, b_M)[0]

    def draft_mass_off(self, entries_Mk: Tensor) -> Tensor:
        """As in `NodeDistributions`, with one sum over the vocabulary for all equal questions."""
        asked_M = torch.cat([self.nodes_M.unsqueeze(-1), entries_Mk.sort(dim=-1).values], dim=-1)
        asked_m, inverse_M = asked_M.unique(dim=0, return_inverse=True)
        return NodeDistributions(self.rows, asked_m[:, 0]).draft_mass_off(asked_m[:, 1:])[inverse_M]

    def excess_and_slope(self, a_M: Tensor, b_M: Tensor) -> tuple[Tensor, Tensor]:
        start_M = self.nodes_M * self.rows.ratio_PS.shape[-1]
        threshold_M = a_M / b_M
        below_M = self.rows.leading(
            self.rows.ratio_PS, start_M, lambda ratio_M: ratio_M < threshold_M
        )
        at_M = self.nodes_M * self.rows.p_sum_PS.shape[-1] + below_M
        q_M = self.rows.q_sum_PS.take(at_M)
        return (a_M * self.rows.p_sum_PS.take(at_M) - b_M * q_M).clamp_(min=0), q_M
