"""Draft trees.

Legend: N nodes (node 0 is the root), D depth.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

Path = Sequence[int]


class _Prefixes:
    """Numbers token sequences in order of appearance; equal prefixes get one number."""

    def __init__(self) -> None:
        self.tokens, self.parents, self.depths = [-1], [-1], [0]
        self.child_of: list[dict[int, int]] = [{}]

    def add(self, node: int, token: int) -> int:
        """The child of `node` that holds `token`, made if it is not there."""
        child = self.child_of[node].get(token)
        if child is None:
            child = len(self.tokens)
            self.child_of[node][token] = child
            self.child_of.append({})
            self.tokens.append(token)
            self.parents.append(node)
            self.depths.append(self.depths[node] + 1)
        return child

    def add_path(self, node: int, path: Path) -> list[int]:
        """The nodes along `path` from `node`, `node` itself first."""
        nodes = [node]
        for token in path:
            nodes.append(self.add(nodes[-1], int(token)))
        return nodes


class Topology(NamedTuple):
    """The shape of a drafted tree: the parent of every node, -1 for the root's children; a parent stands first.

    Nodes stand in breadth-first order, so that one draft pass makes each depth.
    """

    parents: tuple[int, ...]

    @classmethod
    def from_paths(cls, paths: Sequence[Sequence[int]]) -> Topology:
        """From child ranks, as sparse trees are written: `[[0], [1], [0, 0]]` is a pair, the first with a child.

        Raises:
            ValueError: a path is empty or listed twice, or its prefix or an elder sibling is missing.
        """
        known: dict[tuple[int, ...], int] = {(): -1}
        parents: list[int] = []
        for path in sorted(map(tuple, paths), key=lambda path: (len(path), path)):
            if path in known:
                raise ValueError(f"path {list(path)} is empty or listed twice")
            needed = path[:-1] if path[-1] == 0 else (*path[:-1], path[-1] - 1)
            if path[:-1] not in known or needed not in known:
                raise ValueError(f"path {list(path)} needs {list(path[:-1] if path[:-1] not in known else needed)}")
            known[path] = len(parents)
            parents.append(known[path[:-1]])
        return cls(tuple(parents))

    @classmethod
    def balanced(cls, arity: int, depth: int) -> Topology:
        """Every node above the last depth has `arity` children."""
        paths = [path for length in range(1, depth + 1) for path in itertools.product(range(arity), repeat=length)]
        return cls.from_paths(paths)

    def levels(self) -> list[list[int]]:
        """Node numbers by depth."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return [[n for n, d in enumerate(depths) if d == depth] for depth in range(max(depths, default=-1) + 1)]


class DraftTree:
    """A drafted token tree. Equal prefixes are one node; a node's child list keeps branch order and duplicates.

    Attributes:
        tokens_N: int64; the root's is -1.
        parents_N: int64; the root's is -1; a parent stands before its children.
        depths_N: int64; the root's is 0.
        branch_nodes: for each branch, its node ids from the branching node (included) to its leaf; empty if the tree
            is no trunk with branches.
    """

    def __init__(self, prefixes: _Prefixes, child_lists: list[list[int]], branch_nodes: list[list[int]]) -> None:
        self.tokens_N = torch.tensor(prefixes.tokens)
        self.parents_N = torch.tensor(prefixes.parents)
        self.depths_N = torch.tensor(prefixes.depths)
        self.branch_nodes = branch_nodes
        self._prefixes = prefixes
        self._child_lists = child_lists

    @classmethod
    def from_paths(cls, trunk: Path, branches: Sequence[Path]) -> DraftTree:
        """A delayed tree: every branch starts at the trunk's end.

        Args:
            trunk: token ids.
            branches: token ids, all of one length, which may be 0 (`[[]]`: the trunk alone).

        Raises:
            ValueError: branches of different lengths.
        """
        if len({len(branch) for branch in branches}) > 1:
            raise ValueError(f"branches differ in length: {[len(branch) for branch in branches]}")
        prefixes = _Prefixes()
        trunk_nodes = prefixes.add_path(0, trunk)
        branch_nodes = [prefixes.add_path(trunk_nodes[-1], branch) for branch in branches]
        child_lists: list[list[int]] = [[] for _ in prefixes.tokens]
        for path in [trunk_nodes, *branch_nodes]:
            for parent, child in itertools.pairwise(path):
                child_lists[parent].append(child)
        return cls(prefixes, child_lists, branch_nodes)

    @classmethod
    def from_topology(cls, topology: Topology, tokens: Sequence[int | None]) -> DraftTree:
        """A tree of any shape. Where siblings hold equal tokens, one node carries the children of both.

        Args:
            topology: the drafted tree's shape.
            tokens: the token of each of its nodes, in its order; None where a draft without replacement ran out.

        Raises:
            ValueError: not one token per node.
        """
        if len(tokens) != len(topology.parents):
            raise ValueError(f"the topology has {len(topology.parents)} nodes, there are {len(tokens)} tokens")
        prefixes = _Prefixes()
        node_of: list[int | None] = []
        for parent, token in zip(topology.parents, tokens, strict=True):
            above = 0 if parent < 0 else node_of[parent]
            node_of.append(None if token is None or above is None else prefixes.add(above, int(token)))
        child_lists: list[list[int]] = [[] for _ in prefixes.tokens]
        for node in node_of:
            if node is not None:
                child_lists[prefixes.parents[node]].append(node)
        return cls(prefixes, child_lists, [])

    def along(self, paths: Sequence[Sequence[int]]) -> DraftTree:
        """The same nodes under the same numbers, but only those of the given paths are still somebody's children."""
        child_lists: list[list[int]] = [[] for _ in self._child_lists]
        for path in paths:
            for parent, child in itertools.pairwise(path):
                child_lists[parent] = [child]
        return DraftTree(self._prefixes, child_lists, [])

    def __len__(self) -> int:
        return len(self._child_lists)

    def children(self, node: int) -> list[int]:
        """Node ids, one entry per branch through `node`, in branch order and with duplicates."""
        return self._child_lists[node]

    def distinct_children(self, node: int) -> list[int]:
        """Node ids in order of first appearance."""
        return list(dict.fromkeys(self._child_lists[node]))

    def node_of(self, path: Path) -> int:
        """The node at the end of a token sequence that starts at the root; KeyError where there is none."""
        node = 0
        for token in path:
            node = self._prefixes.child_of[node][int(token)]
        return node

    def path_to(self, node: int) -> list[int]:
        """Node ids from the root (left out) to `node` (included)."""
        path: list[int] = []
        while self._prefixes.parents[node] >= 0:
            path.append(node)
            node = self._prefixes.parents[node]
        return path[::-1]

    def token(self, node: int) -> int:
        return self._prefixes.tokens[node]

    def depth(self, node: int) -> int:
        return self._prefixes.depths[node]

    def postorder(self, visits: Mapping[int, Sequence[int]] | None = None, root: int = 0) -> list[int]:
        """Every node after its children: the order of depth-first leaves.

        Args:
            visits: children in the order of visits, for the nodes where it is not that of first appearance.
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
    def members(self) -> list[tuple[int, DraftTree]]:
        """The trees that stand here, each with the node id of its root: itself, unless this is a `Forest`."""
        return [(0, self)]

    @property
    def roots(self) -> list[int]:
        """The nodes without a parent: one, unless this is a `Forest`."""
        return [node for node, parent in enumerate(self._prefixes.parents) if parent < 0]

    @cached_property
    def is_chain(self) -> bool:
        """Whether every node but the last has one child, the next node, and nothing else is drafted."""
        return all(children == [node + 1] for node, children in enumerate(self._child_lists[:-1]))

    def ancestors_NN(self) -> Tensor:
        """[N, N] bool: column is row itself or one of its ancestors. What a tree pass may attend to."""
        return ancestors(self._prefixes.parents)

    @cached_property
    def paths_ND(self) -> Tensor:
        """For each node the ids of the nodes from the root (left out) to it, filled up with 0; int64 [N, D]."""
        depth = max(self._prefixes.depths)
        padded = [path + [0] * (depth - len(path)) for path in map(self.path_to, range(len(self)))]
        return torch.tensor(padded, dtype=torch.int64).view(len(self), depth)

    def groups(self, nodes: Sequence[int] | None = None) -> list[NodeGroup]:
        """The inner nodes among `nodes` (all nodes if None), by the length of their child lists."""
        members: dict[int, list[int]] = {}
        for node in range(len(self)) if nodes is None else nodes:
            members.setdefault(len(self.children(node)), []).append(node)
        return [
            NodeGroup(
                torch.tensor(group),
                torch.tensor([[self.token(child) for child in self.children(node)] for node in group]),
                torch.tensor([self.children(node) for node in group]),
            )
            for k, group in members.items()
            if k > 0
        ]

    @cached_property
    def levels(self) -> list[list[int]]:
        """Node ids by depth, the root's first."""
        levels: list[list[int]] = [[] for _ in range(max(self._prefixes.depths) + 1)]
        for node, depth in enumerate(self._prefixes.depths):
            levels[depth].append(node)
        return levels


class Forest(DraftTree):
    """Many trees side by side, to be verified at once: node ids of each are shifted by its root's."""

    def __init__(self, trees: Sequence[DraftTree]) -> None:
        offsets = list(itertools.accumulate((len(tree) for tree in trees), initial=0))
        self._members = list(zip(offsets, trees, strict=False))
        prefixes = _Prefixes()
        prefixes.tokens = [token for tree in trees for token in tree._prefixes.tokens]
        prefixes.depths = [depth for tree in trees for depth in tree._prefixes.depths]
        prefixes.parents = [
            parent + offset if parent >= 0 else -1
            for offset, tree in self._members
            for parent in tree._prefixes.parents
        ]
        child_lists = [
            [child + offset for child in tree.children(node)]
            for offset, tree in self._members
            for node in range(len(tree))
        ]
        super().__init__(prefixes, child_lists, [])

    @property
    def members(self) -> list[tuple[int, DraftTree]]:
        return self._members


class NodeGroup(NamedTuple):
    """M inner nodes whose child lists have the same length k; int64 on the CPU."""

    nodes_M: Tensor
    entries_Mk: Tensor  # child tokens, in branch order
    children_Mk: Tensor  # the node of each entry

    def to(self, device: torch.device) -> NodeGroup:
        return NodeGroup(*(tensor.to(device) for tensor in self))


def ancestors(parents: Sequence[int]) -> Tensor:
    """[N, N] bool: column is row itself or an ancestor of it; a parent stands before its children, the root's is -1."""
    seen = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            seen[node] |= seen[parent]
    return seen
