"""Child lists of a node on the text: which tokens are drafted beside the text's own.

I.i.d. branches: one of the k entries, at a uniformly drawn place, is the text's token x; the k - 1
others, its *siblings*, are drawn from q. If m of the k are x, the weight `k q(x) / (m p(x))`
corrects this draw to the law of drafts given the text.

Greedy branches begin with distinct tokens: the k - 1 most likely ones are children in every draft,
and the last child is drawn from the others (law q'). If x is among the fixed ones, the last child
is a sibling. If not, the last child must be x, and the weight is `q'(x) / p(x)`.

Legend: V vocabulary, M walks, m walks after their siblings are drawn, k child-list entries, n draws
for each walk, P places of the text's token.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor

from data_gen.verification.distributions import divide, invert, row_sums
from data_gen.verification.ranking import SortedRows

PLACES = 4  # of the text's token that are taken where branches begin


class NextTokens(NamedTuple):
    """The text's next tokens of M walks."""

    row_M: Tensor  # of the distributions before it
    token_M1: Tensor
    p_M1: Tensor  # its probabilities
    q_M1: Tensor


class ChildLists(NamedTuple):
    """Child lists of m walks, all with the text's token."""

    walk_m: Tensor  # which of the M walks goes on with the list
    entries_mk: Tensor
    # the chance of the list, times what corrects it to the law of drafts given the text
    weight_m: Tensor


@dataclass
class Siblings:
    """Draws of siblings: `count` for each walk, of which the mean is taken; None enumerates them,
    for small vocabularies."""

    count: int | None
    generator: torch.Generator | None

    def iid(self, rows: SortedRows, following: NextTokens, k: int, is_first: bool) -> ChildLists:
        """Child lists of k i.i.d. draws; at the first depth of a tree's branches, or below."""
        if self.count is None:
            lists = _all_lists(rows, following, k)
        else:
            lists = self._drawn_lists(rows, following, k, self.count if is_first else 1, is_first)
        walk_m, entries_mk, chance_m = lists
        copies_m = (entries_mk == following.token_M1[walk_m]).sum(-1)
        ratio_m = divide(following.q_M1, following.p_M1)[walk_m, 0]
        return ChildLists(walk_m, entries_mk, chance_m * k * ratio_m / copies_m)

    def _drawn_lists(
        self, rows: SortedRows, following: NextTokens, k: int, draws: int, is_first: bool
    ) -> ChildLists:
        """Lists and their chances. For rules that try children in order, the place of the text's
        token gives most of a label's variance. So where branches begin, one place of each of
        `PLACES` equal parts of the list is taken, which are all places of up to as many branches.
        Below, several branches on the text are rare, and one place is drawn."""
        walk_m = torch.arange(len(following.row_M), device=rows.device).repeat_interleave(draws)
        uniform_mk = self._uniform(len(walk_m), k - 1, rows.device)
        siblings_mk = rows.draw(following.row_M[walk_m], uniform_mk)
        places = min(k, PLACES) if is_first else 1
        shift_m1 = torch.zeros(len(walk_m), 1, device=rows.device)
        if places < k:
            shift_m1 = self._uniform(len(walk_m), 1, rows.device)
        part_P = torch.arange(places, device=rows.device)
        place_mP = ((part_P + shift_m1) * k / places).long().clamp(max=k - 1)
        place_m1 = place_mP.view(-1, 1)
        walk_m = walk_m.repeat_interleave(places)
        siblings_mk = siblings_mk.repeat_interleave(places, dim=0)
        chance = 1 / (draws * places)
        # the text's token stands first, then changes places
        text_m1 = following.token_M1[walk_m]
        entries_mk = torch.cat([text_m1, siblings_mk], dim=-1)
        entries_mk[:, :1] = entries_mk.gather(-1, place_m1)
        entries_mk.scatter_(-1, place_m1, text_m1)
        chance_m = torch.full_like(walk_m, chance, dtype=torch.float64)
        return ChildLists(walk_m, entries_mk, chance_m)

    def greedy(self, rows: SortedRows, following: NextTokens, likely_Mk: Tensor) -> ChildLists:
        """Child lists of greedy branches, where `likely_Mk` are the draft's k most likely tokens in
        order."""
        row_M, token_M1, p_M1, _ = following
        fixed_Mk = likely_Mk[:, :-1]
        last_M = likely_Mk[:, -1]
        others_MV = rows.q_NV[row_M].scatter_(-1, fixed_Mk, 0.0)  # q' up to a factor
        mass_M = row_sums(others_MV)
        is_certain_M = mass_M <= 0  # the last child is fixed, too
        others_MV[is_certain_M.nonzero()[:, 0], last_M[is_certain_M]] = 1.0
        mass_M = mass_M.where(~is_certain_M, 1.0)
        is_fixed_M = (fixed_Mk == token_M1).any(-1)
        with_sibling_m, sibling_m, chance_m = self._last_children(
            others_MV, mass_M, is_fixed_M.nonzero()[:, 0]
        )
        is_last_M = ~is_fixed_M & (others_MV.gather(-1, token_M1)[:, 0] > 0)
        as_last_m = is_last_M.nonzero()[:, 0]
        text_m = token_M1[as_last_m, 0]
        text_chance_m = others_MV[as_last_m, text_m].double() / mass_M[as_last_m]
        walk_m = torch.cat([with_sibling_m, as_last_m])
        last_m1 = torch.cat([sibling_m, text_m]).unsqueeze(-1)
        entries_mk = torch.cat([fixed_Mk[walk_m], last_m1], dim=-1)
        weight_m = divide(torch.cat([chance_m, text_chance_m]), p_M1[walk_m, 0])
        return ChildLists(walk_m, entries_mk, weight_m)

    def _last_children(
        self, others_MV: Tensor, mass_M: Tensor, walk_m: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Last children of some walks, drawn from q': the walk, the child and its chance, [m]."""
        if self.count is None:
            at_m, sibling_m = (others_MV[walk_m] > 0).nonzero().unbind(-1)
            walk_m = walk_m[at_m]
            return walk_m, sibling_m, others_MV[walk_m, sibling_m].double() / mass_M[walk_m]
        uniform_mn = self._uniform(len(walk_m), self.count, others_MV.device)
        sibling_m = invert(others_MV[walk_m], uniform_mn).flatten()
        chance_m = torch.full_like(sibling_m, 1 / self.count, dtype=torch.float64)
        return walk_m.repeat_interleave(self.count), sibling_m, chance_m

    def _uniform(self, rows: int, columns: int, device: torch.device) -> Tensor:
        drawn_on = torch.device("cpu") if self.generator is None else self.generator.device
        uniform_mn = torch.rand(
            rows, columns, generator=self.generator, dtype=torch.float64, device=drawn_on
        )
        return uniform_mn.to(device)


def _all_lists(rows: SortedRows, following: NextTokens, k: int) -> ChildLists:
    """Every place of the text's token with every choice of siblings, and their chances."""
    vocabulary = range(rows.p_NV.shape[-1])
    lists: list[tuple[int, ...]] = []
    for at in range(k):
        for siblings in product(vocabulary, repeat=k - 1):
            lists.append((*siblings[:at], -1, *siblings[at:]))
    walk_m = torch.arange(len(following.row_M), device=rows.device).repeat_interleave(len(lists))
    entries_mk = torch.tensor(lists, device=rows.device).repeat(len(following.row_M), 1)
    is_sibling_mk = entries_mk >= 0
    entries_mk = torch.where(is_sibling_mk, entries_mk, following.token_M1[walk_m])
    _, q_mk = rows.at(following.row_M[walk_m]).at(entries_mk)
    chance_m = torch.where(is_sibling_mk, q_mk, 1.0).prod(-1) / k
    return ChildLists(walk_m, entries_mk, chance_m)
