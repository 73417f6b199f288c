"""Verifiers that look at one path of the tree: `naive`, `block`, and `greedy_block`, which chooses the path.

Block Verification (Sun et al. 2024) on a path of L tokens, from the last one up:

    w_0 = 1,  w_i = min(1, w_{i-1} p(x_i) / q(x_i))
    accept all L with probability w_L;  else at i = L-1, .., 0:  R = (w_i p - q)+,  S = sum R
        accept i tokens with probability S / (S + 1 - w_i), the extra token drawn from R / S

Legend: N tree nodes, V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar

import torch
from torch import Tensor

from data_gen.trees import DraftTree
from data_gen.verification.base import IID, WITHOUT_REPLACEMENT, BottomUp, TopDown, Verifier, VerifierLaw
from data_gen.verification.naive_tree import NaiveTree
from data_gen.verification.profile import NodeDistributions, Rows, powers
from data_gen.verification.traversal import Traversal

MOST_AFTER = 1e200  # beyond, the paths that come after outweigh the prefix by so much that `q~` is `q`


class OnePath(Verifier):
    """A chain's verifier on one path; the rest of the tree is never accepted."""

    chain: ClassVar[TopDown | BottomUp]

    @abstractmethod
    def path(self, tree: DraftTree, root: int, rows: Rows) -> tuple[list[int], dict[int, Tensor]]:
        """The nodes of the path, from the root (0) on; and the laws of their tokens, by node, where they are not `q`.

        Args:
            root: the row of the tree's root.
        """

    def _verifier_law(self, tree: DraftTree, rows: Rows) -> VerifierLaw:
        paths: list[list[int]] = []
        laws: dict[int, Tensor] = {}
        for root, member in tree.members:
            nodes, replaced = self.path(member, root, rows)
            paths.append([root + node for node in nodes])
            laws |= {root + node: law_V for node, law_V in replaced.items()}
        if laws:
            q_NV = rows.q_NV.clone()
            q_NV[list(laws)] = torch.stack(list(laws.values())).to(q_NV.dtype)
            rows = Rows(rows.p_NV, q_NV)
        return self.chain._verifier_law(tree.along(paths), rows)


class FirstPath(OnePath):
    """The first branch, whose tokens are the draft's own draws in either style."""

    styles = (IID, WITHOUT_REPLACEMENT)

    def path(self, tree: DraftTree, root: int, rows: Rows) -> tuple[list[int], dict[int, Tensor]]:
        nodes = [0]
        while children := tree.children(nodes[-1]):
            nodes.append(children[0])
        return nodes, {}


class Naive(FirstPath):
    """Speculative sampling (Leviathan et al. 2023, Chen et al. 2023)."""

    name = "naive"
    chain = NaiveTree()


class Block(FirstPath):
    """Block Verification (Sun et al. 2024, arXiv 2403.10444)."""

    name = "block"
    chain = Traversal()


class GreedyBlock(OnePath):
    """GBV (Thomas & Pal 2026, arXiv 2602.16961): Block Verification on the first of the K paths in rank order.

    Tokens rank by descending `p/q` at every node. With `N` the draft mass of the paths that do not come before a
    prefix, and `S` of those strictly after it, the chosen path's tokens follow
    `q~(x | c) = (N(cx)^K - S(cx)^K) / (N(c)^K - S(c)^K)`.
    """

    name = "greedy_block"
    chain = Traversal()

    def path(self, tree: DraftTree, root: int, rows: Rows) -> tuple[list[int], dict[int, Tensor]]:
        """Raises ValueError for a tree that is not a trunk with branches."""
        if not tree.branch_nodes:
            raise ValueError("greedy_block needs a delayed tree: K paths from the end of a trunk")
        K = len(tree.branch_nodes)
        node = tree.branch_nodes[0][0]
        nodes = [0, *tree.path_to(node)]
        laws: dict[int, Tensor] = {}
        after = 0.0  # S of the prefix, in units of the prefix's own mass N - S
        while tree.children(node):
            profile = rows.profile(torch.tensor([root + node], device=rows.device))
            q_V, beyond_V = _tails(profile)
            N_V, S_V = after + beyond_V + q_V, after + beyond_V
            laws[node] = q_V * powers(N_V / (after + 1), S_V / (after + 1), K)  # N^K - S^K, up to a factor
            places_V = profile.ranked.places_MV[0]
            node = min(tree.distinct_children(node), key=lambda child: int(places_V[tree.token(child)]))
            after = min(float(S_V[tree.token(node)] / q_V[tree.token(node)]), MOST_AFTER)
            nodes.append(node)
        return nodes, laws


def _tails(profile: NodeDistributions) -> tuple[Tensor, Tensor]:
    """q, and the mass of the tokens that rank after each; float64 [V]."""
    ranked = profile.ranked
    tail_V = ranked.q_MV[0].flip(0).cumsum(0).flip(0) - ranked.q_MV[0]
    return profile.exact()[1][0], tail_V.clamp(min=0)[ranked.places_MV[0]]
