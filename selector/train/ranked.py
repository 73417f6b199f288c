"""Shapes by rank: how far a text goes along one, and which shapes are best on some texts.

A node of such a shape is the draft's token of a certain rank, so the target alone decides how far a
step goes: the extra token is drawn from the target, and as long as it is a child, the step goes on
there. No verifier accepts more of such a tree, and along a text the label of every shape follows
from one array, the ranks of the text's tokens. The best shape of n nodes and a depth d on some
texts holds their n most frequent paths of at most d ranks; which n and d pay, the step times say
(Sequoia, arXiv 2402.12374, section 3, for a measured acceptance of each path instead of one by
rank and depth).

Legend: R roots, D depths, A actions.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from selector.actions import MOST_RANKS, Action, Ranks

SIZES = (4, 8, 12, 16, 24, 32, 48)  # nodes of the shapes that are tried
DEPTHS = (1, 2, 3, 4, 5, 6, 8)


def along_ranks(rank_RD: Tensor, ranks: Ranks) -> Tensor:
    """How many of the next tokens a shape has on their path, int64 [R], from the draft's ranks of
    these tokens, uint8 [R, D]."""
    node_of = {path: node for node, path in enumerate(((), *ranks))}
    outside = len(node_of)
    next_NK = np.full((outside + 1, MOST_RANKS + 1), outside)  # the child of a node by rank
    for path in ranks:
        if path[-1] < MOST_RANKS:
            next_NK[node_of[path[:-1]], path[-1]] = node_of[path]
    depth_N = np.array([0, *map(len, ranks), 0])
    rank_DR = rank_RD.numpy().clip(max=MOST_RANKS).T
    node_R = np.zeros(len(rank_RD), np.int64)
    accepted_R = np.zeros(len(rank_RD), np.int64)
    for rank_R in rank_DR[: len(ranks[-1])]:
        node_R = next_NK[node_R, rank_R]
        accepted_R = np.maximum(accepted_R, depth_N[node_R])
    return torch.from_numpy(accepted_R)


def frequent_paths(rank_RD: Tensor, depth: int) -> list[tuple[int, ...]]:
    """The paths of at most `depth` ranks that some texts take, the most frequent first; among
    equally frequent ones, shorter ones and smaller ranks first, so that every path stands behind
    its prefixes."""
    counts: dict[tuple[int, ...], int] = {}
    for length in range(1, depth + 1):
        prefixes_RD = rank_RD[:, :length].numpy()
        within_R = (prefixes_RD < MOST_RANKS).all(1)
        paths, path_counts = np.unique(prefixes_RD[within_R], axis=0, return_counts=True)
        counts |= dict(zip(map(tuple, paths.tolist()), path_counts.tolist(), strict=True))
    return sorted(counts, key=lambda path: (-counts[path], len(path), path))


def balanced(nodes: int, depth: int) -> Action:
    """A shape by rank for texts that nobody has seen: its nodes have the least products of
    `rank + 1` along their path, shorter paths first."""
    product_of: dict[tuple[int, ...], int] = {(): 1}
    for _ in range(depth):
        for path, product_before in list(product_of.items()):
            for rank in range(nodes // product_before):
                product_of[*path, rank] = product_before * (rank + 1)
    del product_of[()]
    ordered = sorted(product_of, key=lambda path: (product_of[path], len(path), path))
    return Action.ranked(ordered[:nodes])


def candidates(
    rank_RD: Tensor, sizes: Iterable[int] = SIZES, depths: Iterable[int] = DEPTHS
) -> list[Action]:
    """For each of some numbers of nodes and depths, the shape that is best on some texts."""
    shapes: dict[Action, None] = {}
    for depth in depths:
        paths = frequent_paths(rank_RD, min(depth, rank_RD.shape[1]))
        for size in sizes:
            if paths:
                shapes[Action.ranked(paths[:size])] = None
    return list(shapes)


def united(shape: Action, lengths: Iterable[int]) -> list[Action]:
    """A shape with a lookup of each of some lengths in the same tree."""
    return [Action.ranked(shape.ranks, length) for length in lengths]
