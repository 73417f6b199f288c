"""Small random worlds on which everything can be enumerated.

A world gives the target and the draft a conditional distribution after every context of up to `depth` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

import torch
from torch import Tensor

from data_gen.trees import DraftTree
from selector.actions import IID, WITHOUT_REPLACEMENT

KINDS = ("random", "zeros", "equal", "one_hot", "peaked")
TOP_K = "top_k"  # the k most likely tokens: a style of other projects' drafts


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
        contexts = [tuple(tree.token(n) for n in tree.path_to(node)) for node in range(len(tree))]
        return torch.stack([self.target[c] for c in contexts]), torch.stack([self.draft[c] for c in contexts])

    def target_probability(self, sequence: tuple[int, ...], start: int = 0) -> float:
        return prod((float(self.target[sequence[:i]][sequence[i]]) for i in range(start, len(sequence))), start=1.0)

    def draft_probability(self, path: tuple[int, ...], start: int = 0) -> float:
        return prod((float(self.draft[path[:i]][path[i]]) for i in range(start, len(path))), start=1.0)

    def drafts(self, K: int, L1: int, L2: int, style: str = IID) -> Iterator[tuple[float, list[int], list[list[int]]]]:
        """Every delayed draft that can happen, with its probability: (probability, trunk, branches)."""
        for trunk in product(range(self.vocabulary), repeat=L1):
            if not (trunk_probability := self.draft_probability(trunk)):
                continue
            for probability, branches in self.branches(trunk, K, L2, style):
                yield trunk_probability * probability, list(trunk), branches

    def branches(self, trunk: tuple[int, ...], K: int, L2: int, style: str) -> Iterator[tuple[float, list[list[int]]]]:
        if L2 == 0:
            yield 1.0, [[]] * K
            return
        for probability, first in self.children(trunk, K, style):
            rests = [self._continuations((*trunk, token), L2 - 1) for token in first]
            for choice in product(*rests):
                paths = [[token, *rest] for token, (_, rest) in zip(first, choice, strict=True)]
                yield probability * prod(p for p, _ in choice), paths

    def _continuations(self, context: tuple[int, ...], length: int) -> list[tuple[float, list[int]]]:
        paths = product(range(self.vocabulary), repeat=length)
        drafts = [(self.draft_probability(context + path, start=len(context)), list(path)) for path in paths]
        return [draft for draft in drafts if draft[0] > 0]

    def children(self, context: tuple[int, ...], k: int, style: str) -> Iterator[tuple[float, list[int]]]:
        """Every list of k children that a style (or `TOP_K`) can draw after a context, with its probability."""
        q = self.draft[context].tolist()
        if style == IID:
            for tokens in product(range(self.vocabulary), repeat=k):
                if probability := prod(q[token] for token in tokens):
                    yield probability, list(tokens)
        elif style == WITHOUT_REPLACEMENT:
            yield from self._sequential(q, k, [], 1.0)
        else:
            likely = self.draft[context].argsort(descending=True, stable=True).tolist()
            rest = [token for token in likely[k - 1 :] if q[token] > 0 and style != TOP_K]
            mass = sum(q[token] for token in rest)
            yield from [(q[token] / mass, [*likely[: k - 1], token]) for token in rest] or [(1.0, likely[:k])]

    def _sequential(
        self, q: list[float], k: int, drawn: list[int], probability: float
    ) -> Iterator[tuple[float, list[int]]]:
        left = [token for token in range(self.vocabulary) if token not in drawn and q[token] > 0]
        if len(drawn) == k or not left:
            yield probability, drawn
            return
        mass = sum(q[token] for token in left)
        for token in left:
            yield from self._sequential(q, k, [*drawn, token], probability * q[token] / mass)
