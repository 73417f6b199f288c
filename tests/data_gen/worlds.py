"""Small random worlds on which everything can be enumerated.

A world gives the target and the draft a conditional distribution after every context of up to `depth` tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from data_gen.trees import DraftTree

KINDS = ("random", "zeros", "equal", "one_hot", "peaked")


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

    def drafts(self, K: int, L1: int, L2: int) -> Iterator[tuple[float, list[int], list[list[int]]]]:
        """Every delayed draft that can happen, with its probability: (probability, trunk, branches)."""
        for trunk in product(range(self.vocabulary), repeat=L1):
            trunk_probability = self.draft_probability(trunk)
            paths = [
                (list(path), self.draft_probability(trunk + path, start=L1))
                for path in product(range(self.vocabulary), repeat=L2)
            ]
            paths = [(path, probability) for path, probability in paths if probability > 0]
            if trunk_probability == 0:
                continue
            for choice in product(paths, repeat=K):
                probability = trunk_probability
                for _, branch_probability in choice:
                    probability *= branch_probability
                yield probability, list(trunk), [path for path, _ in choice]
