"""`verify` draws from `law`: chi-square tests, each with a false-alarm rate of 1e-4 and a fixed
seed."""

from __future__ import annotations

import pytest
import torch

from data_gen.trees import DraftTree
from data_gen.verification import VERIFIERS, get_verifier
from tests.data_gen.test_texts import chi_square
from tests.data_gen.worlds import World

DRAWS = 200
FALSE_ALARM = 1e-4
LONG = 1 << 12  # tokens: rows that are sorted by digits


TREES = {
    "trunk": ([2], [[0, 2], [1, 1], [0, 1]]),
    "wide": ([], [[0, 2, 1], [1, 1, 0], [0, 1, 1], [0, 2, 2], [2, 0, 0], [1, 0, 0]]),
    "chain": ([2, 0, 1], [[]]),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", TREES)
@pytest.mark.parametrize("verifier", VERIFIERS)
def test_draws_follow_the_law(verifier: str, shape: str, dtype: torch.dtype) -> None:
    world = World(3, depth=3, kind="random", seed=7)
    tree = DraftTree.from_paths(*TREES[shape])
    # bf16 rows sum to one only within 1%
    p_NV, q_NV = (rows.to(dtype) for rows in world.rows(tree))
    rule = get_verifier(verifier)
    generator = torch.Generator().manual_seed(8)
    counts = torch.zeros(len(tree), world.vocabulary)
    for _ in range(DRAWS):
        node, token = rule.verify(tree, p_NV, q_NV, generator)
        counts[node, token] += 1
    assert chi_square(counts, rule.law(tree, p_NV, q_NV)) > FALSE_ALARM


@pytest.mark.parametrize("verifier", VERIFIERS)
def test_leaf_rows_of_the_draft_may_hold_anything(verifier: str) -> None:
    world = World(3, depth=2, kind="random", seed=9)
    tree = DraftTree.from_paths([], [[0, 1], [2, 2]])
    p_NV, q_NV = world.rows(tree)
    expected = get_verifier(verifier).law(tree, p_NV, q_NV)
    leaves = [n for n in range(len(tree)) if not tree.children(n)]
    q_NV[leaves] = float("nan")
    assert torch.equal(get_verifier(verifier).law(tree, p_NV, q_NV), expected)


@pytest.mark.parametrize("verifier", [name for name in VERIFIERS if name != "khisti"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_long_rows_give_the_law_of_short_ones(verifier: str, dtype: torch.dtype) -> None:
    """With tokens so unlikely that weights and prefixes vanish."""
    generator = torch.Generator().manual_seed(10)
    tree = DraftTree.from_paths([], [[0, 0, 0, 0], [0, 1, 1, 1], [1, 1, 1, 2], [0, 0, 1, 1]])
    logits = 3 * torch.randn(2, len(tree), 8, generator=generator, dtype=torch.float64)
    logits[0, :, 1] -= 60  # the target all but excludes what the draft likes
    logits[1, :, 2] -= 60
    short_p, short_q = logits.softmax(-1)
    long_p, long_q = (
        torch.nn.functional.pad(row, (0, LONG)).to(dtype) for row in (short_p, short_q)
    )
    rule = get_verifier(verifier)
    law_NV, expected_NV = rule.law(tree, long_p, long_q), rule.law(tree, short_p, short_q)
    assert torch.isfinite(law_NV).all() and not law_NV[:, 8:].any()
    assert torch.allclose(
        law_NV[:, :8], expected_NV, atol=1e-11 if dtype == torch.float64 else 1e-4
    )
