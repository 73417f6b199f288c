"""The selector restricted to few shapes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from pipelines.config import Config
from pipelines.export.tiers import (
    CHAINS,
    COUNTS,
    TREES,
    Unrestricted,
    candidates_of,
    limited_modes,
    restricted,
    shapes_in_order,
    tiers,
)
from selector.actions import Action
from selector.decision import Mode
from selector.schema import LIGHT
from selector.train.module import SelectorModule
from selector.train.tuning import StaticTable, best_static, tune_mode
from tests.selector.synthetic import SPACE, opinionated, profile, static_mode, texts, timed


def setting(decides: bool = True) -> Unrestricted:
    """A selector that knows which roots are easy, on texts of which half the roots are; or a static tree."""
    own = timed(texts(count=6, roots=16))
    scores_RA = SPACE.efficiencies(own.survivals_RS)
    mode = best_static(own, StaticTable.of(own))
    if decides:
        mode = tune_mode(own, {LIGHT: scores_RA}, mode).mode
    return Unrestricted(mode, own, {LIGHT: scores_RA}, policy=False)


@pytest.fixture(scope="module")
def knowing() -> Unrestricted:
    return setting()


@pytest.fixture(scope="module")
def rows(knowing: Unrestricted) -> list[dict]:
    return tiers([knowing])


def test_two_shapes_are_those_of_a_search_over_all_pairs(knowing: Unrestricted) -> None:
    """Of easy and of hard roots."""
    chains = [SPACE.index(SPACE.chain(length)) for length in range(0, 17, 2)]
    order = shapes_in_order([knowing], chains, 2)
    speeds = {}
    for pair in itertools.combinations(chains, 2):
        modes = [replace(knowing.mode, action=SPACE.actions[at], allowed=pair) for at in pair]
        speeds[pair] = max(knowing.replayed(mode).speed for mode in modes)
    assert speeds[tuple(sorted(order))] > 0.99 * max(speeds.values())
    assert max(speeds.values()) > 1.02 * max(knowing.static.speeds()[chains])


def test_one_shape_is_the_best_static_tree(knowing: Unrestricted) -> None:
    for kind in (CHAINS, TREES):
        candidates = candidates_of([knowing], kind)
        trees = [at for at in candidates if at < len(SPACE.trees)]
        fastest = trees[int(knowing.static.speeds()[trees].argmax())]
        assert shapes_in_order([knowing], candidates, 1) == [fastest]


def test_more_shapes_hold_those_of_fewer(rows: list[dict]) -> None:
    for kind, most in ((CHAINS, 16), (TREES, 32)):
        own = [row["shapes"] for row in rows if row["kind"] == kind]
        assert [len(shapes) for shapes in own] == [count for count in COUNTS if count <= most]
        assert all(more[: len(fewer)] == fewer for fewer, more in itertools.pairwise(own))
        assert all(len(shape) == 3 and Action(*shape).K == 1 for shape in own[-1]) == (kind == CHAINS)
    ratios = [row["ratios"][0].value for row in rows if row["kind"] == TREES]
    assert ratios[0] < ratios[-1] and ratios[-1] > 0.98


def test_a_policy_takes_what_it_ranks_first(knowing: Unrestricted) -> None:
    worth_RA = knowing.predictions[LIGHT] - knowing.mode.speed * knowing.timed.seconds((LIGHT,))
    policy = replace(knowing, policy=True, predictions={LIGHT: worth_RA})
    order = shapes_in_order([policy], candidates_of([policy], CHAINS), 2)
    assert restricted(policy, order).mode.decides


def test_where_nothing_is_decided_shapes_are_static_trees() -> None:
    own = setting(decides=False)
    (first,) = shapes_in_order([own], candidates_of([own], TREES), 1)
    assert SPACE.actions[first] == own.mode.action
    judged = restricted(own, [first])
    assert not judged.mode.decides and judged.ratio.value == 1


def test_settings_share_the_shapes(knowing: Unrestricted) -> None:
    """One that decides, and one that does not: the static tree of the latter is among the first few."""
    other = setting(decides=False)
    order = shapes_in_order([knowing, other], candidates_of([knowing], TREES), 4)
    speeds_A = other.static.speeds()
    assert max(float(speeds_A[at]) for at in order if at < len(SPACE.trees)) > 0.99 * float(speeds_A.max())


def test_the_modes_of_an_artefact_are_restricted_to_so_many(capsys: pytest.CaptureFixture[str]) -> None:
    data = texts(count=6, roots=12)
    module: SelectorModule = opinionated()
    mode = static_mode(timed(data))
    entries = [{**mode.row(), "mean_efficiency": [1.0] * len(SPACE.trees)}]
    config = Config(name="a", verifiers=("traversal",), train={"verifier": "traversal"}, export={"tiers": 3})
    modes, rows = limited_modes(config, module, data, entries, profile())
    assert "Speed with few shapes" in capsys.readouterr().out
    assert len(modes[0]["allowed"]) == 3 and modes[0]["mean_efficiency"] == entries[0]["mean_efficiency"]
    assert SPACE.index(Mode.of(modes[0]).action) in modes[0]["allowed"]
    assert {row["kind"] for row in rows} == {CHAINS, TREES} and set(rows[0]["ratios"][0]) == {"value", "error"}


def test_decisions_that_no_longer_pay_are_left_out(knowing: Unrestricted) -> None:
    assert knowing.mode.decides
    judged = restricted(knowing, [SPACE.index(SPACE.chain(3))])
    assert not judged.mode.decides and judged.mode.action == SPACE.chain(3)
    assert torch.equal(judged.mode.mask(SPACE).nonzero()[:, 0], torch.tensor([SPACE.index(SPACE.chain(3))]))
