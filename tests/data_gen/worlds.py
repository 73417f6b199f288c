"""Small random worlds on which everything can be enumerated.

A world gives the target and the draft a conditional distribution after every context of up to `depth` tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, product

import torch
from torch import Tensor

from data_gen.trees import DraftTree, NodeGroup
from data_gen.verification import Verifier

TOGETHER = 4096  # trees whose laws are computed at once
KINDS = ("random", "zeros", "equal", "one_hot", "peaked")


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
            self._child_lists += [[child + root for child in tree.children(node)] for node in range(len(tree))]
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
    """What may be drafted, to be verified together: trees, their probabilities, and each node's tree and context."""

    forest: Forest
    probability_T: Tensor
    tree_N: Tensor
    number_N: Tensor


class World:
    """Distributions by context; contexts are tuples of tokens from the root."""

    def __init__(self, vocabulary: int, depth: int, kind: str, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocabulary = vocabulary
        self.target: dict[tuple[int, ...], Tensor] = {}
        self.draft: dict[tuple[int, ...], Tensor] = {}
        for length in range(depth + 1):
            for context in product(range(vocabulary), repeat=length):
                self.target[context], self.draft[context] = self._pair(kind, generator)
        self._delayed: dict[tuple[int, int, int, str], list[Drafts]] = {}
        self.number = {context: number for number, context in enumerate(self.target)}
        self.target_CV, self.draft_CV = (torch.stack(list(rows.values())) for rows in (self.target, self.draft))

    def _pair(self, kind: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        p, q = torch.rand(2, self.vocabulary, generator=generator, dtype=torch.float64) + 1e-3
        if kind == "zeros":  # supports that differ, and may be disjoint
            p, q = (row * (torch.rand(self.vocabulary, generator=generator) < 0.6) for row in (p, q))
            p[torch.randint(self.vocabulary, (), generator=generator)] += 0.1
            q[torch.randint(self.vocabulary, (), generator=generator)] += 0.1
        elif kind == "equal":
            q = p.clone()
        elif kind == "one_hot":
            p = torch.zeros_like(p)
            p[torch.randint(self.vocabulary, (), generator=generator)] = 1.0
        elif kind == "peaked":  # drafts are mostly duplicates
            q = q**8
        return p / p.sum(), q / q.sum()

    def rows(self, tree: DraftTree) -> tuple[Tensor, Tensor]:
        """Target and draft distributions of a tree's nodes, [N, V] each."""
        contexts = [tuple(tree.token(n) for n in tree.path_to(node)) for node in range(len(tree))]
        return torch.stack([self.target[c] for c in contexts]), torch.stack([self.draft[c] for c in contexts])

    def target_probability(self, sequence: tuple[int, ...], start: int = 0) -> float:
        """P(sequence[start:] | sequence[:start]) under the target."""
        probability = 1.0
        for i in range(start, len(sequence)):
            probability *= float(self.target[sequence[:i]][sequence[i]])
        return probability

    def draft_probability(self, path: tuple[int, ...], start: int = 0) -> float:
        probability = 1.0
        for i in range(start, len(path)):
            probability *= float(self.draft[path[:i]][path[i]])
        return probability

    def drafts(
        self, K: int, L1: int, L2: int, style: str = "iid"
    ) -> Iterator[tuple[float, list[int], list[list[int]]]]:
        """Every delayed draft that can happen, with its probability: (probability, trunk, branches)."""
        for trunk in product(range(self.vocabulary), repeat=L1):
            if not (trunk_probability := self.draft_probability(trunk)):
                continue
            for probability, branches in self.branches(trunk, K, L2, style):
                yield trunk_probability * probability, list(trunk), branches

    def branches(self, trunk: tuple[int, ...], K: int, L2: int, style: str) -> Iterator[tuple[float, list[list[int]]]]:
        """All branches that can be drafted after a trunk, with their probability."""
        if L2 == 0:
            yield 1.0, [[]] * K
            return
        for probability, first in self.children(trunk, K, style):
            rests = [self._continuations((*trunk, token), L2 - 1) for token in first]
            for choice in product(*rests):
                continued = self._product([p for p, _ in choice], range(len(choice)))
                yield probability * continued, [[t, *rest] for t, (_, rest) in zip(first, choice, strict=True)]

    def _continuations(self, context: tuple[int, ...], length: int) -> list[tuple[float, list[int]]]:
        paths = product(range(self.vocabulary), repeat=length)
        drafts = [(self.draft_probability(context + path, start=len(context)), list(path)) for path in paths]
        return [draft for draft in drafts if draft[0] > 0]

    def children(self, context: tuple[int, ...], k: int, style: str) -> Iterator[tuple[float, list[int]]]:
        """Every list of k children that a style can draw after a context, with its probability."""
        q = self.draft[context].tolist()
        if style == "iid":
            for tokens in product(range(self.vocabulary), repeat=k):
                if probability := self._product(q, tokens):
                    yield probability, list(tokens)
        elif style == "without_replacement":
            yield from self._sequential(q, k, [], 1.0)
        else:
            top = [int(t) for t in self.draft[context].topk(min(k - 1, self.vocabulary)).indices if q[int(t)] > 0]
            rest = [token for token in range(self.vocabulary) if token not in top and q[token] > 0]
            mass = sum(q[token] for token in rest)
            yield from [(q[token] / mass, [*top, token]) for token in rest] or [(1.0, top)]

    def _sequential(self, q: list[float], k: int, drawn: list[int], probability: float) -> Iterator:
        left = [token for token in range(self.vocabulary) if token not in drawn and q[token] > 0]
        if len(drawn) == k or not left:
            yield probability, drawn
            return
        mass = sum(q[token] for token in left)
        for token in left:
            yield from self._sequential(q, k, [*drawn, token], probability * q[token] / mass)

    @staticmethod
    def _product(q: Sequence[float], tokens: Sequence[int]) -> float:
        probability = 1.0
        for token in tokens:
            probability *= q[token]
        return probability

    def delayed_trees(self, K: int, L1: int, L2: int, style: str = "iid") -> list[Drafts]:
        key = K, L1, L2, style
        if key not in self._delayed:
            drafts = self.drafts(K, L1, L2, style)
            trees = ((probability, DraftTree.from_paths(trunk, branches)) for probability, trunk, branches in drafts)
            self._delayed[key] = self.together(trees)
        return self._delayed[key]

    def together(self, trees: Iterable[tuple[float, DraftTree]]) -> list[Drafts]:
        """Trees and their probabilities, in parts of a size that memory bears."""
        left, parts = iter(trees), []
        while part := list(islice(left, TOGETHER)):
            forest = Forest([tree for _, tree in part])
            sizes = torch.tensor([len(tree) for _, tree in part])
            parts.append(
                Drafts(
                    forest,
                    torch.tensor([probability for probability, _ in part], dtype=torch.float64),
                    torch.arange(len(part)).repeat_interleave(sizes),
                    torch.tensor([number for _, tree in part for number in self.numbers(tree)]),
                )
            )
        return parts

    def numbers(self, tree: DraftTree) -> list[int]:
        """The number of every node's context."""
        return [self.number[tuple(tree.token(n) for n in tree.path_to(node))] for node in range(len(tree))]

    def appended_law(self, verifier: Verifier, drafts: list[Drafts]) -> Tensor:
        """P(accepted context, extra token) over drafting and verification, [contexts, V]."""
        law_CV = torch.zeros_like(self.target_CV)
        for part in drafts:
            law_NV = verifier.law(part.forest, self.target_CV[part.number_N], self.draft_CV[part.number_N])
            assert torch.isfinite(law_NV).all()
            totals_T = torch.zeros_like(part.probability_T).index_add_(0, part.tree_N, law_NV.sum(-1))
            assert (totals_T - 1).abs().max() < 1e-12
            law_CV.index_add_(0, part.number_N, part.probability_T[part.tree_N].unsqueeze(-1) * law_NV)
        return law_CV

    def losslessness_error(self, law_CV: Tensor, depth: int) -> float:
        """Largest deviation of the appended text, continued by the target to `depth + 1` tokens, from the target."""
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
        return float(sum((len(context) + 1) * law_CV[number].sum() for context, number in self.number.items()))
