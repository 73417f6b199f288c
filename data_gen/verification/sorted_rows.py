"""Rows whose vocabulary is sorted once, so that every later sum over it is a look-up.

The sum of `(a p - b q)+` is over the tokens with `q/p < a/b`. With the tokens in ascending `q/p` these stand first, and
the sum is `a P - b Q` with two prefix sums. Along a text, hundreds of trees ask for different `a` and `b` at one
position, and share one sort. While decoding, a node is asked a few times only, and `NodeDistributions` is faster.

Legend: P rows, V vocabulary, M questions, n draws for each question.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from data_gen.verification.distributions import RANKED, SMALL, NodeDistributions, Ranked, Rows


class SortedRows(Rows):
    """As `Rows`, with each row's tokens in ascending `q/p` and prefix sums of p and q in float64."""

    def __init__(self, p_PV: Tensor, q_PV: Tensor, before: SortedRows | None = None, kept: int = 0) -> None:
        """The last `kept` rows of `before` stand before the new ones. Its memory is taken over, and it must not be used
        any more: the system would take as long to give new memory as the sorts take."""
        self._memory: dict[str, Tensor] = {} if before is None else before._memory
        self._old = slice(0) if before is None else slice(len(before.p_NV) - kept, len(before.p_NV))
        self._count, vocabulary = kept + len(p_PV), p_PV.shape[-1]
        wide = torch.promote_types(p_PV.dtype, torch.float32)
        mine = [self._rows(name, vocabulary, wide, p_PV.device) for name in ("p", "q")]
        for own_PV, new_PV in zip(mine, (p_PV, q_PV), strict=True):
            own_PV[kept:] = new_PV
        super().__init__(*mine)
        self.ratio_PV = self._rows("ratio", vocabulary, wide, self.device)
        self.tokens_PV = self._rows("tokens", vocabulary, torch.int64, self.device)
        self.p_sum_PV, self.q_sum_PV = (
            self._rows(name, vocabulary + 1, torch.float64, self.device) for name in ("sums of p", "sums of q")
        )
        together = max(1, SMALL // vocabulary) if self.device.type == "cpu" else len(p_PV)
        for begin in range(kept, self._count, together):
            self._sort(slice(begin, begin + together))
        if before is not None and before._ranked is not None:
            self._ranked = self._new_ranked()
            self._is_ranked_N[:kept] = before._is_ranked_N[self._old]

    def _sort(self, rows: slice) -> None:
        p_PV, q_PV, scales = self.p_NV[rows], self.q_NV[rows], (self.p_scale_N[rows], self.q_scale_N[rows])
        scale_P1 = (scales[1] / scales[0]).unsqueeze(-1).to(p_PV.dtype)
        ratio_PV, tokens_PV = torch.where(p_PV > 0, q_PV / p_PV * scale_P1, torch.inf).sort(dim=-1)
        self.ratio_PV[rows], self.tokens_PV[rows] = ratio_PV, tokens_PV
        for sum_PV, each_PV, scale_P in zip((self.p_sum_PV, self.q_sum_PV), (p_PV, q_PV), scales, strict=True):
            sum_PV[rows, 0] = 0
            sum_PV[rows, 1:] = each_PV.gather(-1, tokens_PV).cumsum(-1, dtype=torch.float64) * scale_P.unsqueeze(-1)

    def _rows(self, name: str, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        old = self._memory.get(name, torch.empty(0, width, dtype=dtype, device=device))
        kept = old[self._old].clone()
        if len(old) < self._count:
            capacity = self._count + self._count // 4  # the first block has no rows before it, and later ones have
            self._memory[name] = torch.empty(capacity, width, dtype=dtype, device=device)
        rows = self._memory[name][: self._count]
        rows[: len(kept)] = kept
        return rows

    def _new_ranked(self) -> Ranked:
        fields = zip(Ranked._fields, RANKED, strict=True)
        vocabulary, host = self.p_NV.shape[-1], torch.device("cpu")
        return Ranked(*(self._rows(f"ranked {name}", vocabulary, dtype, host) for name, dtype in fields))

    def at(self, nodes_M: Tensor) -> SortedDistributions:
        return SortedDistributions(self, nodes_M)

    def draw(self, nodes_M: Tensor, uniform_Mn: Tensor) -> Tensor:
        """Tokens drawn from the draft's distributions, int64 [M, n], from uniform numbers in [0, 1)."""
        total_M1 = self.q_sum_PV[nodes_M, -1:]
        wanted_Mn = torch.minimum(uniform_Mn * total_M1, torch.nextafter(total_M1, torch.zeros_like(total_M1)))
        start_Mn = nodes_M.unsqueeze(-1).expand_as(wanted_Mn) * self.q_sum_PV.shape[-1] + 1
        place_Mn = self.leading(self.q_sum_PV, start_Mn, lambda sum_Mn: sum_Mn <= wanted_Mn)
        return self.tokens_PV[nodes_M.unsqueeze(-1), place_Mn.clamp(max=self.tokens_PV.shape[-1] - 1)]

    def leading(self, values: Tensor, start_M: Tensor, holds: Callable[[Tensor], Tensor]) -> Tensor:
        """How many of V values in a row `holds`, which is true of leading ones alone; by a bisection of all at once.
        `start_M` is where each question's first value stands in `values`."""
        vocabulary, count_M = self.tokens_PV.shape[-1], torch.zeros_like(start_M)
        for bit in reversed(range(vocabulary.bit_length())):
            probe_M = count_M + (1 << bit)
            value_M = values.take(start_M + (probe_M - 1).clamp(max=vocabulary - 1))
            count_M = torch.where(holds(value_M) & (probe_M <= vocabulary), probe_M, count_M)
        return count_M


class SortedDistributions(NodeDistributions):
    rows: SortedRows

    def excess(self, a_M: Tensor, b_M: Tensor) -> Tensor:
        return self.excess_and_slope(a_M, b_M)[0]

    def draft_mass_off(self, entries_Mk: Tensor) -> Tensor:
        """As for single nodes, with one sum over the vocabulary for all equal questions."""
        asked_M = torch.cat([self.nodes_M.unsqueeze(-1), entries_Mk], dim=-1)
        each_m, inverse_M = asked_M.unique(dim=0, return_inverse=True)
        return NodeDistributions(self.rows, each_m[:, 0]).draft_mass_off(each_m[:, 1:])[inverse_M]

    def excess_and_slope(self, a_M: Tensor, b_M: Tensor) -> tuple[Tensor, Tensor]:
        start_M, threshold_M = self.nodes_M * self.rows.ratio_PV.shape[-1], a_M / b_M
        below_M = self.rows.leading(self.rows.ratio_PV, start_M, lambda ratio_M: ratio_M < threshold_M)
        at_M = self.nodes_M * self.rows.p_sum_PV.shape[-1] + below_M
        q_M = self.rows.q_sum_PV.take(at_M)
        return (a_M * self.rows.p_sum_PV.take(at_M) - b_M * q_M).clamp_(min=0), q_M
