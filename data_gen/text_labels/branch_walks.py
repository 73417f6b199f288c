"""Labels of branches: walks down a text with several branches on it. Part of `data_gen.text_labels.labels`.

A walk begins where a tree's branches begin, with K branches, and goes one token of the text further at every level. At
a level, k branches still stand on the text. One of their k next tokens, at some place, is the text's token x; the
others, its siblings, are drawn. If m of the k are x, the walk's weight is multiplied by `k q(x) / (m p(x))`, and m
branches go on. All walks of a level that have equally many branches take their step together.

The rows are those after consecutive tokens, and all walks that begin in them share one sort of each row
(`SortedRows`): at a single row there may meet hundreds of walks, from every depth, K and trunk length.

Legend: B branching positions, V vocabulary, L trunk lengths, M walks, m walks after their siblings are drawn, k
child-list entries, N questions put to a bottom-up rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from data_gen.verification import BottomUp, TopDown
from data_gen.verification.distributions import divide
from data_gen.verification.sorted_rows import SortedRows
from selector.actions import ActionSpace


@dataclass
class States:
    """What is known of M walks: one for every *cell* (a branching position and a K) and draw of its siblings.

    Attributes:
        cell_M: the walk's cell.
        k_M: its branches that are still on the text.
        weight_M: its probability among the walks of its cell, times `k q / (m p)` of all levels so far.
        pulled: by top-down verifier, P(it accepts down to here), [M].
        entered: by bottom-up verifier, P(earlier siblings reject) and the entry weight, [M, L] each: the weight at the
            branching node depends on the trunk.
    """

    cell_M: Tensor
    k_M: Tensor
    weight_M: Tensor
    pulled: dict[int, Tensor]
    entered: dict[int, tuple[Tensor, Tensor]]

    def take(self, index_M: Tensor) -> States:
        return States(
            self.cell_M[index_M],
            self.k_M[index_M],
            self.weight_M[index_M],
            {v: values[index_M] for v, values in self.pulled.items()},
            {v: (left[index_M], entry[index_M]) for v, (left, entry) in self.entered.items()},
        )

    @staticmethod
    def joined(parts: Sequence[States]) -> States:
        first = parts[0]
        return States(
            torch.cat([part.cell_M for part in parts]),
            torch.cat([part.k_M for part in parts]),
            torch.cat([part.weight_M for part in parts]),
            {v: torch.cat([part.pulled[v] for part in parts]) for v in first.pulled},
            {
                v: (torch.cat([p.entered[v][0] for p in parts]), torch.cat([p.entered[v][1] for p in parts]))
                for v in first.entered
            },
        )


class Walks:
    """The walks of some verifiers; `siblings` and `generator` as in `label_text`."""

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

    def down(self, rows: SortedRows, tokens_B: Tensor, count: int, weights_BL: dict[int, Tensor]) -> list[Tensor]:
        """How branches survive that begin at the first `count` of some rows, for every verifier.

        Args:
            rows: those after consecutive tokens of the text, at least max_L2 - 1 more than `count`.
            tokens_B: the token that follows each row.
            weights_BL: by bottom-up verifier, the weight with which a branching position is entered after a trunk of
                each length.

        Returns:
            P(at least that deep, along the text) / P(text), float64 [count, max_K - 1, max_L2] for top-down verifiers;
            for bottom-up ones, whose weight depends on the trunk, [count, max_K - 1, max_L2, L].
        """
        widths, device = self.space.max_K - 1, rows.device
        cell_M = torch.arange(count * widths, device=device)
        one_M = torch.ones(len(cell_M), dtype=torch.float64, device=device)
        pulled = dict.fromkeys(self.top_down, one_M)
        entered = {}
        for v, weight_BL in weights_BL.items():
            weight_ML = weight_BL.repeat_interleave(widths, dim=0)
            entered[v] = torch.ones_like(weight_ML), weight_ML
        states = States(cell_M, 2 + cell_M % widths, one_M, pulled, entered)
        levels: dict[int, list[Tensor]] = {v: [] for v in (*pulled, *entered)}
        for level in range(self.space.max_L2):
            row_M = states.cell_M.div(widths, rounding_mode="floor") + level
            parts = [
                self._step(states.take(index_m), int(k), rows, row_M[index_m], tokens_B, first=level == 0)
                for k in states.k_M.unique().tolist()
                for index_m in ((states.k_M == k).nonzero()[:, 0],)
            ]
            states = States.joined(parts)
            for v, pulled_M in states.pulled.items():
                total_M = torch.zeros_like(one_M).index_add_(0, states.cell_M, states.weight_M * pulled_M)
                levels[v].append(total_M)
            for v, (left_ML, entry_ML) in states.entered.items():
                total_ML = torch.zeros(len(one_M), entry_ML.shape[-1], dtype=torch.float64, device=device)
                own_ML = states.weight_M.unsqueeze(-1) * left_ML * entry_ML
                levels[v].append(total_ML.index_add_(0, states.cell_M, own_ML))
        return [torch.stack(levels[v], dim=1).unflatten(0, (count, widths)) for v in sorted(levels)]

    def _step(self, states: States, k: int, rows: SortedRows, row_M: Tensor, tokens_B: Tensor, first: bool) -> States:
        """One token further down the text, for walks with k branches on it."""
        x_M1 = tokens_B[row_M].unsqueeze(-1)
        p_M1, q_M1 = rows.at(row_M).at(x_M1)
        ratio_M = divide(q_M1, p_M1)[:, 0]
        if k == 1:
            states.weight_M = states.weight_M * ratio_M
            for v in states.pulled:
                states.pulled[v] = states.pulled[v] * self.top_down[v].accept(p_M1, q_M1)[:, 0]
            for v, (left_ML, entry_ML) in states.entered.items():
                states.entered[v] = left_ML, (entry_ML * divide(p_M1, q_M1)).clamp(max=1)
            return states
        source_m, entries_mk, probability_m = self._entries(rows, row_M, x_M1[:, 0], k, first)
        states, row_M, ratio_M = states.take(source_m), row_M[source_m], ratio_M[source_m]
        is_text_mk = entries_mk == x_M1[source_m]
        states.k_M = is_text_mk.sum(-1)
        states.weight_M = states.weight_M * probability_m * k * ratio_M / states.k_M
        for v in states.pulled:
            pull_mk = self.top_down[v].pull(rows.at(row_M), entries_mk)
            states.pulled[v] = states.pulled[v] * (pull_mk * is_text_mk).sum(-1)
        for v, (left_ML, entry_ML) in states.entered.items():
            states.entered[v] = self._enter(self.bottom_up[v], rows, row_M, entries_mk, is_text_mk, left_ML, entry_ML)
        return states

    def _enter(
        self,
        verifier: BottomUp,
        rows: SortedRows,
        row_M: Tensor,
        entries_Mk: Tensor,
        is_text_Mk: Tensor,
        left_ML: Tensor,
        entry_ML: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """P(earlier siblings reject) and the entry weight, one node further down a bottom-up walk, [M, L] each."""
        lengths, k = entry_ML.shape[-1], entries_Mk.shape[-1]
        each_N, inverse_N = _distinct(entry_ML)
        node = rows.at(row_M[each_N // lengths])
        split = verifier.split(node, entry_ML.flatten()[each_N], entries_Mk[each_N // lengths])
        entry_Nk, text_Nk = split.entry_Mk, is_text_Mk[each_N // lengths]
        if split.order_Mk is not None:
            entry_Nk, text_Nk = entry_Nk.gather(-1, split.order_Mk), text_Nk.gather(-1, split.order_Mk)
        before_Nk = torch.arange(k, device=entry_Nk.device) < text_Nk.to(torch.uint8).argmax(-1, keepdim=True)
        reject_N = torch.where(before_Nk, 1 - entry_Nk, 1.0).prod(-1)
        own_N = (entry_Nk * text_Nk).sum(-1)  # copies of a token have no weight of their own
        return left_ML * reject_N[inverse_N].view_as(left_ML), own_N[inverse_N].view_as(entry_ML)

    def _entries(
        self, rows: SortedRows, row_M: Tensor, x_M: Tensor, k: int, first: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Child lists in which one entry, at a uniform place, is the text's token and the others are drawn.

        Returns:
            m walks for the M: which each comes from, its child list [m, k], and its probability.
        """
        device = rows.device
        if self.siblings is None:
            V = rows.p_NV.shape[-1]
            lists = [
                (*rest[:place], -1, *rest[place:]) for place in range(k) for rest in product(range(V), repeat=k - 1)
            ]
            lists_ck = torch.tensor(lists, device=device)
            source_m = torch.arange(len(row_M), device=device).repeat_interleave(len(lists))
            entries_mk = lists_ck.repeat(len(row_M), 1)
            drawn_mk = entries_mk >= 0
            entries_mk = torch.where(drawn_mk, entries_mk, x_M[source_m].unsqueeze(-1))
            _, q_mk = rows.at(row_M[source_m]).at(entries_mk)
            return source_m, entries_mk, torch.where(drawn_mk, q_mk, 1.0).prod(-1) / k
        # where the branches begin, every place is taken in turn: for rules that try children in order, the place of the
        # text's token is most of a label's noise. Further down, where several branches seldom stand, one at random
        times, places = (self.siblings, k) if first else (1, 1)
        drawn_m = torch.arange(len(row_M), device=device).repeat_interleave(times)
        siblings_mk = rows.draw(row_M[drawn_m], self._uniform(len(drawn_m), k - 1).to(device))
        source_m, siblings_mk = drawn_m.repeat_interleave(places), siblings_mk.repeat_interleave(places, dim=0)
        if first:
            place_m1 = torch.arange(k, device=device).repeat(len(drawn_m)).unsqueeze(-1)
        else:
            place_m1 = (self._uniform(len(drawn_m), 1) * k).long().to(device)
        x_m1 = x_M[source_m].unsqueeze(-1)
        entries_mk = torch.cat([x_m1, siblings_mk], dim=-1)  # the text's token first: it changes places
        entries_mk[:, :1] = entries_mk.gather(-1, place_m1)
        entries_mk.scatter_(-1, place_m1, x_m1)
        share = 1 / (times * places)
        return source_m, entries_mk, torch.full((len(source_m),), share, dtype=torch.float64, device=device)

    def _uniform(self, *shape: int) -> Tensor:
        place = self.generator.device if self.generator is not None else "cpu"
        return torch.rand(shape, generator=self.generator, dtype=torch.float64, device=place)


def _distinct(entry_ML: Tensor) -> tuple[Tensor, Tensor]:
    """Of M x L entry weights, the positions of those that differ from their left neighbour, and which of these each
    equals: trunks of several lengths often bring the same weight, and then ask the same question."""
    new_ML = torch.ones_like(entry_ML, dtype=torch.bool)
    new_ML[:, 1:] = entry_ML[:, 1:] != entry_ML[:, :-1]
    return new_ML.flatten().nonzero()[:, 0], new_ML.flatten().cumsum(0) - 1
