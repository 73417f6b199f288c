"""How an engine lays out a tree: the parent of each node, and where its token comes from.

Node 0 is the root, and a parent stands before its children. Nodes of one parent with the same token
are one node.
"""

from __future__ import annotations

from selector.actions import GREEDY, Action

# where a node's token comes from, if it is not the draft's choice of a rank after the parent
SAMPLED = "sampled"  # from the draft after the parent
OTHER = "other"  # sampled from the draft outside of the siblings before it
COPIED = "copied"  # from the text
Node = tuple[int, int | str]  # the parent, and a rank or one of these


def layout_of(action: Action) -> list[Node]:
    """The drafted nodes 1, 2, .. of an action."""
    if action.ranks:
        return _ranked(action)
    if action.children:
        return _branching(action)
    return _delayed(action)


def _ranked(action: Action) -> list[Node]:
    number_of: dict[tuple[int, ...], int] = {(): 0}
    nodes: list[Node] = []
    for path in action.ranks:
        nodes.append((number_of[path[:-1]], path[-1]))
        number_of[path] = len(nodes)
    parent = 0
    for _ in range(action.copied):
        nodes.append((parent, COPIED))
        parent = len(nodes)
    return nodes


def _branching(action: Action) -> list[Node]:
    nodes: list[Node] = []
    level = [0]
    for count in action.children:
        parents = level
        level = []
        for parent in parents:
            for _ in range(count):
                nodes.append((parent, SAMPLED))
                level.append(len(nodes))
    return nodes


def _delayed(action: Action) -> list[Node]:
    source = COPIED if action.copies else SAMPLED
    nodes: list[Node] = [(depth, source) for depth in range(action.L1)]
    if action.L2 == 0:
        return nodes
    for branch in range(action.K):
        first: int | str = SAMPLED
        if action.style == GREEDY:
            first = branch if branch < action.K - 1 else OTHER
        elif action.distinct and branch > 0:
            first = OTHER
        nodes.append((action.L1, first))
        for _ in range(action.L2 - 1):
            nodes.append((len(nodes), SAMPLED))
    return nodes
