"""Labels with the last draw averaged out: as unbiased as the exact ones of `labels`, and several times quieter.

A subtree that is entered with weight `w` accepts with probability `w`, on average over what is drafted in it
(algorithms sheet, section 3); a top-down solver moves on with its acceptance. So the part that the nodes *below* a node
play in its acceptance can be replaced by their mean, and the node's own children by theirs:

    E[tau + 1] = 1 + E[ sum over inner nodes v of visit(v) flow(v) ]

`visit(v)` is the probability that no subtree visited before has accepted, and top-down that `v` is reached; `flow(v)`
the mass that goes from `v` to a child. Each is a function of the path to `v` and of the siblings along it, never of
what stands below. So one walk gives the labels of all `L2` as running sums, and what a node adds can be averaged over
every path of the supertree that has the same law:

- depth `t` of a chain over the branches at all trunk depths, each split of the trunk into equal parts;
- a tree's trunk part is that of a chain;
- K branches at the shallow trunk depths over all choices of K; further down, the trunk's own noise dominates.

Legend: as in `slots`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from data_gen.slots import Batch, Pick, SlotGroup, at_once, joined, one_by_one
from data_gen.verification import BottomUp, TopDown, Verifier, get_verifier
from data_gen.verification.one_path import FirstPath

CHOOSING = 1  # at so many trunk depths, from the root on, are all choices of the branches averaged


def expected_labels(batch: Batch, verifiers: Sequence[str], choosing: int = CHOOSING) -> Tensor:
    """Labels of every action on every supertree, float64 [verifier, S, A]; their mean over supertrees is the exact one.

    A verifier that looks at a tree as a whole (`greedy_block`) is labelled exactly given the tree.

    Args:
        choosing: at how many trunk depths all choices of branches are averaged.
    """
    return expected_and_trunk_labels(batch, verifiers, choosing)[0]


def expected_and_trunk_labels(
    batch: Batch, verifiers: Sequence[str], choosing: int = CHOOSING
) -> tuple[Tensor, Tensor]:
    """`expected_labels`, and the same given each supertree's own trunk; float64 [verifier, S, A] each.

    The latter follow one trunk: what an action adds to a shorter chain of that trunk is a fair sample of what going on
    is worth to one who has drafted that chain.
    """
    known: dict[Any, Tensor] = {}  # almost all rules share one
    pairs = [_labels(get_verifier(name), batch, known, choosing) for name in verifiers]
    expected, trunk = (torch.stack(labels) for labels in zip(*pairs, strict=True))
    return expected, trunk


def _labels(verifier: Verifier, batch: Batch, overlaps: dict[Any, Tensor], choosing: int) -> tuple[Tensor, Tensor]:
    space = batch.space
    rule = verifier.chain if isinstance(verifier, FirstPath) else verifier
    if not isinstance(rule, TopDown | BottomUp):
        exact_SA = torch.stack([one_by_one(verifier, batch, s).sum(-1) for s in range(len(batch))])
        return exact_SA, exact_SA
    if type(rule).overlap not in overlaps:
        overlaps[type(rule).overlap] = _overlaps(rule, batch)
    walk = _Walk(rule, batch, overlaps[type(rule).overlap])
    chains = [1 + torch.nn.functional.pad(chain_ST.cumsum(-1), (1, 0)) for chain_ST in (walk.chain(), walk.added_ST)]
    if isinstance(verifier, FirstPath):
        lengths = [L1 + L2 for _, L1, L2 in space]
        return chains[0][:, lengths], chains[1][:, lengths]
    trees = {K: walk.trees(K, choosing) for K in range(2, space.max_K + 1)}  # [S, L, L2 - 1] each

    def labels(chain_SL: Tensor) -> Tensor:
        columns = [chain_SL[:, L1 + L2] if K == 1 else chain_SL[:, L1] + trees[K][:, L1, L2 - 1] for K, L1, L2 in space]
        return torch.stack(columns, dim=1)

    return labels(chains[0]), labels(chains[1])


class _Walk:
    """`visit` and weight of every slot from the root down, and what the slot adds: `visit * flow`.

    Top-down the weight is 1 everywhere, and `visit` the probability to be reached.
    """

    def __init__(self, verifier: TopDown | BottomUp, batch: Batch, overlap_R: Tensor) -> None:
        self.verifier, self.batch, self.rows, self.overlap_R = verifier, batch, batch.rows, overlap_R
        self.visit_ST = torch.ones(batch.trunk_ST.shape, dtype=torch.float64, device=self.rows.device)
        self.weight_ST = torch.ones_like(self.visit_ST)
        inner = batch.trunk_ST.shape[1] - 1
        groups = [batch.trunk_nodes(range(depth, depth + 1)) for depth in range(inner)]
        for group in groups:
            self._enter(group, self.visit_ST, self.weight_ST)
        added_ST = torch.zeros_like(self.visit_ST)
        if groups:
            self._flow(joined(groups), self.visit_ST, self.weight_ST, added_ST)
        self.added_ST = added_ST[:, :inner]

    def chain(self) -> Tensor:
        """What each depth adds to a chain, [S, T]: averaged over all branches that hold one."""
        space = self.batch.space
        if space.max_K == 1:
            return self.added_ST
        others = range(1, space.max_K)  # the trunk's own continuation is branch 0
        added_SXD = self._added([(L1, (b,)) for L1 in range(space.max_L1 + 1) for b in others])
        others_SLD = added_SXD.unflatten(1, (space.max_L1 + 1, len(others))).sum(2)
        columns = []
        for t in range(self.added_ST.shape[1]):
            mean_S = self.added_ST[:, t]
            for L1 in reversed(range(max(0, t - space.max_L2 + 1), min(space.max_L1, t) + 1)):
                mean_S = (mean_S + others_SLD[:, L1, t - L1]) / space.max_K
            columns.append(mean_S)
        return torch.stack(columns, dim=-1) if columns else self.added_ST

    def trees(self, K: int, choosing: int) -> Tensor:
        """What K branches add to the trunk of each depth, [S, L, L2 - 1]."""
        space = self.batch.space
        choices = list(combinations(range(space.max_K), K))
        picks = [(L1, c) for L1 in range(space.max_L1 + 1) for c in (choices if choosing > L1 else choices[:1])]
        total_SXD = self._added(picks).cumsum(-1)
        depths_X = torch.tensor([L1 for L1, _ in picks], device=total_SXD.device)
        sum_SLD = total_SXD.new_zeros(len(total_SXD), space.max_L1 + 1, space.max_L2).index_add_(1, depths_X, total_SXD)
        return sum_SLD / depths_X.bincount().view(1, -1, 1)

    def _added(self, picks: Sequence[Pick]) -> Tensor:
        """What each depth of the chosen branches adds, [S, X, D]."""
        branches = self.batch.branches(picks)
        visit, weight, added = self.visit_ST.new_zeros(3, *branches.shape)
        visit[..., 0, 0] = self.visit_ST[:, branches.trunk_depths_X]
        weight[..., 0, 0] = self.weight_ST[:, branches.trunk_depths_X]
        alone: list[SlotGroup] = []
        for depth in range(branches.shape[-1] - 1):
            for group in branches.nodes[depth]:
                if group.entries_Mk.shape[-1] > 1:
                    self._split(group, visit, weight, added)
                else:
                    self._enter(group, visit, weight)
                    alone.append(group)
        if alone:  # their wide sums wait until every weight is known
            self._flow(joined(alone), visit, weight, added)
        return added[..., :-1].sum(2)

    def _enter(self, group: SlotGroup, visit: Tensor, weight: Tensor) -> None:
        """Only children."""
        profile = self.rows.profile(group.rows_M)
        visit_M1, weight_M = visit[group.parent].unsqueeze(-1), weight[group.parent]
        if isinstance(self.verifier, TopDown):
            visit[group.child] = visit_M1 * self.verifier.pull(profile, group.entries_Mk)
            weight[group.child] = 1.0
        else:
            visit[group.child] = visit_M1
            weight[group.child] = self.verifier.enter(profile, weight_M, group.entries_Mk)

    def _split(self, group: SlotGroup, visit: Tensor, weight: Tensor, added: Tensor) -> None:
        """Several children; a copy's slot is not visited."""
        for part in group.parts(self.rows):
            profile = self.rows.profile(part.rows_M)
            visit_M1, weight_M = visit[part.parent].unsqueeze(-1), weight[part.parent]
            if isinstance(self.verifier, TopDown):
                pull_Mk = self.verifier.pull(profile, part.entries_Mk)
                visit[part.child], weight[part.child] = visit_M1 * pull_Mk, 1.0
                flow_M = pull_Mk.sum(-1)
            else:
                entry_Mk, _, flow_M, order_Mk = self.verifier.split(profile, weight_M, part.entries_Mk)
                visit[part.child], weight[part.child] = visit_M1 * _not_before(entry_Mk, order_Mk), entry_Mk
            added[part.parent] = visit_M1[:, 0] * flow_M

    def _flow(self, group: SlotGroup, visit: Tensor, weight: Tensor, added: Tensor) -> None:
        """What nodes with one child add: `sum min(w p, q)`."""
        visit_M, weight_M = visit[group.parent], weight[group.parent]
        flow_M = torch.where(weight_M >= 1, self.overlap_R[group.rows_M], 0.0)
        (partly_m,) = ((weight_M > 0) & (weight_M < 1) & (visit_M > 0)).nonzero(as_tuple=True)
        for part_m in partly_m.split(at_once(self.rows)):
            if len(part_m):
                profile, weights_m = self.rows.profile(group.rows_M[part_m]), weight_M[part_m]
                flow_M[part_m] = (weights_m - profile.excess(weights_m, profile.ones())).clamp(min=0)
        added[group.parent] = visit_M * flow_M


def _not_before(entry_Mk: Tensor, order_Mk: Tensor | None) -> Tensor:
    """P(none of the children visited before has accepted), [M, k]."""
    visited_Mk = entry_Mk if order_Mk is None else entry_Mk.gather(-1, order_Mk)
    before_Mk = torch.cat([torch.ones_like(visited_Mk[:, :1]), (1 - visited_Mk[:, :-1]).cumprod(-1)], dim=-1)
    return before_Mk if order_Mk is None else torch.zeros_like(entry_Mk).scatter_(-1, order_Mk, before_Mk)


def _overlaps(verifier: Verifier, batch: Batch) -> Tensor:
    """`Verifier.overlap` of all rows, [R]; without meaning at leaves."""
    rows_R = torch.arange(len(batch.rows.p_NV), device=batch.rows.device)
    parts = rows_R.split(at_once(batch.rows))
    return torch.cat([verifier.overlap(batch.rows.profile(part)) for part in parts])
