"""Labels of branches: walks down a text with several branches on it. Part of `data_gen.text_labels.labels`.

A walk begins where a tree's branches begin, with K branches, and goes one token of the text further at every level. At
a level, k branches still stand on the text. One of their k next tokens, at some place, is the text's token x; the
others, its siblings, are drawn. If m of the k are x, the walk's weight is multiplied by `k q(x) / (m p(x))`, and m
branches go on. Walks with equally many branches take a step together, and all walks share one sort of each row. Where
branches begin with different tokens, one branch at most is on the text after the first level (`greedy_entries`).

Legend: B branching positions, V vocabulary, L trunk lengths, M walks, m walks after their siblings are drawn, k
child-list entries, N questions put to a bottom-up rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

from data_gen.text_labels.greedy_entries import greedy_entries
from data_gen.verification.base import BottomUp, TopDown
from data_gen.verification.distributions import divide
from data_gen.verification.sorted_rows import SortedRows
from selector.actions import GREEDY, ActionSpace

# M walks, one for every *cell* (a branching position and a K) and draw of its siblings:
#   "cell", "k"   the walk's cell, and the number of its branches that are still on the text, int64 [M];
#   "weight"      its probability among the walks of its cell, times `k q / (m p)` of all levels so far, [M];
#   "pulled", v   for top-down verifier v: P(it accepts down to here), [M];
#   "left", v     for bottom-up verifier v: P(earlier siblings reject), [M, L], as the weight depends on the trunk;
#   "entry", v    for bottom-up verifier v: the entry weight, [M, L].
State = dict[Any, Tensor]


class Walks:
    """The walks of some verifiers, all of one style; `siblings` and `generator` as in `label_text`."""

    def __init__(
        self,
        verifiers: Sequence[TopDown | BottomUp],
        siblings: int | None,
        generator: torch.Generator | None,
        space: ActionSpace,
    ) -> None:
        self.top_down = {v: each for v, each in enumerate(verifiers) if isinstance(each, TopDown)}
        self.bottom_up = {v: each for v, each in enumerate(verifiers) if isinstance(each, BottomUp)}
        self.siblings, self.generator, self.space = siblings, generator, space
        self.style = verifiers[0].style

    def down(
        self,
        rows: SortedRows,
        tokens_B: Tensor,
        count: int,
        weights_BL: dict[int, Tensor],
        likely_BK: Tensor | None = None,
    ) -> list[Tensor]:
        """P(at least that deep, along the text) / P(text) of branches from each of the first `count` rows, by verifier:
        float64 [count, max_K - 1, max_L2] for top-down ones, [count, max_K - 1, max_L2, L] for bottom-up ones.

        Args:
            rows: the rows after consecutive tokens of the text, at least max_L2 - 1 more than `count`.
            tokens_B: the token that follows each row.
            weights_BL: by bottom-up verifier, the entry weight of a branching position after a trunk of each length.
            likely_BK: the draft's max_K most likely tokens after each of the `count` rows, for greedy branches.
        """
        widths = self.space.max_K - 1
        cell_M = torch.arange(count * widths, device=rows.device)
        one_M = torch.ones(len(cell_M), dtype=torch.float64, device=rows.device)
        state: State = {"cell": cell_M, "k": 2 + cell_M % widths, "weight": one_M}
        state |= {("pulled", v): one_M for v in self.top_down}
        for v in self.bottom_up:
            state["entry", v] = weights_BL[v].repeat_interleave(widths, dim=0)
            state["left", v] = torch.ones_like(state["entry", v])
        levels: dict[int, list[Tensor]] = {v: [] for v in range(len(self.top_down) + len(self.bottom_up))}
        for level in range(self.space.max_L2):
            parts = [
                self._step(_take(state, (state["k"] == k).nonzero()[:, 0]), k, rows, level, tokens_B, likely_BK)
                for k in state["k"].unique().tolist()
            ]
            if parts:  # no walk is left where no greedy branch begins with the text's token
                state = {key: torch.cat([part[key] for part in parts]) for key in state}
            for v, totals in levels.items():
                of_M = state["pulled", v] if v in self.top_down else state["left", v] * state["entry", v]
                own_M = (state["weight"] if of_M.ndim == 1 else state["weight"].unsqueeze(-1)) * of_M
                totals.append(own_M.new_zeros(len(one_M), *own_M.shape[1:]).index_add_(0, state["cell"], own_M))
        return [torch.stack(totals, dim=1).unflatten(0, (count, widths)) for totals in levels.values()]

    def _step(
        self, state: State, k: int, rows: SortedRows, level: int, tokens_B: Tensor, likely_BK: Tensor | None
    ) -> State:
        row_M = state["cell"].div(self.space.max_K - 1, rounding_mode="floor") + level
        x_M1 = tokens_B[row_M].unsqueeze(-1)
        p_M1, q_M1 = rows.at(row_M).at(x_M1)
        if k == 1:
            state["weight"] = state["weight"] * divide(q_M1, p_M1)[:, 0]
            for v, top_down in self.top_down.items():
                state["pulled", v] = state["pulled", v] * top_down.accept(p_M1, q_M1)[:, 0]
            for v in self.bottom_up:
                state["entry", v] = (state["entry", v] * divide(p_M1, q_M1)).clamp(max=1)
            return state
        if self.style == GREEDY:  # only the first level has several branches
            assert likely_BK is not None
            asked = row_M, x_M1[:, 0], likely_BK[row_M, :k], self.siblings, self._uniform
            source_m, entries_mk, factor_m = greedy_entries(rows, *asked)
        else:
            source_m, entries_mk, factor_m = self._entries(rows, row_M, x_M1[:, 0], k, first=level == 0)
            factor_m = factor_m * k * divide(q_M1, p_M1)[source_m, 0] / (entries_mk == x_M1[source_m]).sum(-1)
        state, row_m = _take(state, source_m), row_M[source_m]
        is_text_mk = entries_mk == x_M1[source_m]
        state["k"] = is_text_mk.sum(-1)
        state["weight"] = state["weight"] * factor_m
        for v, top_down in self.top_down.items():
            pull_mk = top_down.pull(rows.at(row_m), entries_mk)
            state["pulled", v] = state["pulled", v] * (pull_mk * is_text_mk).sum(-1)
        for v, bottom_up in self.bottom_up.items():
            reject_mL, entry_mL = _enter(bottom_up, rows, row_m, entries_mk, is_text_mk, state["entry", v])
            state["left", v], state["entry", v] = state["left", v] * reject_mL, entry_mL
        return state

    def _entries(
        self, rows: SortedRows, row_M: Tensor, x_M: Tensor, k: int, first: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Child lists in which one entry, at a uniform place, is the text's token and the others are drawn.

        Returns, for m walks: the one of the M that each comes from, its child list [m, k], and its probability.
        """
        if self.siblings is None:
            return _all_entries(rows, row_M, x_M, k)
        # Where the branches begin, every place is taken in turn: for rules that try children in order, the place of the
        # text's token gives most of a label's variance. Further down several branches are rare, and one place is drawn.
        times, places = (self.siblings, k) if first else (1, 1)
        drawn_m = torch.arange(len(row_M), device=rows.device).repeat_interleave(times)
        siblings_mk = rows.draw(row_M[drawn_m], self._uniform(len(drawn_m), k - 1).to(rows.device))
        source_m, siblings_mk = drawn_m.repeat_interleave(places), siblings_mk.repeat_interleave(places, dim=0)
        if first:
            place_m1 = torch.arange(k, device=rows.device).repeat(len(drawn_m)).unsqueeze(-1)
        else:
            place_m1 = (self._uniform(len(drawn_m), 1) * k).long().to(rows.device)
        x_m1 = x_M[source_m].unsqueeze(-1)
        entries_mk = torch.cat([x_m1, siblings_mk], dim=-1)  # the text's token comes first, then changes places
        entries_mk[:, :1] = entries_mk.gather(-1, place_m1)
        entries_mk.scatter_(-1, place_m1, x_m1)
        return source_m, entries_mk, torch.full_like(source_m, 1 / (times * places), dtype=torch.float64)

    def _uniform(self, *shape: int) -> Tensor:
        place = self.generator.device if self.generator is not None else "cpu"
        return torch.rand(shape, generator=self.generator, dtype=torch.float64, device=place)


def _take(state: State, walks_m: Tensor) -> State:
    return {key: values_M[walks_m] for key, values_M in state.items()}


def _all_entries(rows: SortedRows, row_M: Tensor, x_M: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `Walks._entries`, with every list of siblings."""
    vocabulary = range(rows.p_NV.shape[-1])
    lists = [(*rest[:place], -1, *rest[place:]) for place in range(k) for rest in product(vocabulary, repeat=k - 1)]
    source_m = torch.arange(len(row_M), device=rows.device).repeat_interleave(len(lists))
    entries_mk = torch.tensor(lists, device=rows.device).repeat(len(row_M), 1)
    drawn_mk = entries_mk >= 0
    entries_mk = torch.where(drawn_mk, entries_mk, x_M[source_m].unsqueeze(-1))
    _, q_mk = rows.at(row_M[source_m]).at(entries_mk)
    return source_m, entries_mk, torch.where(drawn_mk, q_mk, 1.0).prod(-1) / k


def _enter(
    verifier: BottomUp, rows: SortedRows, row_M: Tensor, entries_Mk: Tensor, is_text_Mk: Tensor, entry_ML: Tensor
) -> tuple[Tensor, Tensor]:
    """P(the siblings visited before the text's token reject), and its entry weight, [M, L] each."""
    lengths, k = entry_ML.shape[-1], entries_Mk.shape[-1]
    # trunks of several lengths often give the same weight, and each question is asked once
    new_ML = torch.ones_like(entry_ML, dtype=torch.bool)
    new_ML[:, 1:] = entry_ML[:, 1:] != entry_ML[:, :-1]
    each_N, inverse_ML = new_ML.flatten().nonzero()[:, 0], (new_ML.flatten().cumsum(0) - 1).view_as(entry_ML)
    walk_N = each_N // lengths
    entry_Nk, _, order_Nk = verifier.split(rows.at(row_M[walk_N]), entry_ML.flatten()[each_N], entries_Mk[walk_N])
    text_Nk = is_text_Mk[walk_N]
    if order_Nk is not None:
        entry_Nk, text_Nk = entry_Nk.gather(-1, order_Nk), text_Nk.gather(-1, order_Nk)
    before_Nk = torch.arange(k, device=entry_Nk.device) < text_Nk.to(torch.uint8).argmax(-1, keepdim=True)
    reject_N = torch.where(before_Nk, 1 - entry_Nk, 1.0).prod(-1)
    own_N = (entry_Nk * text_Nk).sum(-1)  # copies of a token have no weight of their own
    return reject_N[inverse_ML], own_N[inverse_ML]
