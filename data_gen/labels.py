"""Labels: the block efficiency of every action, from one supertree (algorithms sheet, section 6).

All actions with the same `K` are walked at once. The node at branch depth `d` of branch `b` is a *slot*; equal
prefixes share one slot, the first branch's. A node's child list holds the branches that pass through it, so it follows
from the first `K` branches alone, never from the merged supertree. Selection laws do not depend on what stands below a
node, so they are computed once for all `L2`; only the scalars of the bottom-up pass are repeated.

Legend: S supertrees, R rows of all supertrees, L trunk depths at which branches start, K branches, D depths within a
branch (0 is the branching node), T depths within the tree, A actions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from data_gen.trees import Forest, Supertree
from data_gen.verification import BottomUp, TopDown, Verifier, get_verifier
from data_gen.verification.one_path import FirstPath
from data_gen.verification.profile import Rows, first_copies

WIDE = 1 << 23  # probabilities that are taken at once


def label_supertree(
    supertree: Supertree, target_probs_NV: Tensor, draft_probs_NV: Tensor, verifiers: Sequence[str]
) -> Tensor:
    """E[tau + 1] of every action on its sub-tree, exact given the tree.

    Args:
        target_probs_NV, draft_probs_NV: distributions after the supertree's nodes; the draft's leaves hold anything.
        verifiers: registry names.

    Returns:
        float64 [verifier, action], in the order of `supertree.space`.
    """
    survival_VSAT = survivals([(supertree, target_probs_NV, draft_probs_NV)], verifiers)
    return survival_VSAT[:, 0].sum(-1)


def survivals(samples: Sequence[tuple[Supertree, Tensor, Tensor]], verifiers: Sequence[str]) -> Tensor:
    """P(tau >= t) of every action on every supertree, for t from 0 to the longest tree.

    Args:
        samples: supertrees of one space with the target's and the draft's distributions, [N, V] each.

    Returns:
        float64 [verifier, S, A, T]; the sum over T is the block efficiency E[tau + 1].
    """
    slots = _Slots([supertree for supertree, _, _ in samples])
    rows = Rows(
        torch.cat([p_NV for _, p_NV, _ in samples]).double(), torch.cat([q_NV for _, _, q_NV in samples]).double()
    )
    slots.to(rows.device)
    return torch.stack([_survival(get_verifier(name), slots, rows, samples) for name in verifiers])


def _survival(
    verifier: Verifier, slots: _Slots, rows: Rows, samples: Sequence[tuple[Supertree, Tensor, Tensor]]
) -> Tensor:
    space = slots.space
    if isinstance(verifier, FirstPath):  # the first branch is the trunk's own continuation
        chain = _survival(verifier.chain, slots, rows, samples)
        return chain[:, [space.index(space.chain(L1 + L2)) for _, L1, L2 in space.actions]]
    if isinstance(verifier, TopDown):
        labelled: _TopDownWalk | _BottomUpWalk = _TopDownWalk(verifier, slots, rows)
    elif isinstance(verifier, BottomUp):
        labelled = _BottomUpWalk(verifier, slots, rows)
    else:
        return torch.stack([_one_by_one(verifier, *sample) for sample in samples])
    chains_SLT = labelled.chains()
    trees = {K: labelled.trees(K) for K in range(2, space.max_K + 1)}  # [S, L, L2, T] each
    return torch.stack(
        [chains_SLT[:, L1 + L2] if K == 1 else trees[K][:, L1, L2 - 1] for K, L1, L2 in space.actions], dim=1
    )


def _one_by_one(verifier: Verifier, supertree: Supertree, p_NV: Tensor, q_NV: Tensor) -> Tensor:
    """[A, T] by the verifier's own walk over every action's tree: for rules that look at the tree as a whole."""
    space = supertree.space
    survival_AT = torch.zeros(len(space), space.max_L1 + space.max_L2 + 1, dtype=torch.float64, device=p_NV.device)
    together = max(1, WIDE // (p_NV.shape[-1] * (1 + space.max_L1 + space.max_K * space.max_L2)))
    for start in range(0, len(space), together):
        trees, rows = zip(*(supertree.subtree(a) for a in space.actions[start : start + together]), strict=True)
        forest, rows_N = Forest(trees), torch.cat(rows)
        stops_N = verifier.stops(forest, p_NV[rows_N], q_NV[rows_N])
        own_N = torch.arange(len(trees)).repeat_interleave(torch.tensor(list(map(len, trees)))) + start
        places = own_N.to(stops_N.device), forest.depths_N.to(stops_N.device)
        survival_AT.index_put_(places, stops_N, accumulate=True)
    return survival_AT.flip(-1).cumsum(-1).flip(-1)


class _NodeGroup(NamedTuple):
    """Nodes with the same number of child-list entries, as indices into slots."""

    parent: tuple[Tensor, ...]  # each [M]: indexes the node's slot
    child: tuple[Tensor, ...]  # each [M, k]: indexes the slots of its entries
    rows_M: Tensor
    entries_Mk: Tensor

    def parts(self, vocabulary: int) -> Iterator[_NodeGroup]:
        """Itself in parts whose rows fit into memory side by side."""
        size = max(1, WIDE // vocabulary)
        for start in range(0, len(self.rows_M), size):
            part = slice(start, start + size)
            index = [tuple(axis[part] for axis in axes) for axes in (self.parent, self.child)]
            yield _NodeGroup(index[0], index[1], self.rows_M[part], self.entries_Mk[part])


class _Slots:
    """Where the rows of all trees stand: the trunk's, and those of every branch at every trunk depth."""

    def __init__(self, supertrees: list[Supertree]) -> None:
        self.space = supertrees[0].space
        offsets = [0]
        for supertree in supertrees:
            offsets.append(offsets[-1] + len(supertree))
        self.tokens_R = torch.cat([supertree.tokens_N for supertree in supertrees])
        pairs = list(zip(supertrees, offsets, strict=False))
        self.trunk_ST = torch.stack([supertree.trunk_D + offset for supertree, offset in pairs])
        self.branch_SLKD = torch.stack([supertree.branches_LKD + offset for supertree, offset in pairs])
        # the first branch with the same prefix
        self.owner_SLKD = first_copies(self.branch_SLKD.movedim(2, 3)).movedim(3, 2)

    def to(self, device: torch.device) -> None:
        for name, value in vars(self).items():
            if isinstance(value, Tensor):
                setattr(self, name, value.to(device))

    def trunk_nodes(self, depths: range) -> _NodeGroup:
        """The trunk's inner nodes at the given depths, each with one entry: the next trunk token."""
        device = self.trunk_ST.device
        pairs = torch.cartesian_prod(torch.arange(len(self.trunk_ST)), torch.arange(depths.start, depths.stop))
        s_M, t_M = pairs.to(device).unbind(-1)
        children = (s_M.unsqueeze(-1), t_M.unsqueeze(-1) + 1)
        return _NodeGroup((s_M, t_M), children, self.trunk_ST[s_M, t_M], self.tokens_R[self.trunk_ST[children]])

    def branch_nodes(self, K: int, depths: range) -> Iterator[_NodeGroup]:
        """The inner nodes at the given branch depths when only the first K branches are there."""
        owner_SLDK = self.owner_SLKD[:, :, :K, depths.start : depths.stop].movedim(2, 3)
        passes_SLDKK = owner_SLDK.unsqueeze(-2) == torch.arange(K, device=owner_SLDK.device).unsqueeze(-1)
        count_SLDK = passes_SLDKK.sum(-1)  # entries of the child list of the slot; 0 where the slot is a copy
        for k in range(1, K + 1):
            s_M, l_M, d_M, b_M = (count_SLDK == k).nonzero(as_tuple=True)
            if len(s_M) == 0:
                continue
            members_Mk = passes_SLDKK[s_M, l_M, d_M, b_M].nonzero()[:, 1].view(-1, k)
            d_M = d_M + depths.start
            children = (s_M.unsqueeze(-1), l_M.unsqueeze(-1), members_Mk, d_M.unsqueeze(-1) + 1)
            rows_M = self.branch_SLKD[s_M, l_M, b_M, d_M]
            yield _NodeGroup((s_M, l_M, b_M, d_M), children, rows_M, self.tokens_R[self.branch_SLKD[children]])


class _TopDownWalk:
    """Survival of top-down verifiers: the mass that reaches each depth."""

    def __init__(self, verifier: TopDown, slots: _Slots, rows: Rows) -> None:
        self.verifier, self.slots, self.rows = verifier, slots, rows
        pull_ST = torch.ones(slots.trunk_ST.shape, dtype=torch.float64, device=rows.device)
        self._pull(slots.trunk_nodes(range(pull_ST.shape[1] - 1)), pull_ST)
        self.trunk_reach_ST = pull_ST.cumprod(-1)

    def _pull(self, group: _NodeGroup, out: Tensor) -> None:
        for part in group.parts(self.rows.p_NV.shape[-1]):
            out[part.child] = self.verifier.pull(self.rows.profile(part.rows_M), part.entries_Mk)

    def chains(self) -> Tensor:
        """[S, chain length, T]."""
        return _up_to_diagonal(self.trunk_reach_ST)

    def trees(self, K: int) -> Tensor:
        """[S, L, L2 - 1, T]."""
        slots = self.slots
        D = slots.space.max_L2
        reach_SLKD = self.trunk_reach_ST.new_zeros(slots.branch_SLKD[:, :, :K].shape)
        for group in slots.branch_nodes(K, range(D)):
            self._pull(group, reach_SLKD)
        reach_SLKD[..., 0] = self.trunk_reach_ST[:, : slots.space.max_L1 + 1].unsqueeze(-1)
        for depth in range(D):
            owner_SLK = slots.owner_SLKD[:, :, :K, depth]
            reach_SLKD[..., depth + 1] *= reach_SLKD[..., depth].gather(-1, owner_SLK)
        branch_SLD = reach_SLKD[..., 1:].sum(2)
        S, L = branch_SLD.shape[:2]
        survival = reach_SLKD.new_zeros(S, L, D, L + D)
        for L1 in range(L):
            survival[:, L1, :, : L1 + 1] = self.trunk_reach_ST[:, None, : L1 + 1]
            survival[:, L1, :, L1 + 1 : L1 + D + 1] = _up_to_diagonal(branch_SLD[:, L1])
        return survival


class _BottomUpWalk:
    """Survival of bottom-up verifiers: entry weights from the root down, then acceptance from the leaves up."""

    def __init__(self, verifier: BottomUp, slots: _Slots, rows: Rows) -> None:
        self.verifier, self.slots, self.rows = verifier, slots, rows
        self.trunk_entry_ST = torch.ones(slots.trunk_ST.shape, dtype=torch.float64, device=rows.device)
        self.trunk_final_ST = torch.zeros_like(self.trunk_entry_ST)
        for depth in range(slots.trunk_ST.shape[1] - 1):  # a weight depends on the one above
            self._enter(slots.trunk_nodes(range(depth, depth + 1)), self.trunk_entry_ST)
        self._leave(slots.trunk_nodes(range(slots.trunk_ST.shape[1] - 1)), self.trunk_entry_ST, self.trunk_final_ST)

    def _enter(self, group: _NodeGroup, entry: Tensor) -> None:
        profile = self.rows.profile(group.rows_M)
        entry[group.child] = self.verifier.enter(profile, entry[group.parent], group.entries_Mk)

    def _leave(self, group: _NodeGroup, entry: Tensor, final: Tensor) -> None:
        for part in group.parts(self.rows.p_NV.shape[-1]):
            final[part.parent] = self.verifier.leave(self.rows.profile(part.rows_M), entry[part.parent])

    def _split(self, group: _NodeGroup, entry: Tensor, final: Tensor, visits: Tensor) -> None:
        for part in group.parts(self.rows.p_NV.shape[-1]):
            split = self.verifier.split(self.rows.profile(part.rows_M), entry[part.parent], part.entries_Mk)
            entry[part.child], final[part.parent] = split.entry_Mk, split.final_M
            children_Mk = part.child[2]
            if split.order_Mk is not None:
                children_Mk = children_Mk.gather(-1, split.order_Mk)
            for place in range(children_Mk.shape[-1]):
                visits[(*part.parent, torch.full_like(part.rows_M, place))] = children_Mk[:, place]

    def chains(self) -> Tensor:
        """[S, chain length, T]."""
        leaf_STT = torch.diag_embed(self.trunk_entry_ST)  # [S, length, stop depth]
        return self._survival(leaf_STT)

    def _survival(self, stop_SLT: Tensor) -> Tensor:
        """Survival from P(stop depth) within the subtree at trunk depth L, once the trunk above is added."""
        for depth in reversed(range(stop_SLT.shape[1] - 1)):
            below = stop_SLT[:, depth + 1 :]
            rejected = 1 - below.sum(-1)
            below[..., depth] = rejected * self.trunk_final_ST[:, depth].view(-1, *[1] * (rejected.dim() - 1))
        return stop_SLT.flip(-1).cumsum(-1).flip(-1)

    def trees(self, K: int) -> Tensor:
        """[S, L, L2 - 1, T]."""
        slots = self.slots
        D = slots.space.max_L2
        shape = slots.branch_SLKD[:, :, :K].shape
        entry_SLKD = self.trunk_entry_ST.new_zeros(shape)
        final_SLKD = torch.zeros_like(entry_SLKD)
        # which branch holds the child that is visited first, second, ..; -1 where there are no more
        visits_SLKDk = torch.full((*shape, K), -1, device=entry_SLKD.device)
        entry_SLKD[..., 0, 0] = self.trunk_entry_ST[:, : slots.space.max_L1 + 1]
        alone: list[_NodeGroup] = []
        for depth in range(D):
            for group in slots.branch_nodes(K, range(depth, depth + 1)):
                if group.entries_Mk.shape[-1] > 1:
                    self._split(group, entry_SLKD, final_SLKD, visits_SLKDk)
                else:
                    self._enter(group, entry_SLKD)
                    visits_SLKDk[..., 0][group.parent] = group.child[2][:, 0]
                    alone.append(group)
        if alone:  # their wide sums wait until every weight is known
            self._leave(_joined(alone), entry_SLKD, final_SLKD)
        S, L = shape[:2]
        below = entry_SLKD.new_zeros(S, L, D, K, D + 1)  # P(stop at branch depth), for each L2 and slot one level down
        for depth in reversed(range(D + 1)):
            below = self._accept(depth, below, entry_SLKD, final_SLKD, visits_SLKDk)
        stop = entry_SLKD.new_zeros(S, L, D, L + D)
        for L1 in range(L):
            stop[:, L1, :, L1 : L1 + D + 1] = below[:, L1, :, 0]
        return self._survival(stop)

    def _accept(
        self, depth: int, below: Tensor, entry_SLKD: Tensor, final_SLKD: Tensor, visits_SLKDk: Tensor
    ) -> Tensor:
        """P(the subtree of a slot at `depth` stops at each branch depth, once it is reached), for each L2."""
        S, L, D, K, width = below.shape
        stop = torch.zeros_like(below)
        remaining = below.new_ones(S, L, D, K)
        for place in range(K if depth < D else 0):  # a copy's slot has entry weight 0
            child_SLK = visits_SLKDk[:, :, :, depth, place]
            index = child_SLK.clamp(min=0)[:, :, None, :, None].expand(S, L, D, K, width)
            taken = below.gather(3, index) * (child_SLK >= 0)[:, :, None, :, None]
            stop += remaining.unsqueeze(-1) * taken
            remaining = remaining * (1 - taken.sum(-1))
        for L2 in range(1, D + 1):
            if depth <= L2:
                own_SLK = (entry_SLKD if depth == L2 else final_SLKD)[..., depth]
                stop[:, :, L2 - 1, :, depth] += remaining[:, :, L2 - 1] * own_SLK
        return stop


def _joined(groups: list[_NodeGroup]) -> _NodeGroup:
    """Groups with equally many children as one."""
    parents, children, rows, entries = zip(*groups, strict=True)
    parent, child = (tuple(map(torch.cat, zip(*axes, strict=True))) for axes in (parents, children))
    return _NodeGroup(parent, child, torch.cat(rows), torch.cat(entries))


def _up_to_diagonal(values_ST: Tensor) -> Tensor:
    """[S, n, T]: row n keeps the values up to column n and zeros after."""
    return values_ST.unsqueeze(1) * torch.ones(2 * values_ST.shape[-1:], device=values_ST.device).tril()
