"""The worlds of `data_gen.verification.checking`, with all trees of a shape verified at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, product
from math import prod

import torch
from torch import Tensor

from data_gen.trees import DraftTree, NodeGroup
from data_gen.verification import STYLED, VERIFIERS, Verifier, checking
from data_gen.verification.checking import KINDS

Path = tuple[int, ...]
TOGETHER = 4096  # trees whose laws are computed at once
# every verifier with every style for which it is lossless
SERVED = [(name, style) for name, cls in (VERIFIERS | STYLED).items() for style in cls.styles]
__all__ = ["KINDS", "World", "normalised"]


class Forest(DraftTree):
    """Many trees side by side, verified at once: each one's node ids are shifted by its root's.

    It keeps its groups, for many verifiers ask for the same ones.
    """

    def __init__(self, trees: Sequence[DraftTree]) -> None:
        super().__init__()
        self.roots = list(accumulate((len(tree) for tree in trees[:-1]), initial=0))
        self._tokens = [token for tree in trees for token in tree._tokens]
        self._depths = [depth for tree in trees for depth in tree._depths]
        self._parents, self._child_lists = [], []
        for root, tree in zip(self.roots, trees, strict=True):
            self._parents += [parent + root if parent >= 0 else -1 for parent in tree._parents]
            self._child_lists += [
                [child + root for child in tree.children(node)] for node in range(len(tree))
            ]
            self.branch_nodes += [[node + root for node in nodes] for nodes in tree.branch_nodes]
        self._groups: dict[tuple[int, ...] | None, list[NodeGroup]] = {}

    def groups(self, nodes: Sequence[int] | None = None) -> list[NodeGroup]:
        key = None if nodes is None else tuple(nodes)
        if key not in self._groups:
            self._groups[key] = super().groups(nodes)
        return self._groups[key]


def normalised(probs_V: Tensor) -> Tensor:
    """Rows [..., V] in float64, divided by their sum."""
    probs_V = probs_V.double()
    return probs_V / probs_V.sum(-1, keepdim=True)


@dataclass(frozen=True)
class Drafts:
    """What may be drafted, to be verified together: trees, their probabilities, and each node's
    tree and context."""

    forest: Forest
    probability_T: Tensor
    tree_N: Tensor
    number_N: Tensor


class World(checking.World):
    """A world whose trees are verified many at once."""

    def __init__(self, vocabulary: int, depth: int, kind: str, seed: int) -> None:
        super().__init__(vocabulary, depth, kind, seed)
        self._trees: dict[object, list[Drafts]] = {}
        self.number = {context: number for number, context in enumerate(self.target)}
        self.target_CV, self.draft_CV = (
            torch.stack(list(rows.values())) for rows in (self.target, self.draft)
        )

    def delayed_trees(self, K: int, L1: int, L2: int, style: str = "iid") -> list[Drafts]:
        """All trees of a shape, in parts of a size that memory bears."""
        return self._together(
            (K, L1, L2, style),
            (
                (probability, DraftTree.from_paths(trunk, branches))
                for probability, trunk, branches in self.drafts(K, L1, L2, style)
            ),
        )

    def branching_trees(self, children: tuple[int, ...]) -> list[Drafts]:
        """All trees with so many children of every drafted token, depth by depth."""
        return self._together(children, self._grown(children))

    def _grown(self, children: tuple[int, ...]) -> Iterator[tuple[float, DraftTree]]:
        """Node by node: by the path of each node, how many drafted tokens it stands for."""

        def grow(
            probability: float, lists: dict[tuple[int, ...], list[int]], level: dict[Path, int]
        ) -> Iterator[tuple[float, dict[Path, list[int]]]]:
            depth = len(next(iter(level)))
            if depth == len(children):
                yield probability, lists
                return
            drawn = [
                list(self.children(path, tokens * children[depth], "iid"))
                for path, tokens in level.items()
            ]
            for choice in product(*drawn):
                added = {path: tokens for path, (_, tokens) in zip(level, choice, strict=True)}
                below = Counter(
                    (*path, token) for path, tokens in added.items() for token in tokens
                )
                share = prod(p for p, _ in choice)
                yield from grow(probability * share, {**lists, **added}, dict(below))

        for probability, lists in grow(1.0, {}, {(): 1}):
            tree = DraftTree()
            for path, tokens in lists.items():
                tree.append(tree.node_of(path), tokens)
            yield probability, tree

    def _together(self, key: object, drafts: Iterator[tuple[float, DraftTree]]) -> list[Drafts]:
        if key not in self._trees:
            parts = []
            while part := list(islice(drafts, TOGETHER)):
                trees = [tree for _, tree in part]
                contexts = (
                    tuple(map(tree.token, tree.path_to(node)))
                    for tree in trees
                    for node in range(len(tree))
                )
                parts.append(
                    Drafts(
                        Forest(trees),
                        torch.tensor(
                            [probability for probability, *_ in part], dtype=torch.float64
                        ),
                        torch.arange(len(part)).repeat_interleave(
                            torch.tensor([len(tree) for tree in trees])
                        ),
                        torch.tensor([self.number[context] for context in contexts]),
                    )
                )
            self._trees[key] = parts
        return self._trees[key]

    def appended_law(self, verifier: Verifier, drafts: list[Drafts]) -> Tensor:
        """P(accepted context, extra token) over drafting and verification, [contexts, V]."""
        law_CV = torch.zeros_like(self.target_CV)
        for part in drafts:
            law_NV = verifier.law(
                part.forest, self.target_CV[part.number_N], self.draft_CV[part.number_N]
            )
            assert torch.isfinite(law_NV).all()
            totals_T = torch.zeros_like(part.probability_T).index_add_(
                0, part.tree_N, law_NV.sum(-1)
            )
            assert (totals_T - 1).abs().max() < 1e-12
            law_CV.index_add_(
                0, part.number_N, part.probability_T[part.tree_N].unsqueeze(-1) * law_NV
            )
        return law_CV

    def losslessness_error(self, law_CV: Tensor, depth: int) -> float:
        """Largest deviation of the appended text, continued by the target to `depth + 1` tokens,
        from the target."""
        worst = 0.0
        for sequence in product(range(self.vocabulary), repeat=depth + 1):
            total = sum(
                float(law_CV[self.number[sequence[: n - 1]], sequence[n - 1]])
                * self.target_probability(sequence, start=n)
                for n in range(1, len(sequence) + 1)
            )
            worst = max(worst, abs(total - self.target_probability(sequence)))
        return worst

    def block_efficiency(self, law_CV: Tensor) -> float:
        return float(
            sum(
                (len(context) + 1) * law_CV[number].sum() for context, number in self.number.items()
            )
        )
