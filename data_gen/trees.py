"""Draft trees: merged ones, and ones with fixed slots for decoding steps without host synchronisation.

`DraftTree` merges equal prefixes, so Python must read the tokens. On a `Layout` every drafted token has a slot of its
own, and the device finds the equal prefixes (`Merged`). The slots of (2, 1, 2), a trunk of one token and two branches:

    slot     0     1       2          3          4          5
    is       root  trunk   branch 0   branch 1   branch 0   branch 1
    depth    0     1       2          2          3          3

Legend: N nodes (node 0 is the root), D depth, M nodes taken at once, k child-list entries, S slots, K branches, E
entries (children) of a node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from selector.actions import Action

Path = Sequence[int]
ABSENT = -1  # fills up a list of entries


class DraftTree:
    """A drafted token tree. Equal prefixes are one node; a node's child list keeps branch order and duplicates.

    `branch_nodes` are each branch's node ids from the branching node (included) to its leaf. There are several `roots`
    in tests alone, which verify many trees side by side.
    """

    def __init__(self) -> None:
        self.branch_nodes: list[list[int]] = []
        self.roots = [0]
        self._tokens, self._parents, self._depths = [-1], [-1], [0]
        self._child_lists: list[list[int]] = [[]]
        self._child_of: list[dict[int, int]] = [{}]  # by token

    @classmethod
    def from_paths(cls, trunk: Path, branches: Sequence[Path]) -> DraftTree:
        """A delayed tree: every branch starts at the trunk's end; `[[]]` as branches is the trunk alone. ValueError for
        branches of different lengths."""
        if len({len(branch) for branch in branches}) > 1:
            raise ValueError(f"branches differ in length: {[len(branch) for branch in branches]}")
        tree = cls()
        end = tree._add_path(0, trunk)[-1]
        tree.branch_nodes = [tree._add_path(end, branch) for branch in branches]
        return tree

    def _add_path(self, node: int, path: Path) -> list[int]:
        nodes = [node]
        for token in map(int, path):
            parent = nodes[-1]
            child = self._child_of[parent].setdefault(token, len(self._tokens))
            if child == len(self._tokens):
                self._tokens.append(token)
                self._parents.append(parent)
                self._depths.append(self._depths[parent] + 1)
                self._child_lists.append([])
                self._child_of.append({})
            self._child_lists[parent].append(child)
            nodes.append(child)
        return nodes

    def along(self, paths: Sequence[Path]) -> DraftTree:
        """The same nodes under the same ids, but only those on the given paths (of node ids) are listed as children."""
        result = DraftTree()
        result.roots = self.roots
        result._tokens, result._parents, result._depths = self._tokens, self._parents, self._depths
        result._child_lists = [[] for _ in self._child_lists]
        for path in paths:
            for parent, child in pairwise(path):
                result._child_lists[parent] = [child]
        return result

    def __len__(self) -> int:
        return len(self._tokens)

    @cached_property
    def tokens_N(self) -> Tensor:
        """Token ids, int64; the root's is -1."""
        return torch.tensor(self._tokens)

    @cached_property
    def parents_N(self) -> Tensor:
        """Parents, int64; the root's is -1. A parent stands before its children."""
        return torch.tensor(self._parents)

    @cached_property
    def depths_N(self) -> Tensor:
        return torch.tensor(self._depths)

    def children(self, node: int) -> list[int]:
        """Node ids, one entry per branch through `node`, in branch order and with duplicates."""
        return self._child_lists[node]

    def node_of(self, path: Path) -> int:
        """The node at the end of a token sequence that starts at the root; KeyError where there is none."""
        node = 0
        for token in path:
            node = self._child_of[node][int(token)]
        return node

    def path_to(self, node: int) -> list[int]:
        """Node ids from the root (left out) to `node` (included)."""
        path: list[int] = []
        while self._parents[node] >= 0:
            path.append(node)
            node = self._parents[node]
        return path[::-1]

    def token(self, node: int) -> int:
        return self._tokens[node]

    def postorder(self, visits: Mapping[int, Sequence[int]] | None = None, root: int = 0) -> list[int]:
        """Every node after its children, depth first.

        `visits` gives children in the order of visits, for the nodes where that is not the order of first appearance.
        """
        order: list[int] = []
        stack = [root]
        while stack:  # reversed preorder with the last child first is postorder
            node = stack.pop()
            order.append(node)
            children = visits[node] if visits and node in visits else self.children(node)
            stack.extend(dict.fromkeys(children))
        return order[::-1]

    @property
    def is_chain(self) -> bool:
        return all(children == [node + 1] for node, children in enumerate(self._child_lists[:-1]))

    def ancestors_NN(self) -> Tensor:
        """Which nodes each node attends to, itself and its ancestors; bool [N, N], a row for each node."""
        return ancestors(self._parents)

    @cached_property
    def paths_ND(self) -> Tensor:
        """For each node the ids of the nodes from the root (left out) to it, filled up with 0; int64 [N, D]."""
        return _padded([self.path_to(node) for node in range(len(self))])

    def groups(self, nodes: Sequence[int] | None = None) -> list[NodeGroup]:
        """The inner nodes among `nodes` (all nodes if None), by the length of their child lists."""
        members: dict[int, list[int]] = {}
        for node in range(len(self)) if nodes is None else nodes:
            members.setdefault(len(self.children(node)), []).append(node)
        inner = [(group, torch.tensor([self.children(node) for node in group])) for k, group in members.items() if k]
        return [NodeGroup(torch.tensor(group), self.tokens_N[children_Mk], children_Mk) for group, children_Mk in inner]

    @cached_property
    def levels(self) -> list[list[int]]:
        return [(self.depths_N == depth).nonzero()[:, 0].tolist() for depth in range(max(self._depths) + 1)]


class NodeGroup(NamedTuple):
    """M inner nodes whose child lists have the same length k; int64 on the CPU."""

    nodes_M: Tensor
    entries_Mk: Tensor  # child tokens, in branch order
    children_Mk: Tensor  # the node of each entry

    def to(self, device: torch.device) -> NodeGroup:
        return NodeGroup(*(tensor.to(device) for tensor in self))


def ancestors(parents: Sequence[int]) -> Tensor:
    """As `DraftTree.ancestors_NN`; a parent stands before its children, and the root's is -1."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen


def _padded(paths: list[list[int]]) -> Tensor:
    depth = max(map(len, paths))
    return torch.tensor([path + [0] * (depth - len(path)) for path in paths], dtype=torch.int64)


class Layout:
    """The slots of an action's tokens. All tensors are int64 or bool, and on the given device.

    A chain and a lookup are a trunk alone, with K = 1. `order_S` are the slots in the order of a `DraftTree`'s nodes.
    The first `inner` slots have children; `levels` are the slots of each depth from the trunk's end on.
    """

    def __init__(self, action: Action, device: torch.device) -> None:
        is_chain = action.K == 1 or action.L2 == 0
        self.K, self.L1, self.L2 = (1, action.L1 + action.L2, 0) if is_chain else action[:3]
        parents = [-1, *range(self.L1)]
        for depth in range(self.L2):
            parents += [self.slot(depth, k) if depth else self.L1 for k in range(self.K)]
        paths: list[list[int]] = [[]]
        for slot, parent in enumerate(parents[1:], 1):
            paths.append([*paths[parent], slot])
        branches = [self.slot(depth, k) for k in range(self.K) for depth in range(1, self.L2 + 1)]
        self.size, self.depth, self.inner = len(parents), self.L1 + self.L2, len(parents) - self.K
        ends = [self.L1, *(self.slot(depth, 0) for depth in range(1, self.L2 + 2))]
        self.levels = [slice(*each) for each in pairwise(ends)]
        self.parents_S = torch.tensor(parents, device=device)
        self.depths_S = torch.tensor([len(path) for path in paths], device=device)
        self.ancestors_SS = ancestors(parents).to(device)
        self.paths_SD = _padded(paths).to(device)
        self.order_S = torch.tensor([*range(self.L1 + 1), *branches], device=device)

    def slot(self, depth: int, k: int) -> int:
        """The slot of branch `k` at this depth below the trunk, 1 being its first token."""
        return self.L1 + 1 + (depth - 1) * self.K + k


layout_of = cache(Layout)


class Merged:
    """Which slots of a drafted tree hold the same path from the root, and its children, without host synchronisation.

    Attributes:
        first_S: the first slot with the same path; int64.
        entries_SE: the drafted tokens after each path, at its first slot, in branch order with duplicates, filled up
            with `ABSENT`; all `ABSENT` at other slots; int64, E = K.
        children_SE: the first slot of each entry's path; 0 where the entry is absent.
    """

    def __init__(self, layout: Layout, tokens_S: Tensor) -> None:
        K, L1, L2 = layout.K, layout.L1, layout.L2
        device = tokens_S.device
        self.tokens_S = tokens_S
        self.first_S = torch.arange(layout.size, device=device)
        self.entries_SE = torch.full((layout.size, K), ABSENT, device=device)
        self.children_SE = torch.zeros_like(self.entries_SE)
        self.entries_SE[:L1, 0] = tokens_S[1 : L1 + 1]
        self.children_SE[:L1, 0] = self.first_S[1 : L1 + 1]
        if L2 > 0:
            tokens_DK = tokens_S[L1 + 1 :].view(L2, K)
            same_DKK = (tokens_DK.unsqueeze(-1) == tokens_DK.unsqueeze(-2)).to(torch.uint8).cumprod(0)
            first_DK = same_DKK.argmax(-1)
            starts_D1 = L1 + 1 + K * torch.arange(L2, device=device).unsqueeze(-1)
            self.first_S[L1 + 1 :] = (starts_D1 + first_DK).flatten()
            self.entries_SE[L1], self.children_SE[L1] = tokens_DK[0], starts_D1[0] + first_DK[0]
            # below: branches that share a path are listed at the first of them, in branch order
            is_first_DK = first_DK == torch.arange(K, device=device)
            member_DKK = same_DKK[:-1].bool() & is_first_DK[:-1].unsqueeze(-1)
            order_DKK = (~member_DKK).to(torch.uint8).argsort(dim=-1, stable=True)
            there_DKK = member_DKK.gather(-1, order_DKK)
            for values_SE, below_DK, none in (
                (self.entries_SE, tokens_DK[1:], ABSENT),
                (self.children_SE, starts_D1[1:] + first_DK[1:], 0),
            ):
                below_DKK = below_DK.unsqueeze(1).expand(-1, K, -1).gather(-1, order_DKK)
                values_SE[L1 + 1 : layout.inner] = torch.where(there_DKK, below_DKK, none).flatten(0, 1)
        self.there_SE = self.entries_SE != ABSENT
        self.count_S = self.there_SE.sum(-1)
        self.is_first_S = self.first_S == torch.arange(layout.size, device=device)
