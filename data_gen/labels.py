"""Labels: the block efficiency of every action, from one supertree (algorithms sheet, section 6).

`survivals` is exact given the supertree: what verification would yield, on average, on the very tokens drafted. It is
walked once per K: selection laws do not depend on what stands below a node, so they are computed once for all `L2`;
only the scalars of the bottom-up pass are repeated. Data generation stores the quieter `expected_labels` instead.

Legend: S supertrees, L trunk depths at which branches start, K branches, D depths within a branch (0 is the branching
node), T depths within the tree, A actions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from data_gen.expected import expected_labels
from data_gen.slots import Batch, Branches, SlotGroup, joined, one_by_one
from data_gen.trees import Supertree
from data_gen.verification import BottomUp, TopDown, Verifier, get_verifier
from data_gen.verification.one_path import FirstPath


def label_supertree(
    supertree: Supertree,
    target_probs_NV: Tensor,
    draft_probs_NV: Tensor,
    verifiers: Sequence[str],
    averaged: bool = False,
) -> Tensor:
    """E[tau + 1] of every action on its sub-tree, exact given the tree.

    Args:
        target_probs_NV, draft_probs_NV: distributions after the supertree's nodes; the draft's leaves hold anything.
        verifiers: registry names.
        averaged: instead the `expected_labels`: the same mean over supertrees, with less variance.

    Returns:
        float64 [verifier, action], in the order of `supertree.space`.
    """
    batch = Batch.of([(supertree, target_probs_NV, draft_probs_NV)])
    if averaged:
        return expected_labels(batch, verifiers)[:, 0]
    return survivals(batch, verifiers)[:, 0].sum(-1)


def survivals(batch: Batch, verifiers: Sequence[str]) -> Tensor:
    """P(tau >= t) of every action on every supertree, for t from 0 to the longest tree.

    Returns:
        float64 [verifier, S, A, T]; the sum over T is the block efficiency E[tau + 1].
    """
    return torch.stack([_survival(get_verifier(name), batch) for name in verifiers])


def _survival(verifier: Verifier, batch: Batch) -> Tensor:
    space = batch.space
    if isinstance(verifier, TopDown):
        walk: _TopDownWalk | _BottomUpWalk = _TopDownWalk(verifier, batch)
    elif isinstance(verifier, BottomUp):
        walk = _BottomUpWalk(verifier, batch)
    elif isinstance(verifier, FirstPath):  # the first branch is the trunk's own continuation
        chain = verifier.chain
        walk = _TopDownWalk(chain, batch) if isinstance(chain, TopDown) else _BottomUpWalk(chain, batch)
        return walk.chains()[:, [L1 + L2 for _, L1, L2 in space]]
    else:
        return torch.stack([one_by_one(verifier, batch, s) for s in range(len(batch))])
    chains_SLT = walk.chains()
    trees = {K: walk.trees(K) for K in range(2, space.max_K + 1)}  # [S, L, L2, T] each
    return torch.stack([chains_SLT[:, L1 + L2] if K == 1 else trees[K][:, L1, L2 - 1] for K, L1, L2 in space], dim=1)


def _first_branches(batch: Batch, K: int) -> Branches:
    """The first K branches of every trunk depth: X is L."""
    return batch.branches([(L1, tuple(range(K))) for L1 in range(batch.space.max_L1 + 1)])


class _TopDownWalk:
    """Survival of top-down verifiers: the mass that reaches each depth."""

    def __init__(self, verifier: TopDown, batch: Batch) -> None:
        self.verifier, self.batch = verifier, batch
        pull_ST = torch.ones(batch.trunk_ST.shape, dtype=torch.float64, device=batch.rows.device)
        self._pull(batch.trunk_nodes(range(pull_ST.shape[1] - 1)), pull_ST)
        self.trunk_reach_ST = pull_ST.cumprod(-1)

    def _pull(self, group: SlotGroup, out: Tensor) -> None:
        for part in group.parts(self.batch.rows):
            out[part.child] = self.verifier.pull(self.batch.rows.profile(part.rows_M), part.entries_Mk)

    def chains(self) -> Tensor:
        """[S, chain length, T]."""
        return _up_to_diagonal(self.trunk_reach_ST)

    def trees(self, K: int) -> Tensor:
        """[S, L, L2 - 1, T]."""
        branches, D = _first_branches(self.batch, K), self.batch.space.max_L2
        reach_SLKD = self.trunk_reach_ST.new_zeros(branches.shape)
        for depth in range(D):
            for group in branches.nodes[depth]:
                self._pull(group, reach_SLKD)
        reach_SLKD[..., 0] = self.trunk_reach_ST[:, : self.batch.space.max_L1 + 1].unsqueeze(-1)
        for depth in range(D):
            owner_SLK = branches.owner_SXKD[..., depth]
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

    def __init__(self, verifier: BottomUp, batch: Batch) -> None:
        self.verifier, self.batch, self.rows = verifier, batch, batch.rows
        self.trunk_entry_ST = torch.ones(batch.trunk_ST.shape, dtype=torch.float64, device=self.rows.device)
        self.trunk_final_ST = torch.zeros_like(self.trunk_entry_ST)
        inner = range(batch.trunk_ST.shape[1] - 1)
        for depth in inner:  # a weight depends on the one above
            self._enter(batch.trunk_nodes(range(depth, depth + 1)), self.trunk_entry_ST)
        self._leave(batch.trunk_nodes(inner), self.trunk_entry_ST, self.trunk_final_ST)

    def _enter(self, group: SlotGroup, entry: Tensor) -> None:
        profile = self.rows.profile(group.rows_M)
        entry[group.child] = self.verifier.enter(profile, entry[group.parent], group.entries_Mk)

    def _leave(self, group: SlotGroup, entry: Tensor, final: Tensor) -> None:
        for part in group.parts(self.rows):
            final[part.parent] = self.verifier.leave(self.rows.profile(part.rows_M), entry[part.parent])

    def _split(self, group: SlotGroup, entry: Tensor, final: Tensor, visits: Tensor) -> None:
        for part in group.parts(self.rows):
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
        branches, D = _first_branches(self.batch, K), self.batch.space.max_L2
        shape = branches.shape
        entry_SLKD = self.trunk_entry_ST.new_zeros(shape)
        final_SLKD = torch.zeros_like(entry_SLKD)
        # which branch holds the child that is visited first, second, ..; -1 where there are no more
        visits_SLKDk = torch.full((*shape, K), -1, device=entry_SLKD.device)
        entry_SLKD[..., 0, 0] = self.trunk_entry_ST[:, : self.batch.space.max_L1 + 1]
        alone: list[SlotGroup] = []
        for depth in range(D):
            for group in branches.nodes[depth]:
                if group.entries_Mk.shape[-1] > 1:
                    self._split(group, entry_SLKD, final_SLKD, visits_SLKDk)
                else:
                    self._enter(group, entry_SLKD)
                    visits_SLKDk[..., 0][group.parent] = group.child[2][:, 0]
                    alone.append(group)
        if alone:  # their wide sums wait until every weight is known
            self._leave(joined(alone), entry_SLKD, final_SLKD)
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


def _up_to_diagonal(values_ST: Tensor) -> Tensor:
    """[S, n, T]: row n keeps the values up to column n and zeros after."""
    return values_ST.unsqueeze(1) * torch.ones(2 * values_ST.shape[-1:], device=values_ST.device).tril()
