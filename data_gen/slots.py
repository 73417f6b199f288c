"""Several supertrees as index tensors, so that all their actions are walked at once.

The node at depth `d` of branch `b` is a *slot*; equal prefixes share one slot, the first branch's. A node's child list
holds the chosen branches that pass through it, never the others of the merged supertree.

Legend: S supertrees, R rows of all of them, X choices of a trunk depth and of K branches there, K branches, D depths
within a branch (0 is the branching node), T depths of the trunk, M nodes taken at once, k child-list entries,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from data_gen.trees import Forest, Supertree
from data_gen.verification import Verifier
from data_gen.verification.profile import Rows, first_copies

# probabilities taken at once: on a CPU what its cache holds, on a GPU what its memory spares
WIDE = {"cpu": 1 << 18, "cuda": 1 << 26}

Pick = tuple[int, tuple[int, ...]]  # a trunk depth, and the branches taken there


class SlotGroup(NamedTuple):
    """Nodes with the same number of child-list entries, as indices into slots."""

    parent: tuple[Tensor, ...]  # each [M]: indexes the node's slot
    child: tuple[Tensor, ...]  # each [M, k]: indexes the slots of its entries
    rows_M: Tensor
    entries_Mk: Tensor

    def parts(self, rows: Rows) -> Iterator[SlotGroup]:
        """Itself in parts whose distributions are taken at once."""
        size = at_once(rows)
        if len(self.rows_M) <= size:
            yield self
            return
        for start in range(0, len(self.rows_M), size):
            part = slice(start, start + size)
            parent, child = (tuple(axis[part] for axis in axes) for axes in (self.parent, self.child))
            yield SlotGroup(parent, child, self.rows_M[part], self.entries_Mk[part])


def at_once(rows: Rows) -> int:
    """How many distributions are taken at once."""
    return max(1, WIDE["cuda" if rows.p_NV.is_cuda else "cpu"] // rows.p_NV.shape[-1])


def joined(groups: Sequence[SlotGroup]) -> SlotGroup:
    """Groups with equally many entries as one."""
    parents, children, rows, entries = zip(*groups, strict=True)
    parent, child = (tuple(map(torch.cat, zip(*axes, strict=True))) for axes in (parents, children))
    return SlotGroup(parent, child, torch.cat(rows), torch.cat(entries))


class Batch:
    """Supertrees of one space, and the distributions after their nodes.

    Args:
        rows: those of all supertrees.
        offsets: the row of each supertree's root; its nodes follow in order.
        trunk_hidden_STD: the draft's last hidden states after the root and the trunk's inner nodes, where kept.

    Attributes:
        trunk_ST: row of every trunk node, the root first.
        branch_SLKD: row of every branch's nodes, the branching node first, at every trunk depth L.
        tokens_R: 0 where a row is no node's.
    """

    def __init__(
        self,
        supertrees: Sequence[Supertree],
        rows: Rows,
        offsets: Sequence[int],
        trunk_hidden_STD: Tensor | None = None,
    ) -> None:
        self.space, self.rows, self.trunk_hidden_STD = supertrees[0].space, rows, trunk_hidden_STD
        self.supertrees, self.offsets = list(supertrees), list(offsets)
        pairs = list(zip(supertrees, offsets, strict=True))
        tokens_R = torch.zeros(len(rows.p_NV), dtype=torch.int64)
        for tree, offset in pairs:
            tokens_R[offset : offset + len(tree)] = tree.tokens_N
        self.tokens_R = tokens_R.to(rows.device)
        self.trunk_ST = torch.stack([tree.trunk_D + offset for tree, offset in pairs]).to(rows.device)
        self.branch_SLKD = torch.stack([tree.branches_LKD + offset for tree, offset in pairs]).to(rows.device)
        self._branches: dict[tuple[Pick, ...], Branches] = {}

    @classmethod
    def of(cls, samples: Sequence[tuple[Supertree, Tensor, Tensor]]) -> Batch:
        """From supertrees with the target's and the draft's distributions after their nodes, [N, V] each."""
        trees, p, q = zip(*samples, strict=True)
        return cls(trees, Rows(torch.cat(p), torch.cat(q)), [0, *accumulate(map(len, trees))][:-1])

    def only(self, which: Sequence[int]) -> Batch:
        """Some of the supertrees, on the same rows."""
        return Batch([self.supertrees[s] for s in which], self.rows, [self.offsets[s] for s in which])

    def __len__(self) -> int:
        return len(self.supertrees)

    def branches(self, picks: Sequence[Pick]) -> Branches:
        """The branches that some choices take; worked out once for all verifiers."""
        key = tuple(picks)
        if key not in self._branches:
            self._branches[key] = Branches(self, picks)
        return self._branches[key]

    def trunk_nodes(self, depths: range) -> SlotGroup:
        """The trunk's inner nodes at the given depths, each with one entry: the next trunk token."""
        pairs = torch.cartesian_prod(torch.arange(len(self)), torch.arange(depths.start, depths.stop))
        s_M, t_M = pairs.to(self.rows.device).unbind(-1)
        children = (s_M.unsqueeze(-1), t_M.unsqueeze(-1) + 1)
        return SlotGroup((s_M, t_M), children, self.trunk_ST[s_M, t_M], self.tokens_R[self.trunk_ST[children]])


class Branches:
    """The branches that some choices take: K of them, at one trunk depth each."""

    def __init__(self, batch: Batch, picks: Sequence[Pick]) -> None:
        depths_X, chosen_XK = (torch.tensor(column) for column in zip(*picks, strict=True))
        # not the batch itself: a cycle would keep its rows in memory until Python looks for cycles
        self.trunk_depths_X = depths_X.to(batch.rows.device)
        self.row_SXKD = batch.branch_SLKD[:, depths_X.unsqueeze(-1), chosen_XK]
        # the first of the chosen branches with the same prefix
        self.owner_SXKD = first_copies(self.row_SXKD.movedim(2, 3)).movedim(3, 2)
        self.nodes = [list(self._nodes(depth, batch.tokens_R)) for depth in range(self.shape[-1] - 1)]  # by depth

    @property
    def shape(self) -> torch.Size:
        return self.row_SXKD.shape

    def _nodes(self, depth: int, tokens_R: Tensor) -> Iterator[SlotGroup]:
        """The nodes at a depth above the last, grouped by the number of their entries."""
        K = self.shape[2]
        owner_SXK = self.owner_SXKD[..., depth]
        passes_SXKK = owner_SXK.unsqueeze(2) == torch.arange(K, device=owner_SXK.device).unsqueeze(-1)
        count_SXK = passes_SXKK.sum(-1)  # entries of the child list of the slot; 0 where the slot is a copy
        for k in range(1, K + 1):
            s_M, x_M, b_M = (count_SXK == k).nonzero(as_tuple=True)
            if len(s_M) == 0:
                continue
            members_Mk = passes_SXKK[s_M, x_M, b_M].nonzero()[:, 1].view(-1, k)
            d_M = torch.full_like(s_M, depth)
            children = (s_M.unsqueeze(-1), x_M.unsqueeze(-1), members_Mk, d_M.unsqueeze(-1) + 1)
            entries_Mk = tokens_R[self.row_SXKD[children]]
            yield SlotGroup((s_M, x_M, b_M, d_M), children, self.row_SXKD[s_M, x_M, b_M, d_M], entries_Mk)


def one_by_one(verifier: Verifier, batch: Batch, s: int) -> Tensor:
    """[A, T] by the verifier's own walk over every action's tree: for rules that look at the tree as a whole."""
    space, supertree = batch.space, batch.supertrees[s]
    nodes = slice(batch.offsets[s], batch.offsets[s] + len(supertree))
    p_NV, q_NV = batch.rows.p_NV[nodes], batch.rows.q_NV[nodes]
    survival_AT = p_NV.new_zeros(len(space), space.max_L1 + space.max_L2 + 1, dtype=torch.float64)
    together = max(1, 32 * at_once(batch.rows) // (1 + space.max_L1 + space.max_K * space.max_L2))
    for start in range(0, len(space), together):
        trees, rows = zip(*(supertree.subtree(a) for a in space.actions[start : start + together]), strict=True)
        forest, rows_N = Forest(trees), torch.cat(rows)
        stops_N = verifier.stops(forest, p_NV[rows_N], q_NV[rows_N])
        own_N = torch.arange(len(trees)).repeat_interleave(torch.tensor(list(map(len, trees)))) + start
        places = own_N.to(stops_N.device), forest.depths_N.to(stops_N.device)
        survival_AT.index_put_(places, stops_N, accumulate=True)
    return survival_AT.flip(-1).cumsum(-1).flip(-1)
