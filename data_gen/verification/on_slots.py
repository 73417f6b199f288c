"""Verification without host synchronisation: the same laws, on a tree whose tokens stand in fixed slots.

All nodes of one depth are taken at once, each with room for K entries. Where a node has fewer, the others are `ABSENT`
and their probabilities are 0. The rules themselves, and their arithmetic, are those of the other modules.

Legend: S slots, M of them taken at once, K branches, E = K entries of a node, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from data_gen.trees import ABSENT, Layout, Merged
from data_gen.verification.base import BottomUp, Leftover, TopDown, Verifier
from data_gen.verification.distributions import NodeDistributions, Rows, divide, invert, is_copy
from data_gen.verification.selection import LiftedSpecTr, LiftedUniform, SpecTr
from data_gen.verification.traversal import NaiveTree, SpecInfer, Traversal

MOST_FORMS = 64  # compiled forms of a function; a forward pass has two for each model and cache length
ON_SLOTS = (NaiveTree, SpecInfer, SpecTr, Traversal, LiftedSpecTr, LiftedUniform)  # need no host synchronisation


class SlotDistributions(NodeDistributions):
    allows_host_sync = False

    def at(self, entries_ME: Tensor) -> tuple[Tensor, Tensor]:
        there_ME = entries_ME != ABSENT
        p_ME, q_ME = super().at(entries_ME.clamp(min=0))
        return p_ME * there_ME, q_ME * there_ME

    def count(self, entries_ME: Tensor) -> Tensor:
        return self.present(entries_ME).sum(-1).clamp(min=1)

    def present(self, entries_ME: Tensor) -> Tensor:
        return (entries_ME != ABSENT).double()

    def cleared(self, rows_MV: Tensor, entries_ME: Tensor) -> Tensor:
        some_M1 = entries_ME[:, :1].clamp(min=0)
        return rows_MV.scatter_(-1, torch.where(entries_ME == ABSENT, some_M1, entries_ME), 0.0)

    def by_count(self, entries_ME: Tensor, values: Callable[[int], Tensor]) -> Tensor:
        most = entries_ME.shape[-1]
        each_kME = torch.stack([pad(values(k), (0, most - k)) for k in range(1, most + 1)])
        at_M = self.count(entries_ME).long() - 1
        return each_kME.gather(0, at_M.view(1, -1, 1).expand(1, -1, most))[0]


class SlotRows(Rows):
    def at(self, nodes_M: Tensor) -> SlotDistributions:
        return SlotDistributions(self, nodes_M)


def verify_slots(
    verifier: Verifier, layout: Layout, tokens_S: Tensor, target_probs_SV: Tensor, draft_probs_SV: Tensor, u_2: Tensor
) -> tuple[Tensor, Tensor]:
    """One draw from the verifier's law, by two uniform numbers in [0, 1): the last accepted slot, the first with its
    path, and the extra token. Up to rounding, `Verifier.verify` gives the same verdict from the same numbers.

    Both are int64 [1], because indexing with a tensor of no axes is a host synchronisation. ValueError where the
    verifier needs host synchronisation, or is not for i.i.d. drafts.
    """
    stops_S, extra = law_on_slots(verifier, layout, tokens_S, target_probs_SV, draft_probs_SV)
    slot = layout.order_S[drawn(stops_S[layout.order_S], u_2[:1])]
    return slot, drawn(extra(slot)[0], u_2[1:])


def drawn(probs_V: Tensor, u: Tensor) -> Tensor:
    """As `invert`, compiled on a GPU, where it would be twenty small kernels."""
    if not u.is_cuda:
        return invert(probs_V, u)
    given = probs_V.view(-1, probs_V.shape[-1]), u.clone().view(-1, u.shape[-1])  # always two axes: few forms
    return compiled(invert, dynamic=True)(*given).view(u.shape)


@cache
def compiled(work: Callable[..., Tensor], dynamic: bool | None = None) -> Callable[..., Tensor]:
    """`work` in fewer kernels, which small work on a GPU waits for; uncompiled where torch cannot compile it."""
    settings: Any = torch._dynamo.config.patch(recompile_limit=MOST_FORMS, suppress_errors=True)
    own: Callable[..., Tensor] = settings(torch.compile(work, dynamic=dynamic))
    return own


def law_on_slots(
    verifier: Verifier, layout: Layout, tokens_S: Tensor, target_probs_SV: Tensor, draft_probs_SV: Tensor
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """P(accepted slot), float64 [S]; and the extra token's law at a slot (int64 [1]), [1, V] up to a factor."""
    check_on_slots(verifier)
    merged, rows = Merged(layout, tokens_S), SlotRows(target_probs_SV, draft_probs_SV)
    leftover: Leftover
    if isinstance(verifier, TopDown):
        stops_S, leftover = _top_down(verifier, layout, merged, rows), verifier.leftover
    else:
        assert isinstance(verifier, BottomUp)
        stops_S, leftover = _bottom_up(verifier, layout, merged, rows)
    return stops_S, lambda slot_1: _extra(slot_1, merged, rows, leftover)


def check_on_slots(verifier: Verifier) -> None:
    """ValueError where a verifier cannot be used without host synchronisation."""
    if not isinstance(verifier, ON_SLOTS) or verifier.style != "iid":
        names = ", ".join(each.name for each in ON_SLOTS)
        raise ValueError(f"{verifier.name} ({verifier.style}) has to look at what was drafted; these need not: {names}")


def _top_down(verifier: TopDown, layout: Layout, merged: Merged, rows: SlotRows) -> Tensor:
    steps_S = torch.zeros(layout.size, dtype=torch.float64, device=rows.device)  # P(parent -> slot)
    steps_S[:1] = 1.0  # setting one element would copy it from the host
    if layout.inner > 0:
        inner = slice(0, layout.inner)
        entries_ME = merged.entries_SE[inner]
        node = rows.at(torch.arange(layout.inner, device=rows.device))
        pull_ME = pad(verifier.accept(*node.at(entries_ME[:, :1])), (0, layout.K - 1))
        if layout.K > 1:
            several_M1 = merged.count_S[inner].unsqueeze(-1) > 1
            pull_ME = torch.where(several_M1, verifier.branching(node, entries_ME), pull_ME)
        steps_S.index_add_(0, merged.children_SE[inner].flatten(), (pull_ME * merged.there_SE[inner]).flatten())
    reach_S = steps_S[merged.first_S[layout.paths_SD]].prod(-1) * merged.is_first_S
    return reach_S.index_add(0, merged.first_S[layout.parents_S[1:]], -reach_S[1:]).clamp_(min=0)


def _bottom_up(verifier: BottomUp, layout: Layout, merged: Merged, rows: SlotRows) -> tuple[Tensor, Leftover]:
    parents_S = merged.first_S[layout.parents_S.clamp(min=0)]
    ratio_S = divide(*rows.at(parents_S).at(merged.tokens_S.clamp(min=0).unsqueeze(-1)))[:, 0]
    weights_S = torch.zeros(layout.size, dtype=torch.float64, device=rows.device)
    weights_S[:1] = 1.0
    for slot in range(1, layout.L1 + 1):
        weights_S[slot] = (weights_S[slot - 1] * ratio_S[slot]).clamp(max=1)
    finals_S = torch.zeros_like(weights_S)  # a node's own weight once its children are rejected
    orders: list[Tensor] = []  # of visits
    for nodes in layout.levels[:-1]:
        entries_ME, there_ME, children_ME = merged.entries_SE[nodes], merged.there_SE[nodes], merged.children_SE[nodes]
        nodes_M = torch.arange(nodes.start, nodes.stop, device=rows.device)
        entry_ME, finals_S[nodes], order_ME = verifier.split(rows.at(nodes_M), weights_S[nodes], entries_ME)
        only_ME = (weights_S[nodes].unsqueeze(-1) * ratio_S[children_ME]).clamp(max=1)
        entry_ME = torch.where(merged.count_S[nodes].unsqueeze(-1) > 1, entry_ME, only_ME)
        weights_S.index_add_(0, children_ME.flatten(), (entry_ME * there_ME).flatten())
        as_drafted_E = torch.arange(layout.K, device=rows.device)
        orders.append(as_drafted_E.expand_as(entries_ME) if order_ME is None else order_ME)
    finals_S[layout.inner :] = weights_S[layout.inner :]  # a leaf's weight is its entry weight
    if layout.inner > 0:  # all nodes with one child at once
        inner = slice(0, layout.inner)
        left_M = verifier.leave(rows.at(torch.arange(layout.inner, device=rows.device)), weights_S[inner])
        finals_S[inner] = torch.where(merged.count_S[inner] > 1, finals_S[inner], left_M)
    stops_S = _from_below(layout, merged, finals_S * merged.is_first_S, orders)
    return stops_S, partial(verifier._leftover, weights_S)


def _from_below(layout: Layout, merged: Merged, finals_S: Tensor, orders: list[Tensor]) -> Tensor:
    """P(accepted slot): each accepts with its final weight once everything that is visited before it has rejected.
    `orders` holds each level's entries in the order of visits, int64 [M, E]."""
    fails_S = 1 - finals_S  # P(nothing at or below the slot accepts)
    below_S = torch.ones_like(finals_S)  # P(nothing below it accepts)
    before_S = torch.ones_like(finals_S)  # P(nothing that is visited before its subtree accepts)
    fresh_SE = merged.there_SE & ~is_copy(merged.entries_SE)  # a path that was drafted twice is one child
    for nodes in reversed(layout.levels[:-1]):
        below_S[nodes] = torch.where(fresh_SE[nodes], fails_S[merged.children_SE[nodes]], 1.0).prod(-1)
        fails_S[nodes] *= below_S[nodes]
    trunk = slice(0, layout.L1 + 1)
    fails_S[trunk] = fails_S[trunk].flip(0).cumprod(0).flip(0)
    below_S[: layout.L1] = fails_S[1 : layout.L1 + 1]
    for nodes, children, order_ME in zip(layout.levels[:-1], layout.levels[1:], orders, strict=True):
        children_ME, fresh_ME = merged.children_SE[nodes], fresh_SE[nodes]
        fail_ME = torch.where(fresh_ME, fails_S[children_ME], 1.0).gather(-1, order_ME)
        earlier_ME = pad(fail_ME[:, :-1].cumprod(-1), (1, 0), value=1.0)
        before_ME = torch.zeros_like(earlier_ME).scatter_(-1, order_ME, earlier_ME) * before_S[nodes].unsqueeze(-1)
        before_S[children] = 0.0
        before_S.index_add_(0, children_ME.flatten(), (before_ME * fresh_ME).flatten())
    return before_S * below_S * finals_S


def _extra(slot_1: Tensor, merged: Merged, rows: SlotRows, leftover: Leftover) -> Tensor:
    entries_1E, count = merged.entries_SE[slot_1], merged.count_S[slot_1]
    node, extra_1V = rows.at(slot_1), rows.p_NV[slot_1]  # a leaf adds the target's own token
    left_1V = leftover(node, entries_1E[:, :1]).to(extra_1V.dtype)
    if entries_1E.shape[-1] > 1:
        left_1V = torch.where(count == 1, left_1V, leftover(node, entries_1E).to(extra_1V.dtype))
    # where nothing is left, the verifier ends with probability 0, or 1e-17 after rounding
    takes = (count > 0) & (left_1V.sum(-1) > 0)
    return torch.where(takes, left_1V, extra_1V)
