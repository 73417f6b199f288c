"""Branches along a text: walks down from the position where a tree's branches begin.

A *cell* is such a position and a K. Its walks begin with K branches, go one token of the text
further at every depth, and keep the branches that still agree with the text. Walks with equally
many branches take a step together, and all walks share one sort of each distribution.

Legend: M walks, m walks after their siblings are drawn, B positions, V vocabulary, k child-list
entries, C cells, L trunk lengths (1 top-down).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data_gen.text_labels.acceptance import Acceptance
from data_gen.text_labels.siblings import NextTokens, Siblings
from data_gen.verification.distributions import divide
from data_gen.verification.ranking import SortedRows
from selector.actions import GREEDY, Grid


@dataclass
class Walks:
    """M walks with the numbers k of their branches that still agree with the text, and the weights
    by which the sum over a cell's walks is the mean over drafts given the text."""

    cell_M: Tensor
    branches_M: Tensor
    weight_M: Tensor
    acceptances: list[Acceptance]  # by verifier

    def of(self, walks_m: Tensor) -> Walks:
        return Walks(
            self.cell_M[walks_m],
            self.branches_M[walks_m],
            self.weight_M[walks_m],
            [acceptance.of(walks_m) for acceptance in self.acceptances],
        )

    @classmethod
    def joined(cls, parts: Sequence[Walks]) -> Walks:
        by_verifier = zip(*(part.acceptances for part in parts), strict=True)
        return cls(
            torch.cat([part.cell_M for part in parts]),
            torch.cat([part.branches_M for part in parts]),
            torch.cat([part.weight_M for part in parts]),
            [verifier_parts[0].joined(verifier_parts) for verifier_parts in by_verifier],
        )

    def totals(self, cells: int) -> list[Tensor]:
        """By verifier, for each cell, P(accepted down to here along the text) / P(text), [C, L]."""
        totals: list[Tensor] = []
        for acceptance in self.acceptances:
            accepted_ML = acceptance.rejected_ML * acceptance.entry_ML
            total_CL = accepted_ML.new_zeros(cells, accepted_ML.shape[-1])
            weighted_ML = self.weight_M.unsqueeze(-1) * accepted_ML
            totals.append(total_CL.index_add_(0, self.cell_M, weighted_ML))
        return totals


@dataclass
class Branches:
    """The branches of one style in a grid's trees, at each of the first `count` positions of
    consecutive distributions `rows`, which are at least max_L2 - 1 more.

    Attributes:
        tokens_B: the token that follows each distribution.
        likely_BK: for greedy branches, at least as many of the draft's most likely tokens at each
            position as there are branches.
    """

    style: str
    grid: Grid
    siblings: Siblings
    rows: SortedRows
    tokens_B: Tensor
    count: int
    likely_BK: Tensor | None

    def survivals(self, starts: Sequence[Acceptance]) -> list[Tensor]:
        """P(at least that deep, along the text) / P(text), for each verifier: float64 [count,
        K, max_L2, L]. `starts` are the acceptances before the branches, for each cell."""
        counts_K = torch.tensor(self.grid.widths, device=self.rows.device)
        cells = self.count * len(counts_K)
        cell_M = torch.arange(cells, device=self.rows.device)
        weight_M = torch.ones(cells, dtype=torch.float64, device=self.rows.device)
        walks = Walks(cell_M, counts_K.repeat(self.count), weight_M, list(starts))
        totals_by_depth: list[list[Tensor]] = []
        for depth in range(self.grid.max_L2):
            parts: list[Walks] = []
            for k in walks.branches_M.unique().tolist():
                walks_m = (walks.branches_M == k).nonzero()[:, 0]
                parts.append(self._step(walks.of(walks_m), k, depth))
            if parts:  # no walk is left where no greedy branch begins with the text's token
                walks = Walks.joined(parts)
            totals_by_depth.append(walks.totals(cells))
            if depth < len(self.grid.below):
                walks.branches_M = walks.branches_M * self.grid.below[depth]
        by_verifier: list[Tensor] = []
        for totals in zip(*totals_by_depth, strict=True):
            by_verifier.append(torch.stack(totals, dim=1).unflatten(0, (self.count, len(counts_K))))
        return by_verifier

    def _step(self, walks: Walks, k: int, depth: int) -> Walks:
        """One token of the text further, for walks with k branches on it."""
        row_M = walks.cell_M.div(len(self.grid.widths), rounding_mode="floor") + depth
        token_M1 = self.tokens_B[row_M].unsqueeze(-1)
        p_M1, q_M1 = self.rows.at(row_M).at(token_M1)
        if k == 1:
            return Walks(
                walks.cell_M,
                walks.branches_M,
                walks.weight_M * divide(q_M1, p_M1)[:, 0],
                [part.after_one_branch(p_M1, q_M1) for part in walks.acceptances],
            )
        following = NextTokens(row_M, token_M1, p_M1, q_M1)
        if self.style == GREEDY:  # only the first depth has several branches
            assert self.likely_BK is not None
            lists = self.siblings.greedy(self.rows, following, self.likely_BK[row_M, :k])
        else:
            lists = self.siblings.iid(self.rows, following, k, is_first=depth == 0)
        walk_m, entries_mk, weight_m = lists
        walks = walks.of(walk_m)
        is_text_mk = entries_mk == token_M1[walk_m]
        node = self.rows.at(row_M[walk_m])
        return Walks(
            walks.cell_M,
            is_text_mk.sum(-1),
            walks.weight_M * weight_m,
            [part.after_branches(node, entries_mk, is_text_mk) for part in walks.acceptances],
        )
