"""Verifiers that look at one path of the tree: `naive`, `block`, and `greedy_block`, which chooses the path.

Legend: N tree nodes, P nodes of the path (the root included), V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from data_gen.trees import DraftTree, Forest
from data_gen.verification.base import IID, WITHOUT_REPLACEMENT, Plan, Verifier
from data_gen.verification.naive_tree import NaiveTree
from data_gen.verification.profile import Profile, Rows
from data_gen.verification.traversal import Traversal


class OnePath(Verifier):
    """A chain's verifier on one path; the rest of the tree is never accepted."""

    chain: ClassVar[Verifier]

    @abstractmethod
    def path(self, tree: DraftTree, root: int, rows: Rows) -> tuple[list[int], Tensor]:
        """The nodes of the path (the root, which stands at row `root`, is 0), and the law of each one's successor.

        The laws are [P, V]; the last is never read.
        """

    def _plan(self, tree: DraftTree, rows: Rows) -> Plan:
        nodes: list[int] = []
        laws: list[Tensor] = []
        chains: list[DraftTree] = []
        for root, member in tree.members:
            path, law_PV = self.path(member, root, rows)
            chains.append(DraftTree.from_paths([member.token(node) for node in path[1:]], [[]]))
            nodes += [root + node for node in path]
            laws.append(law_PV)
        plan = self.chain._plan(Forest(chains), Rows(rows.p_NV[nodes], torch.cat(laws)))
        stops_N = torch.zeros(len(tree), dtype=torch.float64, device=rows.device)
        stops_N[nodes] = plan.stops_N
        place = {node: index for index, node in enumerate(nodes)}

        def extra(asked: Sequence[int]) -> Tensor:
            on_path = [i for i, node in enumerate(asked) if node in place]
            extra_MV = rows.p_NV[list(asked)]  # off the path the verifier never ends: any law will do
            extra_MV[on_path] = plan.extra([place[asked[i]] for i in on_path]).to(extra_MV.dtype)
            return extra_MV

        return Plan(stops_N, extra)


class FirstPath(OnePath):
    """The first branch, whose tokens are the draft's own draws in either style."""

    styles = (IID, WITHOUT_REPLACEMENT)

    def path(self, tree: DraftTree, root: int, rows: Rows) -> tuple[list[int], Tensor]:
        nodes = [0]
        while children := tree.children(nodes[-1]):
            nodes.append(children[0])
        return nodes, rows.q_NV[[root + node for node in nodes]]


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

    def path(self, tree: DraftTree, root: int, rows: Rows) -> tuple[list[int], Tensor]:
        """Raises ValueError for a tree that is not a trunk with branches."""
        if not tree.branch_nodes:
            raise ValueError("greedy_block needs a delayed tree: K paths from the end of a trunk")
        K = len(tree.branch_nodes)
        node = tree.branch_nodes[0][0]
        nodes = [0, *tree.path_to(node)]
        laws_PV = list(rows.q_NV[[root + n for n in nodes[:-1]]])
        not_before, after = 1.0, 0.0  # N and S of the prefix
        while tree.children(node):
            profile = rows.profile(torch.tensor([root + node], device=rows.device))
            q_V, beyond_V = _tails(profile)
            S_V = after + (not_before - after) * beyond_V
            N_V = S_V + (not_before - after) * q_V
            laws_PV.append((N_V**K - S_V**K).clamp(min=0).to(rows.q_NV.dtype))
            places_V = profile.ranked.places_MV[0]
            node = min(tree.distinct_children(node), key=lambda child: int(places_V[tree.token(child)]))
            not_before, after = float(N_V[tree.token(node)]), float(S_V[tree.token(node)])
            nodes.append(node)
        return nodes, torch.stack([*laws_PV, torch.zeros_like(rows.q_NV[0])])


def _tails(profile: Profile) -> tuple[Tensor, Tensor]:
    """q, and the mass of the tokens that rank after each; float64 [V]."""
    ranked = profile.ranked
    tail_V = ranked.q_MV[0].flip(0).cumsum(0).flip(0) - ranked.q_MV[0]
    return profile.exact()[1][0], tail_V.clamp(min=0)[ranked.places_MV[0]]
