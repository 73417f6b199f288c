"""What follows the accepted lengths, under sampling settings that were not trained."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from selector.actions import EMPTY, Action, ActionSpace, Choice, Lookup, StyledAction, Tree
from selector.decision import LookupRule, Mode
from selector.runtime.online import CREDIT, POWERS, PRIOR, Online, scaled
from selector.runtime.selector import load_selector
from tests.selector.synthetic import survivals_of

SPACE = ActionSpace.default()
ALL = range(len(SPACE.trees))
SURVIVALS_S = survivals_of(torch.tensor([0.6]))[0].double()[: SPACE.tree_survivals]
SECONDS_T = torch.tensor([1 + 0.02 * tree.nodes + 0.15 * (tree.L1 + tree.L2) for tree in SPACE.trees])


def tokens_at(power: float) -> Tensor:
    """Tokens per step of all trees, [T]."""
    return SPACE.efficiencies(SURVIVALS_S**power)


def best_at(power: float) -> Action:
    return SPACE.trees[int((tokens_at(power) / SECONDS_T).argmax())]


def online_of(mean_T: Tensor, first: Tree, allowed: Sequence[int] = ALL, rule: LookupRule | None = None) -> Online:
    """A lookup of a rule takes as long as two trees without drafted tokens."""
    seconds = torch.cat([SECONDS_T, torch.tensor([2.0])])
    return Online(SPACE, Mode(1.0, 1.0, first, rule=rule, mean_efficiency=tuple(mean_T.tolist())), seconds, allowed)


@pytest.fixture
def online() -> Online:
    return online_of(tokens_at(1), best_at(1))


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


def test_it_begins_with_the_best_static_tree(online: Online) -> None:
    assert online.action == best_at(1) != EMPTY


@pytest.mark.parametrize("power", [1 / 8, 0.5, 2.0, 4.0])
def test_it_finds_the_best_tree_of_another_setting(power: float, online: Online) -> None:
    """Every step accepts what its tree accepts on average at that power; to 2% of the best tree's speed."""
    tokens_T = tokens_at(power)
    first = online.action
    for _ in range(3000):
        online.observe(online.action, float(tokens_T[SPACE.index(online.action)]) - 1)  # type: ignore[arg-type]
    speed_T = tokens_T / SECONDS_T
    assert speed_T[SPACE.index(online.action)] > 0.98 * speed_T.max()
    assert speed_T[SPACE.index(online.action)] > speed_T[SPACE.index(first)]


def test_a_few_steps_count_little(online: Online) -> None:
    """One step that accepts all leaves it near the trained setting: `PRIOR` steps of it count as seen."""
    before = online.action
    online.observe(before, before.L1 + before.L2)
    assert 5 < PRIOR < 100
    assert online.action in {best_at(power) for power in POWERS if 0.5 <= power <= 1}


def steps_of(online: Online, accepted: Callable[[Choice], int], count: int, match: float = 0.0) -> list[Choice]:
    """The choices of some steps."""
    chosen = []
    for _ in range(count):
        chosen.append(online.choose(match))
        online.observe(chosen[-1], accepted(chosen[-1]))
    return chosen


def test_plain_decoding_tries_a_tree_less_and_less_often() -> None:
    """Because it tells nothing itself. Where the trees accept more than in training, one of them stays."""
    mean_T = tokens_at(60)
    assert best_at(60) == EMPTY
    useless = steps_of(online_of(mean_T, EMPTY), lambda _: 0, 4000)
    drafted = [step for step, choice in enumerate(useless) if choice != EMPTY]
    assert drafted[0] < 5 and 40 < len(drafted) < 400
    assert sum(step < 2000 for step in drafted) > 1.2 * sum(step >= 2000 for step in drafted)
    useful = steps_of(online_of(mean_T, EMPTY), lambda choice: getattr(choice, "L1", 0) + getattr(choice, "L2", 0), 400)
    assert EMPTY not in useful[100:]


def test_only_allowed_trees_are_drafted() -> None:
    chains = [SPACE.index(SPACE.chain(length)) for length in (1, 2, 6)]
    online = online_of(tokens_at(1), SPACE.chain(2), chains)
    for accepted in (6, 6, 6, 6, 6, 6, *[0] * 60):
        assert SPACE.index(online.action) in chains
        online.observe(online.action, min(accepted, online.action.L1))
    assert set(steps_of(online_of(tokens_at(60), EMPTY, [SPACE.index(EMPTY)]), lambda _: 0, 50)) == {EMPTY}


def test_lookups_are_drafted_while_they_pay() -> None:
    """Where they accept nothing, they end after a few and are tried now and then; where they accept all, they stay."""
    tree, rule = best_at(1), LookupRule(3, 8)
    for accepted, share in ((8, 1.0), (0, 0.1)):
        online = online_of(tokens_at(1), tree, rule=rule)
        assert online.choose(2) == tree and online.choose(3) == Lookup(8)
        chosen = steps_of(online, lambda choice: accepted if choice == Lookup(8) else 2, 1000, match=5)  # noqa: B023
        assert chosen[0] == Lookup(8)
        copied = sum(choice == Lookup(8) for choice in chosen[20:]) / 980
        assert copied == 1 if share == 1 else 0 < copied < share
    assert CREDIT > 3  # a few bad ones in a row may be chance


def test_a_selector_far_from_its_settings_follows_the_accepted_lengths(artefact: Path) -> None:
    """Also from one request to the next. Under a trained setting nothing changes."""
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
