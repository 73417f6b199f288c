"""Rows whose vocabulary is sorted once, so that every later sum over it is a look-up.

The sum of `(a p - b q)+` is over the tokens with `q/p < a/b`. With the tokens in ascending `q/p` these stand first, and
the sum is `a P - b Q` with two prefix sums. Along a text, hundreds of trees ask for different `a` and `b` at one
position, and share one sort. While decoding, a node is asked a few times only, and `NodeDistributions` is faster.

Legend: P rows, V vocabulary, M questions, n draws for each question.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from data_gen.verification.distributions import NodeDistributions, Rows


class SortedRows(Rows):
    """As `Rows`, with each row's tokens in ascending `q/p` and prefix sums of p and q in float64."""

    def __init__(self, p_PV: Tensor, q_PV: Tensor) -> None:
        super().__init__(p_PV, q_PV)
        scale_P1 = (self.q_scale_N / self.p_scale_N).unsqueeze(-1).to(self.p_NV.dtype)
        ratio_PV = torch.where(self.p_NV > 0, self.q_NV / self.p_NV * scale_P1, torch.inf)
        ratio_PV, self.tokens_PV = ratio_PV.sort(dim=-1)
        self.bits = ratio_PV.shape[-1].bit_length()
        self.ratio_PV = pad(ratio_PV, (0, (1 << self.bits) - ratio_PV.shape[-1]), value=torch.inf)
        self.p_sum_PV, self.q_sum_PV = (
            pad(rows_PV.gather(-1, self.tokens_PV).cumsum(-1, dtype=torch.float64) * scale_P.unsqueeze(-1), (1, 0))
            for rows_PV, scale_P in ((self.p_NV, self.p_scale_N), (self.q_NV, self.q_scale_N))
        )

    def at(self, nodes_M: Tensor) -> SortedDistributions:
        return SortedDistributions(self, nodes_M)

    def draw(self, nodes_M: Tensor, uniform_Mn: Tensor) -> Tensor:
        """Tokens drawn from the draft's distributions, int64 [M, n], from uniform numbers in [0, 1)."""
        total_M1 = self.q_sum_PV[nodes_M, -1:]
        wanted_Mn = torch.minimum(uniform_Mn * total_M1, torch.nextafter(total_M1, torch.zeros_like(total_M1)))
        together = len(self.p_NV)  # every question copies its row of sums
        parts = zip(nodes_M.split(together), wanted_Mn.split(together), strict=True)
        place_Mn = torch.cat([torch.searchsorted(self.q_sum_PV[m, 1:], each, right=True) for m, each in parts])
        return self.tokens_PV[nodes_M.unsqueeze(-1), place_Mn.clamp(max=self.tokens_PV.shape[-1] - 1)]


class SortedDistributions(NodeDistributions):
    """The distributions at M of the rows."""

    rows: SortedRows

    def excess(self, a_M: Tensor, b_M: Tensor) -> Tensor:
        return self.excess_and_slope(a_M, b_M)[0]

    def excess_and_slope(self, a_M: Tensor, b_M: Tensor) -> tuple[Tensor, Tensor]:
        at_M = self.nodes_M * self.rows.p_sum_PV.shape[-1] + self._below(a_M / b_M)
        q_M = self.rows.q_sum_PV.take(at_M)
        return (a_M * self.rows.p_sum_PV.take(at_M) - b_M * q_M).clamp_(min=0), q_M

    def _below(self, threshold_M: Tensor) -> Tensor:
        """How many tokens of each row have `q/p` below the threshold, by a bisection of all rows at once."""
        start_M = self.nodes_M * self.rows.ratio_PV.shape[-1] - 1
        count_M = torch.zeros_like(start_M)
        for bit in reversed(range(self.rows.bits)):
            probe_M = count_M + (1 << bit)
            count_M = torch.where(self.rows.ratio_PV.take(start_M + probe_M) < threshold_M, probe_M, count_M)
        return count_M
