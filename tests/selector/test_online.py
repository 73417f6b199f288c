"""Static trees that follow the accepted lengths, under sampling settings that were not trained."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor

from selector.actions import EMPTY, Action, ActionSpace, Lookup, StyledAction
from selector.runtime.online import POWERS, PRIOR, OnlineTree, scaled
from selector.runtime.selector import load_selector
from tests.selector.synthetic import survivals_of

SPACE = ActionSpace.default()
SURVIVALS_S = survivals_of(torch.tensor([0.6]))[0].double()[: SPACE.tree_survivals]
SECONDS_T = torch.tensor([1 + 0.02 * tree.nodes + 0.15 * (tree.L1 + tree.L2) for tree in SPACE.trees])


def tokens_at(power: float) -> Tensor:
    """Tokens per step of all trees, [T]."""
    return SPACE.efficiencies(SURVIVALS_S**power)


def best_at(power: float) -> Action:
    return SPACE.trees[int((tokens_at(power) / SECONDS_T).argmax())]


@pytest.fixture
def online() -> OnlineTree:
    return OnlineTree(SPACE, tokens_at(1).tolist(), SECONDS_T, range(len(SPACE.trees)), best_at(1))


def test_survivals_are_raised_to_each_power() -> None:
    """To 1e-6: the mean efficiencies of all trees determine every survival."""
    found_GT = scaled(SPACE, tokens_at(1).tolist())
    for power, found_T in zip(POWERS, found_GT, strict=True):
        torch.testing.assert_close(found_T, tokens_at(power), atol=1e-6, rtol=0)


def test_equal_trees_are_equal_whatever_the_linear_algebra_rounds() -> None:
    """So that two runs choose the same one: greedy trees with the means of the i.i.d. trees of their shapes."""
    space = ActionSpace.recorded()
    tokens_GT = scaled(space, space.efficiencies(survivals_of(torch.tensor([0.55])))[0].tolist())
    styled = [at for at, tree in enumerate(space.trees) if isinstance(tree, StyledAction)]
    shapes = [space.trees.index(Action(*space.trees[at][:3])) for at in styled]
    assert styled and torch.equal(tokens_GT[:, styled], tokens_GT[:, shapes])


def test_it_begins_with_the_best_static_tree(online: OnlineTree) -> None:
    assert online.action == best_at(1) != EMPTY


@pytest.mark.parametrize("power", [1 / 8, 0.5, 2.0, 4.0])
def test_it_finds_the_best_tree_of_another_setting(power: float, online: OnlineTree) -> None:
    """Every step accepts what its tree accepts on average at that power; to 2% of the best tree's speed."""
    tokens_T = tokens_at(power)
    first = online.action
    for _ in range(3000):
        online.observe(online.action, float(tokens_T[SPACE.index(online.action)]) - 1)  # type: ignore[arg-type]
    speed_T = tokens_T / SECONDS_T
    assert speed_T[SPACE.index(online.action)] > 0.98 * speed_T.max()
    assert speed_T[SPACE.index(online.action)] > speed_T[SPACE.index(first)]


def test_a_few_steps_count_little(online: OnlineTree) -> None:
    """One step that accepts all leaves it near the trained setting: `PRIOR` steps of it count as seen."""
    before = online.action
    online.observe(before, before.L1 + before.L2)
    assert 10 < PRIOR < 100
    assert online.action in {best_at(power) for power in POWERS if 0.5 <= power <= 1}


def test_it_drafts_again_after_plain_decoding() -> None:
    """Plain decoding tells nothing, so what was seen before is forgotten."""
    chain = SPACE.chain(4)
    online = OnlineTree(SPACE, tokens_at(1).tolist(), SECONDS_T, [SPACE.index(EMPTY), SPACE.index(chain)], chain)
    assert online.action == chain
    drafted = []
    for _ in range(5000):
        drafted.append(online.action == chain)
        online.observe(online.action, 0)
    first = drafted.index(False)
    assert 1 < first < 200 and not all(drafted[first:]) and any(drafted[first:])


def test_only_allowed_trees_are_drafted() -> None:
    chains = [SPACE.index(SPACE.chain(length)) for length in (1, 2, 6)]
    online = OnlineTree(SPACE, tokens_at(1).tolist(), SECONDS_T, chains, SPACE.chain(2))
    for accepted in (6, 6, 6, 6, 6, 6, *[0] * 60):
        assert SPACE.index(online.action) in chains
        online.observe(online.action, min(accepted, online.action.L1))


def test_a_selector_far_from_its_settings_follows_the_accepted_lengths(artefact: Path) -> None:
    """A copy tells nothing. Under a trained setting nothing changes."""
    selector = load_selector(artefact)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        far, near = selector.at(2.0), selector.at(1.0)
    first = far.select(None)
    assert isinstance(first, Action) and first == far.mode.action
    far.observe(Lookup(8), 0)
    assert far.select(None) == first and "until steps were observed" in repr(far)
    for _ in range(60):
        tree = far.select(None)
        assert isinstance(tree, Action)
        far.observe(tree, tree.L1 + tree.L2)
        near.observe(near.mode.action, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        deeper = selector.at(2.0).select(None)  # another request under the same setting
    assert isinstance(deeper, Action) and deeper.L1 + deeper.L2 > first.L1 + first.L2
    assert near.select(None) == near.mode.action
