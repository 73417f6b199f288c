"""Losslessness by enumeration: the law of every verifier on every tree, times the drafting probability, is the target.

What a verifier appends, continued from the target to the full length, must follow the target exactly.
"""

from __future__ import annotations

from collections import defaultdict
from itertools import product

import pytest
import torch

from data_gen.trees import DraftTree
from data_gen.verification import VERIFIERS, get_verifier
from tests.data_gen.worlds import KINDS, World

SHAPES = [(K, L1, L2) for K in (1, 2, 3) for L1 in (0, 1) for L2 in (0, 1, 2)]


def appended_law(world: World, verifier: str, K: int, L1: int, L2: int) -> dict[tuple[int, ...], float]:
    """P(appended tokens), over drafting and verification."""
    law: dict[tuple[int, ...], float] = defaultdict(float)
    rule = get_verifier(verifier)
    for probability, trunk, branches in world.drafts(K, L1, L2):
        tree = DraftTree.from_paths(trunk, branches)
        law_NV = rule.law(tree, *world.rows(tree))
        assert torch.isfinite(law_NV).all()
        assert abs(float(law_NV.sum()) - 1) < 1e-12
        for node, row in enumerate(law_NV.tolist()):
            path = tuple(tree.token(n) for n in tree.path_to(node))
            for token, mass in enumerate(row):
                law[*path, token] += probability * mass
    return law


def losslessness_error(world: World, verifier: str, K: int, L1: int, L2: int) -> float:
    """Largest deviation of the appended text, continued by the target, from the target."""
    law = appended_law(world, verifier, K, L1, L2)
    worst = 0.0
    for sequence in product(range(world.vocabulary), repeat=L1 + L2 + 1):
        total = sum(
            law.get(sequence[:n], 0.0) * world.target_probability(sequence, start=n)
            for n in range(1, len(sequence) + 1)
        )
        worst = max(worst, abs(total - world.target_probability(sequence)))
    return worst


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_every_tree_of_a_small_world_is_lossless(verifier: str, kind: str) -> None:
    for seed, vocabulary in ((1, 2), (2, 3)):
        world = World(vocabulary, depth=3, kind=kind, seed=seed)
        for K, L1, L2 in SHAPES:
            error = losslessness_error(world, verifier, K, L1, L2)
            assert error < 1e-12, f"{verifier} on ({K}, {L1}, {L2}), vocabulary {vocabulary}: {error}"


@pytest.mark.parametrize("kind", ["random", "zeros"])
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_every_tree_of_a_four_token_world_is_lossless(verifier: str, kind: str) -> None:
    world = World(4, depth=3, kind=kind, seed=3)
    for K, L1, L2 in SHAPES:
        assert losslessness_error(world, verifier, K, L1, L2) < 1e-12, (K, L1, L2)


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_block_efficiency_is_the_mean_of_the_law(verifier: str) -> None:
    world = World(3, depth=3, kind="random", seed=4)
    tree = DraftTree.from_paths([1], [[0, 2], [1, 1], [0, 1]])
    law_N = get_verifier(verifier).law(tree, *world.rows(tree)).sum(-1)
    expected = float((law_N * (tree.depths_N + 1)).sum())
    assert get_verifier(verifier).block_efficiency(tree, *world.rows(tree)) == pytest.approx(expected, abs=1e-14)


def test_the_enumeration_notices_a_wrong_order_of_visits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traversal that visits leaves in discovery order instead of depth-first is known not to be lossless."""
    world = World(3, depth=3, kind="peaked", seed=5)
    assert losslessness_error(world, "traversal", 3, 0, 2) < 1e-12
    monkeypatch.setattr(
        DraftTree, "postorder", lambda tree: sorted(range(len(tree)), key=lambda n: (-tree.depth(n), n))
    )
    assert losslessness_error(world, "traversal", 3, 0, 2) > 1e-6


def test_the_enumeration_notices_grouped_duplicates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traversal that merges copies and updates once per distinct child is known not to be lossless."""
    world = World(3, depth=3, kind="peaked", seed=6)
    monkeypatch.setattr(DraftTree, "children", DraftTree.distinct_children)
    assert losslessness_error(world, "traversal", 3, 0, 2) > 1e-6
