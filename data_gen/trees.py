"""Draft trees.

Legend: N nodes (node 0 is the root), D depth, M nodes taken at once, k child-list entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

Path = Sequence[int]


class DraftTree:
    """A drafted token tree. Equal prefixes are one node; a node's child list keeps branch order and
    duplicates. Node 0 is the root, the last committed token.

    Attributes:
        branch_nodes: each branch's node ids, from the branching node (included) to its leaf.
        roots: several where trees stand side by side, to be verified together.
    """

    def __init__(self) -> None:
        self.branch_nodes: list[list[int]] = []
        self.roots = [0]
        self._tokens = [-1]
        self._parents = [-1]
        self._depths = [0]
        self._child_lists: list[list[int]] = [[]]
        self._child_of: list[dict[int, int]] = [{}]  # by token

    @classmethod
    def from_paths(cls, trunk: Path, branches: Sequence[Path]) -> DraftTree:
        """A delayed tree: every branch starts at the trunk's end; `[[]]` as branches is the trunk
        alone. ValueError for branches of different lengths."""
        branch_lengths = [len(branch) for branch in branches]
        if len(set(branch_lengths)) > 1:
            raise ValueError(f"branches differ in length: {branch_lengths}")
        tree = cls()
        end = tree._add_path(0, trunk)[-1]
        tree.branch_nodes = [tree._add_path(end, branch) for branch in branches]
        return tree

    def _add_path(self, node: int, path: Path) -> list[int]:
        nodes = [node]
        for token in map(int, path):
            nodes += self.append(nodes[-1], [token])
        return nodes

    def append(self, parent: int, tokens: Sequence[int]) -> list[int]:
        """Add tokens to a node's child list, equal ones as often as they are there; their nodes.
        Only while the tree is built, as `add`."""
        children = []
        for token in tokens:
            before = len(self)
            child = self.add(parent, token)
            if child < before:
                self._child_lists[parent].append(child)
            children.append(child)
        return children

    def add(self, parent: int, token: int) -> int:
        """The child of a node with this token; a new one, at the end of the parent's child list,
        where there is none. Only while the tree is built: its tensors are made once."""
        child = self._child_of[parent].setdefault(token, len(self._tokens))
        if child == len(self._tokens):
            self._tokens.append(token)
            self._parents.append(parent)
            self._depths.append(self._depths[parent] + 1)
            self._child_lists.append([])
            self._child_of.append({})
            self._child_lists[parent].append(child)
        return child

    def child(self, node: int, token: int) -> int | None:
        """The child of a node with this token; None where there is none."""
        return self._child_of[node].get(token)

    def along(self, paths: Sequence[Path]) -> DraftTree:
        """The same nodes under the same ids, but only those on the given paths (of node ids) are
        listed as children."""
        result = DraftTree()
        result.roots = self.roots
        result._tokens = self._tokens
        result._parents = self._parents
        result._depths = self._depths
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
        """Depths, int64; the root's is 0."""
        return torch.tensor(self._depths)

    def children(self, node: int) -> list[int]:
        """Node ids, one entry per branch through `node`, in branch order and with duplicates."""
        return self._child_lists[node]

    def node_of(self, path: Path) -> int:
        """The node at the end of a token sequence that starts at the root; KeyError where there is
        none."""
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

    def postorder(
        self, visits: Mapping[int, Sequence[int]] | None = None, root: int = 0
    ) -> list[int]:
        """Every node after its children, depth first.

        `visits` gives children in the order of visits, for the nodes where that is not the order of
        first appearance.
        """
        order: list[int] = []
        stack = [root]
        while stack:  # reversed preorder with the last child first is postorder
            node = stack.pop()
            order.append(node)
            if visits and node in visits:
                children = visits[node]
            else:
                children = self.children(node)
            stack.extend(dict.fromkeys(children))
        return order[::-1]

    def ancestors_NN(self) -> Tensor:
        """Which nodes each node attends to, itself and its ancestors; bool [N, N], a row for each
        node."""
        seen_NN = torch.eye(len(self), dtype=torch.bool)
        for node, parent in enumerate(self._parents):
            if parent >= 0:
                seen_NN[node] |= seen_NN[parent]
        return seen_NN

    @cached_property
    def paths_ND(self) -> Tensor:
        """For each node the ids of the nodes from the root (left out) to it, filled up with 0;
        int64 [N, D]."""
        paths = [torch.tensor(self.path_to(node), dtype=torch.int64) for node in range(len(self))]
        return pad_sequence(paths, batch_first=True)

    def groups(self, nodes: Sequence[int] | None = None) -> list[NodeGroup]:
        """The inner nodes among `nodes` (all nodes if None), by the length of their child lists."""
        if nodes is None:
            nodes = range(len(self))
        members: dict[int, list[int]] = {}
        for node in nodes:
            k = len(self.children(node))
            if k > 0:
                members.setdefault(k, []).append(node)
        groups = []
        for group in members.values():
            children_Mk = torch.tensor([self.children(node) for node in group])
            nodes_M = torch.tensor(group)
            groups.append(NodeGroup(nodes_M, self.tokens_N[children_Mk], children_Mk))
        return groups

    @cached_property
    def nodes_by_depth(self) -> list[list[int]]:
        nodes_by_depth = []
        for depth in range(max(self._depths) + 1):
            nodes_by_depth.append((self.depths_N == depth).nonzero()[:, 0].tolist())
        return nodes_by_depth


class NodeGroup(NamedTuple):
    """M inner nodes whose child lists have the same length k; int64 on the CPU."""

    nodes_M: Tensor
    entries_Mk: Tensor  # child tokens, in branch order
    children_Mk: Tensor  # the node of each entry
