"""Verifiers of one path of the tree: `naive`, `block`, and `greedy_block`, which chooses the path.

Block Verification (Sun et al. 2024, arXiv 2403.10444) on a path of L tokens, from the last one up:

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
from data_gen.verification.base import BottomUp, End, TopDown, Verifier, VerifierLaw, Walk
from data_gen.verification.distributions import Rows
from data_gen.verification.ranking import in_rank_order
from data_gen.verification.traversal import NaiveTree, Traversal
from selector.actions import IID, WITHOUT_REPLACEMENT

MOST_AFTER = 1e200  # beyond this, `q~` is `q`: the paths that come after the prefix outweigh it


class OnePath(Verifier):
    chain: ClassVar[TopDown | BottomUp]

    @abstractmethod
    def path(self, tree: DraftTree, root: int, rows: Rows) -> tuple[list[int], dict[int, Tensor]]:
        """The path's nodes, the root first; and by node the next token's law, float64 [V], where
        that is not `q`."""

    def _verifier_law(self, tree: DraftTree, rows: Rows) -> VerifierLaw:
        return self.chain._verifier_law(*self._along_path(tree, rows))

    def _end(self, walk: Walk) -> End:
        tree, rows = self._along_path(walk.tree, Rows(walk.p_NV, walk.q_NV))
        return self.chain._end(walk._replace(tree=tree, p_NV=rows.p_NV, q_NV=rows.q_NV))

    def _along_path(self, tree: DraftTree, rows: Rows) -> tuple[DraftTree, Rows]:
        paths: list[list[int]] = []
        replaced: dict[int, Tensor] = {}
        for root in tree.roots:
            path, laws = self.path(tree, root, rows)
            paths.append(path)
            replaced |= laws
        if replaced:
            q_NV = rows.q_NV.clone()
            q_NV[list(replaced)] = torch.stack(list(replaced.values())).to(q_NV.dtype)
            rows = Rows(rows.p_NV, q_NV)
        return tree.along(paths), rows


class FirstPath(OnePath):
    """Of the first branch, whose tokens are draws from `q` in either style."""

    styles = (IID, WITHOUT_REPLACEMENT)

    def path(self, tree: DraftTree, root: int, rows: Rows) -> tuple[list[int], dict[int, Tensor]]:
        nodes = [root]
        while children := tree.children(nodes[-1]):
            nodes.append(children[0])
        return nodes, {}


class Naive(FirstPath):
    """Speculative sampling (Leviathan et al. 2023, Chen et al. 2023)."""

    name = "naive"
    chain = NaiveTree()


class Block(FirstPath):
    name = "block"
    chain = Traversal()


class GreedyBlock(OnePath):
    """GBV (Thomas & Pal 2026, arXiv 2602.16961): Block Verification on the first of the K paths in
    rank order.

    Tokens rank by descending `p/q` at every node. With `N` the draft mass of the paths that do not
    come before a prefix, and `S` of those strictly after it, the tokens of the chosen path follow
    `q~(x | c) = (N(cx)^K - S(cx)^K) / (N(c)^K - S(c)^K)`.
    """

    name = "greedy_block"
    chain = Traversal()

    def path(self, tree: DraftTree, root: int, rows: Rows) -> tuple[list[int], dict[int, Tensor]]:
        nodes = [root]
        while len(tree.children(nodes[-1])) == 1:
            nodes.append(tree.children(nodes[-1])[0])
        K = len(tree.children(nodes[-1]))
        laws: dict[int, Tensor] = {}
        after = 0.0  # S of the prefix, in units of the prefix's own mass N - S
        while children := tree.children(nodes[-1]):
            node = rows.at(torch.tensor(nodes[-1:], device=rows.device))
            sorted_rows = in_rank_order(node).rows
            tokens_S = sorted_rows.tokens_PS[0]
            (q_V,) = node.exact()[1]
            later_V = torch.zeros_like(q_V)
            later_V[tokens_S] = sorted_rows.q_sum_PS[0, -1] - sorted_rows.q_sum_PS[0, 1:]
            places_V = torch.zeros_like(q_V)
            places_V[tokens_S] = torch.arange(len(tokens_S)).to(q_V)
            S_V = after + later_V.clamp(min=0)
            N_V = S_V + q_V
            # N^K - S^K up to a factor, without the cancellation that would lose tokens of tiny
            # probability
            more_V = N_V / (after + 1)
            less_V = S_V / (after + 1)
            terms = [more_V ** (K - 1 - j) * less_V**j for j in range(K)]
            laws[nodes[-1]] = q_V * torch.stack(terms).sum(0)
            nodes.append(min(children, key=lambda child: int(places_V[tree.token(child)])))
            token = tree.token(nodes[-1])
            after = min(float(S_V[token] / q_V[token]), MOST_AFTER)
        return nodes, laws
