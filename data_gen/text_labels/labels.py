"""Labels along a text: what every tree would have yielded at every position, without drafting one.

The text follows the target's law, as a text of any lossless decoder does. At a *root* (one of its
positions) let a tree be drafted and verified. Of all outcomes, keep only those that lead to the
text that stands there. The probability of each accepted length, given the text, then depends only
on the two models' distributions along it:

    S_t = P(tau >= t | text) = E over the drafts [ P(draft) P(accepted down to depth t | draft) ] /
    P(text),

and `1 + sum_t S_t` has the mean `E[tau + 1]` over texts. With x the text's token at a depth, and p
and q the distributions before it:

*Chain.* The draft must be x, which has probability q(x), where the text gave it p(x). So a step
multiplies by `q/p min(1, p/q) = min(1, q/p)` top-down; bottom-up (Block Verification) S_t is the
smallest of 1 and the running products of q/p. With p(x) = 0.5 and q(x) = 0.4, a chain of one token
would have been accepted with S_1 = 0.8.

*Branches* (`Walks`). k branches still agree with the text. One of their k next tokens, at a
uniformly drawn place, is x; the other k - 1, its siblings, are drawn from q. If m of the k are x,
the weight `k q(x) / (m p(x))` corrects this draw to the law of drafts given the text. Top-down the
solver must then yield x (`pull`). Bottom-up the siblings that are visited before x must reject,
each with one minus its entry weight on average over the drafts below it. The walk goes on with x's
entry weight and m branches. Trees of another style are labelled for the verifier that takes the
given one's place there (`data_gen.verification.styled`).

A row of survivals S (`ActionSpace.sums_SA`) is the law of tau of all trees.

A walk begins where a tree's branches begin, with K branches, and goes one token of the text further
at every level. Walks with equally many branches take a step together, and all walks share one sort
of each distribution.

Greedy branches begin with distinct tokens, so at most one agrees with the text after the first
level. The k - 1 most likely tokens are children in every draft, and the last child is drawn from
the others (law q'). If x is among the fixed ones, the last child is a sibling. If not, the last
child must be x, and the weight is `q'(x) / p(x)`.

Legend: T tokens, R roots, V vocabulary, B tokens of a block, L trunk lengths, D depths, S
survivals, A actions, B branching positions, M walks, m walks after their siblings are drawn, k
child-list entries, N questions put to a bottom-up rule, C cells.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import pad

from data_gen.verification import get_verifier, styled
from data_gen.verification.base import BottomUp, TopDown
from data_gen.verification.distributions import SortedRows, divide, invert, most_likely, row_sums
from data_gen.verification.khisti import Khisti
from data_gen.verification.one_path import FirstPath
from selector.actions import GREEDY, IID, ActionSpace

ELEMENTS = 1 << 22  # probabilities of one model that are sorted at once
# M walks, one for every *cell* (a branching position and a K) and draw of its siblings:
# "cell", "k"   the walk's cell, and the number of its branches that still agree with the text,
# int64 [M];
# "weight"      its probability among the walks of its cell, times `k q / (m p)` of all levels so
# far, [M];
#   "pulled", v   for top-down verifier v: P(it accepts down to here), [M];
# "left", v     for bottom-up verifier v: P(earlier siblings reject), [M, L], as the weight depends
# on the trunk;
#   "entry", v    for bottom-up verifier v: the entry weight, [M, L].
State = dict[Any, Tensor]
# for m walks: which of the M each is from, its child list [m, k], its chance
Entries = tuple[Tensor, Tensor, Tensor]


class Walks:
    """The walks of some verifiers, all of one style; `siblings` and `generator` as in
    `label_text`."""

    def __init__(
        self,
        verifiers: Sequence[TopDown | BottomUp],
        siblings: int | None,
        generator: torch.Generator | None,
        space: ActionSpace,
    ) -> None:
        self.top_down: dict[int, TopDown] = {}
        self.bottom_up: dict[int, BottomUp] = {}
        for v, verifier in enumerate(verifiers):
            if isinstance(verifier, TopDown):
                self.top_down[v] = verifier
            else:
                self.bottom_up[v] = verifier
        self.siblings = siblings
        self.generator = generator
        self.space = space
        self.style = verifiers[0].style

    def down(
        self,
        rows: SortedRows,
        tokens_B: Tensor,
        count: int,
        weight_BL: Tensor,
        likely_BK: Tensor | None = None,
    ) -> list[Tensor]:
        """P(at least that deep, along the text) / P(text) of branches at each of the first `count`
        positions, for each verifier: float64 [count, max_K - 1, max_L2] if it is top-down, [count,
        max_K - 1, max_L2, L] if bottom-up.

        Args:
            rows: both models' distributions after consecutive tokens, at least max_L2 - 1 more than
                `count`.
            tokens_B: the token that follows each of them.
            weight_BL: the entry weight of a branching position after a trunk of each length, for
                bottom-up verifiers.
            likely_BK: the draft's max_K most likely tokens at each of the `count` positions, for
                greedy branches.
        """
        widths = self.space.max_K - 1
        cells = count * widths
        state = self._start(cells, weight_BL.repeat_interleave(widths, dim=0), rows)
        levels: dict[int, list[Tensor]] = {}
        for v in range(len(self.top_down) + len(self.bottom_up)):
            levels[v] = []
        for level in range(self.space.max_L2):
            parts: list[State] = []
            for k in state["k"].unique().tolist():
                walks = _take(state, (state["k"] == k).nonzero()[:, 0])
                parts.append(self._step(walks, k, rows, level, tokens_B, likely_BK))
            if parts:  # no walk is left where no greedy branch begins with the text's token
                state = _joined(parts)
            for v, totals in levels.items():
                weighted_M = self._weighted(state, v)
                total_C = weighted_M.new_zeros(cells, *weighted_M.shape[1:])
                totals.append(total_C.index_add_(0, state["cell"], weighted_M))
        by_verifier: list[Tensor] = []
        for totals in levels.values():
            by_verifier.append(torch.stack(totals, dim=1).unflatten(0, (count, widths)))
        return by_verifier

    def _start(self, cells: int, entry_ML: Tensor, rows: SortedRows) -> State:
        cell_M = torch.arange(cells, device=rows.device)
        one_M = torch.ones(cells, dtype=torch.float64, device=rows.device)
        state: State = {"cell": cell_M, "k": 2 + cell_M % (self.space.max_K - 1), "weight": one_M}
        for v in self.top_down:
            state["pulled", v] = one_M
        for v in self.bottom_up:
            state["entry", v] = entry_ML
            state["left", v] = torch.ones_like(entry_ML)
        return state

    def _weighted(self, state: State, v: int) -> Tensor:
        """What each walk adds to the probability of its cell for a verifier, [M] or [M, L]."""
        if v in self.top_down:
            return state["weight"] * state["pulled", v]
        accepted_ML = state["left", v] * state["entry", v]
        return state["weight"].unsqueeze(-1) * accepted_ML

    def _step(
        self,
        state: State,
        k: int,
        rows: SortedRows,
        level: int,
        tokens_B: Tensor,
        likely_BK: Tensor | None,
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
            source_m, entries_mk, factor_m = self._greedy_entries(
                rows, row_M, x_M1[:, 0], likely_BK[row_M, :k]
            )
        else:
            source_m, entries_mk, factor_m = self._entries(
                rows, row_M, x_M1[:, 0], k, first=level == 0
            )
            copies_m = (entries_mk == x_M1[source_m]).sum(-1)
            factor_m = factor_m * k * divide(q_M1, p_M1)[source_m, 0] / copies_m
        state = _take(state, source_m)
        row_m = row_M[source_m]
        is_text_mk = entries_mk == x_M1[source_m]
        state["k"] = is_text_mk.sum(-1)
        state["weight"] = state["weight"] * factor_m
        for v, top_down in self.top_down.items():
            pull_mk = top_down.pull(rows.at(row_m), entries_mk)
            state["pulled", v] = state["pulled", v] * (pull_mk * is_text_mk).sum(-1)
        for v, bottom_up in self.bottom_up.items():
            reject_mL, entry_mL = _enter(
                bottom_up, rows, row_m, entries_mk, is_text_mk, state["entry", v]
            )
            state["left", v] = state["left", v] * reject_mL
            state["entry", v] = entry_mL
        return state

    def _entries(
        self, rows: SortedRows, row_M: Tensor, x_M: Tensor, k: int, first: bool
    ) -> Entries:
        """Child lists in which one entry, at a uniform place, is the text's token and the others
        are drawn."""
        if self.siblings is None:
            return _entries_with_all_siblings(rows, row_M, x_M, k)
        # Where the branches begin, every place is taken in turn: for rules that try children in
        # order, the place of the text's token gives most of a label's variance. Further down
        # several branches are rare, and one place is drawn.
        times = self.siblings if first else 1
        positions = k if first else 1
        drawn_m = torch.arange(len(row_M), device=rows.device).repeat_interleave(times)
        uniform_mk = self._uniform(len(drawn_m), k - 1).to(rows.device)
        siblings_mk = rows.draw(row_M[drawn_m], uniform_mk)
        siblings_mk = siblings_mk.repeat_interleave(positions, dim=0)
        source_m = drawn_m.repeat_interleave(positions)
        if first:
            position_m1 = torch.arange(k, device=rows.device).repeat(len(drawn_m)).unsqueeze(-1)
        else:
            position_m1 = (self._uniform(len(drawn_m), 1) * k).long().to(rows.device)
        x_m1 = x_M[source_m].unsqueeze(-1)
        # the text's token comes first, then changes positions
        entries_mk = torch.cat([x_m1, siblings_mk], dim=-1)
        entries_mk[:, :1] = entries_mk.gather(-1, position_m1)
        entries_mk.scatter_(-1, position_m1, x_m1)
        chance_m = torch.full_like(source_m, 1 / (times * positions), dtype=torch.float64)
        return source_m, entries_mk, chance_m

    def _greedy_entries(
        self, rows: SortedRows, row_M: Tensor, x_M: Tensor, likely_Mk: Tensor
    ) -> Entries:
        """As `_entries`, where `likely_Mk` are the draft's k most likely tokens in order; the third
        is the probability that the list is drafted, over that of the text's token in the text."""
        fixed_Mk = likely_Mk[:, :-1]
        last_M = likely_Mk[:, -1]
        off_MV = rows.q_NV[row_M].scatter_(-1, fixed_Mk, 0.0)  # q' up to a factor
        mass_M = row_sums(off_MV)
        certain_M = mass_M <= 0  # the last child is fixed, too
        off_MV[certain_M.nonzero()[:, 0], last_M[certain_M]] = 1.0
        mass_M = mass_M.where(~certain_M, 1.0)
        p_M = rows.at(row_M).at(x_M.unsqueeze(-1))[0][:, 0]
        is_fixed_M = (fixed_Mk == x_M.unsqueeze(-1)).any(-1)
        fixed_m = is_fixed_M.nonzero()[:, 0]
        last_m = (~is_fixed_M).nonzero()[:, 0]
        x_share_m = off_MV[last_m, x_M[last_m]].double() / mass_M[last_m]
        possible = x_share_m > 0
        last_m = last_m[possible]
        x_share_m = x_share_m[possible]
        if self.siblings is None:
            sibling_m, drawn_m = (off_MV[fixed_m] > 0).nonzero().unbind(-1)
            fixed_m = fixed_m[sibling_m]
            share_m = off_MV[fixed_m, drawn_m].double() / mass_M[fixed_m]
        else:
            uniform_mn = self._uniform(len(fixed_m), self.siblings).to(off_MV.device)
            drawn_m = invert(off_MV[fixed_m], uniform_mn).flatten()
            fixed_m = fixed_m.repeat_interleave(self.siblings)
            share_m = torch.full_like(drawn_m, 1 / self.siblings, dtype=torch.float64)
        source_m = torch.cat([fixed_m, last_m])
        lasts_m1 = torch.cat([drawn_m, x_M[last_m]]).unsqueeze(-1)
        entries_mk = torch.cat([fixed_Mk[source_m], lasts_m1], dim=-1)
        return source_m, entries_mk, divide(torch.cat([share_m, x_share_m]), p_M[source_m])

    def _uniform(self, *shape: int) -> Tensor:
        device = torch.device("cpu") if self.generator is None else self.generator.device
        return torch.rand(shape, generator=self.generator, dtype=torch.float64, device=device)


def _take(state: State, walks_m: Tensor) -> State:
    return {key: values_M[walks_m] for key, values_M in state.items()}


def _joined(parts: list[State]) -> State:
    state: State = {}
    for key in parts[0]:
        state[key] = torch.cat([part[key] for part in parts])
    return state


def _entries_with_all_siblings(rows: SortedRows, row_M: Tensor, x_M: Tensor, k: int) -> Entries:
    vocabulary = range(rows.p_NV.shape[-1])
    lists: list[tuple[int, ...]] = []
    for position in range(k):
        for siblings in product(vocabulary, repeat=k - 1):
            lists.append((*siblings[:position], -1, *siblings[position:]))
    source_m = torch.arange(len(row_M), device=rows.device).repeat_interleave(len(lists))
    entries_mk = torch.tensor(lists, device=rows.device).repeat(len(row_M), 1)
    drawn_mk = entries_mk >= 0
    entries_mk = torch.where(drawn_mk, entries_mk, x_M[source_m].unsqueeze(-1))
    _, q_mk = rows.at(row_M[source_m]).at(entries_mk)
    return source_m, entries_mk, torch.where(drawn_mk, q_mk, 1.0).prod(-1) / k


def _enter(
    verifier: BottomUp,
    rows: SortedRows,
    row_M: Tensor,
    entries_Mk: Tensor,
    is_text_Mk: Tensor,
    entry_ML: Tensor,
) -> tuple[Tensor, Tensor]:
    """P(the siblings visited before the text's token reject), and its entry weight, [M, L] each."""
    lengths = entry_ML.shape[-1]
    k = entries_Mk.shape[-1]
    # trunks of several lengths often give the same weight, and each question is asked once
    new_ML = torch.ones_like(entry_ML, dtype=torch.bool)
    new_ML[:, 1:] = entry_ML[:, 1:] != entry_ML[:, :-1]
    question_N = new_ML.flatten().nonzero()[:, 0]
    inverse_ML = (new_ML.flatten().cumsum(0) - 1).view_as(entry_ML)
    walk_N = question_N // lengths
    entry_Nk, _, order_Nk = verifier.split(
        rows.at(row_M[walk_N]), entry_ML.flatten()[question_N], entries_Mk[walk_N]
    )
    text_Nk = is_text_Mk[walk_N]
    if order_Nk is not None:
        entry_Nk = entry_Nk.gather(-1, order_Nk)
        text_Nk = text_Nk.gather(-1, order_Nk)
    text_place_N1 = text_Nk.to(torch.uint8).argmax(-1, keepdim=True)
    before_Nk = torch.arange(k, device=entry_Nk.device) < text_place_N1
    reject_N = torch.where(before_Nk, 1 - entry_Nk, 1.0).prod(-1)
    text_entry_N = (entry_Nk * text_Nk).sum(-1)  # copies of a token have no weight of their own
    return reject_N[inverse_ML], text_entry_N[inverse_ML]


def label_text(
    tokens_T: Tensor,
    target_probs_TV: Tensor,
    draft_probs_TV: Tensor,
    verifiers: Sequence[str],
    siblings: int | None = 1,
    generator: torch.Generator | None = None,
    space: ActionSpace | None = None,
) -> Tensor:
    """Block efficiency E[tau + 1 | text] of every action at every root, float64 [verifier, root,
    action], in tokens.

    Roots are 0 .. T - 1 - (max_L1 + max_L2); root r is committed up to token r.

    Args:
        tokens_T: int64, of a text that follows the target's law.
        target_probs_TV, draft_probs_TV: row t is the distribution after token t; float64, float32
            or bf16, on any device; normalised in float64.
        siblings: how many draws of the siblings are averaged; None enumerates all of them, for
            small vocabularies.
        generator: of the siblings' draws; torch's own if None.
        space: the actions; the default space if None. Its greedy trees rank tokens of draft
            probability 0 by their ids.

    Raises:
        ValueError: the shapes do not fit, no root has its whole look-ahead, the text holds a token
            of probability 0 under the target, or a verifier is unknown or has no labels along a
            text.
    """
    if not len(tokens_T) == len(target_probs_TV) == len(draft_probs_TV):
        raise ValueError(
            f"{len(tokens_T)} tokens need as many rows; target has {len(target_probs_TV)}, draft "
            f"{len(draft_probs_TV)}"
        )
    labeller = TextLabeller(tokens_T, verifiers, siblings, generator, space)
    size = block_rows(target_probs_TV.shape[-1])
    for begin in range(0, len(tokens_T), size):
        labeller.add(target_probs_TV[begin : begin + size], draft_probs_TV[begin : begin + size])
    return labeller.space.efficiencies(labeller.survivals())


def block_rows(vocabulary: int) -> int:
    """How many distributions along a text are taken at once, which bounds the memory."""
    return max(32, ELEMENTS // vocabulary)


def labelled_verifier(name: str) -> TopDown | BottomUp:
    """A verifier that has labels along a text; for verifiers of the first path, that of chains.
    ValueError where it is unknown, compares whole paths (GBV), or needs a linear program for each
    node (Khisti)."""
    verifier = get_verifier(name)
    if isinstance(verifier, TopDown | BottomUp) and not isinstance(verifier, Khisti):
        return verifier
    if isinstance(verifier, FirstPath):
        return verifier.chain
    raise ValueError(f"{name} has no labels along a text")


class TextLabeller:
    """Survivals along one text, from blocks of distributions in its order; see `label_text` for the
    arguments."""

    def __init__(
        self,
        tokens_T: Tensor,
        verifiers: Sequence[str],
        siblings: int | None = 1,
        generator: torch.Generator | None = None,
        space: ActionSpace | None = None,
        said_S: Tensor | None = None,
    ) -> None:
        """`said_S` are the tokens that the draft can say, int64; None: all."""
        self.space = space or ActionSpace.default()
        self.tokens_T = tokens_T
        self._said = said_S
        self.roots = len(tokens_T) - self.space.depth
        if self.roots < 1:
            raise ValueError(
                f"{len(tokens_T)} tokens leave no root with a look-ahead of {self.space.depth}"
            )
        self.verifiers = [labelled_verifier(name) for name in verifiers]
        self.branching = self.space.max_K > 1 and self.space.max_L2 > 0
        self.walks: list[Walks] = []  # by style
        self.walk_of: list[list[int]] = []  # by style, the place of each verifier's there
        self._branches: list[list[list[Tensor]]] = []  # by style, rule and block
        for style in (IID, *self.space.styles):
            style_verifiers: list[TopDown | BottomUp] = []
            for verifier in self.verifiers:
                style_verifiers.append(cast(TopDown | BottomUp, styled(verifier, style)))
            # many take the same rule for other styles
            rules = {type(verifier): verifier for verifier in style_verifiers}
            rule_types = list(rules)
            self.walks.append(Walks(list(rules.values()), siblings, generator, self.space))
            self.walk_of.append([rule_types.index(type(verifier)) for verifier in style_verifiers])
            self._branches.append([[] for _ in rules])
        self.by_first_path = [isinstance(get_verifier(name), FirstPath) for name in verifiers]
        # of the text's own next tokens, block by block
        self._p: list[Tensor] = []
        self._q: list[Tensor] = []
        self._seen = 0
        self._rows: SortedRows | None = None  # of the last block
        # how many of its last positions wait for the next block before branches begin there
        self._waiting = 0
        # the draft's most likely tokens at each position of the last block
        self._likely: Tensor | None = None

    def add(
        self, target_probs_BV: Tensor, draft_probs_BV: Tensor, draft_logits_BV: Tensor | None = None
    ) -> None:
        """Both models after the next B tokens; the draft's logits rank tokens of probability 0 for
        greedy trees."""
        begin = self._seen
        next_B = self.tokens_T[begin + 1 : begin + 1 + len(target_probs_BV)]
        next_B = next_B.to(target_probs_BV.device)
        p_BV = target_probs_BV[: len(next_B)]
        q_BV = draft_probs_BV[: len(next_B)]
        self._seen += len(target_probs_BV)
        if len(next_B) == 0:
            return
        # p and q of the text's tokens, from which chains follow
        p_B = _normalised_at(p_BV, next_B)
        q_B = _normalised_at(q_BV, next_B)
        if bool((p_B <= 0).any()):
            at = int((p_B <= 0).nonzero()[0]) + sum(map(len, self._p)) + 1
            raise ValueError(f"token {at} of the text has probability 0 under the target")
        self._p.append(p_B)
        self._q.append(q_B)
        if self.branching:
            self._rows = SortedRows(p_BV, q_BV, self._rows, self._waiting, self._said)
            if GREEDY in self.space.styles:
                logits_BV = None if draft_logits_BV is None else draft_logits_BV[: len(next_B)]
                likely_BK = most_likely(q_BV, self.space.max_K, logits_BV)
                kept_BK = likely_BK[:0]
                if self._likely is not None:
                    kept_BK = self._likely[len(self._likely) - self._waiting :]
                self._likely = torch.cat([kept_BK, likely_BK])
            count = max(0, len(self._rows.p_NV) - self.space.max_L2 + 1)
            if count > 0:
                self._branch(self._rows, begin - self._waiting, count)
            self._waiting = len(self._rows.p_NV) - count

    def _chain(self, since: int = 0) -> tuple[Tensor, Tensor, list[Tensor]]:
        """Chains from every root on, the first at `since`: entry weights, running products of q/p,
        and each verifier's factor; [R, D + 1] each. The factor is the products of `accept`
        top-down, and the entry weight bottom-up."""
        depth = self.space.depth

        def ahead(probs: list[Tensor]) -> Tensor:
            """Of the next `depth` tokens at each position."""
            probs_T = torch.cat(probs)[since:]
            # the padding at the end is never read
            return pad(probs_T, (0, depth)).unfold(0, depth, 1)[: len(probs_T)]

        def products(values_TD: Tensor) -> Tensor:
            return pad(values_TD.cumprod(-1), (1, 0), value=1.0)

        p_TD = ahead(self._p)
        q_TD = ahead(self._q)
        weights = [p_TD.new_ones(len(p_TD))]
        for ratio_T in divide(p_TD, q_TD).unbind(-1):
            weights.append((weights[-1] * ratio_T).clamp(max=1))
        entry_TD = torch.stack(weights, dim=-1)
        factors: list[Tensor] = []
        for verifier in self.verifiers:
            if isinstance(verifier, TopDown):
                factors.append(products(verifier.accept(p_TD, q_TD)))
            else:
                factors.append(entry_TD)
        return entry_TD, products(divide(q_TD, p_TD)), factors

    def _branch(self, rows: SortedRows, begin: int, count: int) -> None:
        device = rows.device
        space = self.space
        tokens_B = self.tokens_T[begin + 1 : begin + 1 + len(rows.p_NV)].to(device)
        since = max(0, begin - space.max_L1)
        entry_TD, _, _ = self._chain(since)
        trunk_L = torch.arange(space.max_L1 + 1, device=device)
        root_BL = torch.arange(begin, begin + count, device=device).unsqueeze(-1) - trunk_L
        entry_BL = entry_TD[root_BL.clamp(min=since) - since, trunk_L.expand_as(root_BL)]
        weight_BL = entry_BL * (root_BL >= 0)
        for walks, branches in zip(self.walks, self._branches, strict=True):
            below = walks.down(rows, tokens_B, count, weight_BL, self._likely)
            for blocks, block in zip(branches, below, strict=True):
                blocks.append(block)

    def survivals(self) -> Tensor:
        """S of every root, float64 [verifier, R, S], in the order of `ActionSpace.sums_SA`, once
        all blocks are added; the distributions after the last token are not needed."""
        if self._seen < len(self.tokens_T) - 1:
            raise ValueError(
                f"{len(self.tokens_T)} tokens need as many rows; there are {self._seen}"
            )
        _, drafted_TD, chain = self._chain()
        by_verifier = [self._survivals(v, drafted_TD, chain[v]) for v in range(len(chain))]
        return torch.stack(by_verifier)

    def _survivals(self, v: int, drafted_TD: Tensor, chain_TD: Tensor) -> Tensor:
        """S of every root for one verifier, [R, S]."""
        max_L2 = self.space.max_L2
        is_top_down = isinstance(self.verifiers[v], TopDown)
        chain_RD = (drafted_TD * chain_TD)[: self.roots]
        factor_TD = drafted_TD * chain_TD if is_top_down else drafted_TD
        survivals = [chain_RD[:, 1:]]
        for style, branches in enumerate(self._branches):
            # i.i.d. branches on the first path are the chain's continuation
            with_branches = self.branching and (style > 0 or not self.by_first_path[v])
            below: Tensor | None = None  # [B, K, level(, L1)]
            if with_branches:
                below = torch.cat(branches[self.walk_of[style][v]])
            for K, L1 in product(range(self.space.max_K - 1), range(self.space.max_L1 + 1)):
                if below is None:
                    survivals.append(chain_RD[:, L1 + 1 : L1 + 1 + max_L2])
                    continue
                branch_RD = below[L1 : L1 + self.roots, K]
                if not is_top_down:  # entry weights depend on the trunk
                    branch_RD = branch_RD[..., L1]
                survivals.append(factor_TD[: self.roots, L1, None] * branch_RD)
        return torch.cat(survivals, dim=-1)


def _normalised_at(probs_BV: Tensor, tokens_B: Tensor) -> Tensor:
    """The probability of one token in each row, float64 [B]."""
    probs_B = probs_BV.gather(-1, tokens_B[:, None])[:, 0].double()
    return probs_B / probs_BV.sum(-1, dtype=torch.float64)
