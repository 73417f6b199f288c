"""Labels from a supertree against every action's own tree."""

from __future__ import annotations

import gc
import weakref
from itertools import product

import pytest
import torch

from data_gen.expected import expected_labels
from data_gen.labels import label_supertree, survivals
from data_gen.slots import Batch
from data_gen.trees import Forest, Supertree
from data_gen.verification import VERIFIERS, get_verifier
from selector.actions import ActionSpace
from tests.data_gen.worlds import World


def random_supertree(vocabulary: int, seed: int) -> tuple[Supertree, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def draw(n: int) -> list[int]:
        return torch.randint(vocabulary, (n,), generator=generator).tolist()

    tree = Supertree.from_paths(draw(16), {L1: [draw(8) for _ in range(3)] for L1 in range(9)})
    p, q = torch.rand(2, len(tree), 8, generator=generator, dtype=torch.float64) ** 3
    return tree, p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)


def survival_of_every_action(name: str, supertree: Supertree, p_NV: torch.Tensor, q_NV: torch.Tensor) -> torch.Tensor:
    """P(tau >= t) by the verifier's own walk over every action's tree, [A, T]."""
    trees, rows = zip(*(supertree.subtree(action) for action in ActionSpace.default()), strict=True)
    forest, rows_N = Forest(trees), torch.cat(rows)
    stops_N = get_verifier(name).stops(forest, p_NV[rows_N], q_NV[rows_N])
    own_N = torch.arange(len(trees)).repeat_interleave(torch.tensor(list(map(len, trees))))
    stops_AT = torch.zeros(len(trees), 17, dtype=torch.float64).index_put_((own_N, forest.depths_N), stops_N, True)
    return stops_AT.flip(-1).cumsum(-1).flip(-1)


@pytest.mark.parametrize("vocabulary", [2, 8])  # two tokens: most branches share prefixes
def test_labels_equal_the_exact_block_efficiency_of_every_subtree(vocabulary: int) -> None:
    samples = [random_supertree(vocabulary, seed) for seed in (1, 2)]
    names = list(VERIFIERS)
    together = survivals(Batch.of(samples), names)
    for s, sample in enumerate(samples):
        expected = torch.stack([survival_of_every_action(name, *sample) for name in names])
        assert torch.allclose(together[:, s], expected, atol=1e-11)
        labels = label_supertree(*sample, names)
        assert labels.shape == (len(names), 233)
        assert torch.allclose(labels, expected.sum(-1), atol=1e-11)


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize("kind", ["random", "zeros", "peaked"])
def test_labels_are_unbiased_for_every_action(kind: str, averaged: bool) -> None:
    """Over all supertrees of a small world, the mean label is the exact expected block efficiency (1e-10)."""
    space = ActionSpace(2, 1, 2)
    world = World(2, depth=3, kind=kind, seed=11)
    names = list(VERIFIERS)
    mean = torch.zeros(len(names), len(space), dtype=torch.float64)
    for trunk in product(range(2), repeat=3):
        for first, second in product(product(range(2), repeat=2), repeat=2):
            probability = (
                world.draft_probability(trunk)
                * world.draft_probability(first)
                * world.draft_probability(trunk[:1] + second, start=1)
            )
            if probability > 0:
                tree = Supertree.from_paths(trunk, {0: [first], 1: [second]})
                contexts = [tuple(tree.tokens_N[n] for n in path) for path in _paths(tree)]
                p_NV = torch.stack([world.target[tuple(int(t) for t in c)] for c in contexts])
                q_NV = torch.stack([world.draft[tuple(int(t) for t in c)] for c in contexts])
                mean += probability * label_supertree(tree, p_NV, q_NV, names, averaged)
    for a, (K, L1, L2) in enumerate(space):
        for v, name in enumerate(names):
            law_CV = world.appended_law(get_verifier(name), world.delayed_trees(K, L1, L2))
            expected = world.block_efficiency(law_CV)
            assert float(mean[v, a]) == pytest.approx(expected, abs=1e-10), (name, K, L1, L2)


def _paths(tree: Supertree) -> list[list[int]]:
    paths: list[list[int]] = []
    for node, parent in enumerate(tree.parents_N.tolist()):
        paths.append([] if parent < 0 else [*paths[parent], node])
    return paths


def test_a_batch_is_freed_when_it_is_let_go() -> None:
    """Its rows are the largest thing in memory: no cycle may keep them."""
    batch = Batch.of([random_supertree(8, seed=1)])
    expected_labels(batch, ["traversal", "specinfer"])
    survivals(batch, ["traversal"])
    gone = weakref.ref(batch)
    gc.disable()
    try:
        del batch
        assert gone() is None
    finally:
        gc.enable()
