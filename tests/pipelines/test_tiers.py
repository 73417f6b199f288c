"""The selector restricted to few shapes."""

from __future__ import annotations

import pytest
import torch

from pipelines.config import Config
from pipelines.export.shapes import COUNTS, Decisions, limited_modes, shapes_by_visits
from selector.decision import Mode
from selector.schema import LIGHT
from selector.train.tuning import StaticTable, best_static, tune_mode
from tests.selector.synthetic import SPACE, opinionated, profile, static_mode, texts, timed


def setting(decides: bool = True) -> Decisions:
    """A selector that knows which roots are easy, on texts of which half the roots are; or a static tree."""
    own = timed(texts(count=6, roots=16))
    scores_RA, static = SPACE.efficiencies(own.survivals_RS), StaticTable.of(own)
    mode = best_static(own, static)
    if decides:
        mode = tune_mode(own, {LIGHT: scores_RA}, mode).mode
    return Decisions(mode, own, {LIGHT: scores_RA}, False, static)


@pytest.fixture(scope="module")
def knowing() -> Decisions:
    return setting()


def test_the_first_shape_is_the_best_static_tree_and_alone_nothing_is_decided(knowing: Decisions) -> None:
    first, *_ = shapes_by_visits([knowing])
    assert first == int(knowing.static.speeds().argmax())
    alone = knowing.restricted([first])
    assert knowing.mode.decider == "network" and alone.decider == "static" and alone.action == SPACE.actions[first]


def test_few_shapes_lose_little_and_all_that_are_drafted_lose_nothing(knowing: Decisions) -> None:
    order = shapes_by_visits([knowing])
    assert len(order) > 4
    ratios = [knowing.over(knowing.restricted(order[:count]), knowing.mode).value for count in range(1, len(order) + 1)]
    assert ratios[0] < 0.9 and min(ratios[1:]) > 0.97 and ratios[-1] == pytest.approx(1, abs=1e-3)
    for count in range(1, len(order) + 1):
        assert set(knowing.restricted(order[:count]).mask(SPACE).nonzero()[:, 0].tolist()) <= set(order[:count])


def test_a_policy_takes_what_it_ranks_first(knowing: Decisions) -> None:
    worth_RA = knowing.predictions[LIGHT] - knowing.mode.speed * knowing.timed.seconds((LIGHT,))
    policy = knowing._replace(policy=True, predictions={LIGHT: worth_RA})
    assert policy.restricted(shapes_by_visits([policy])[:4]).decider == "network"


def test_settings_share_the_shapes(knowing: Decisions) -> None:
    """One that decides, and one that does not, whose tree is then the first."""
    other = setting(decides=False)
    order = shapes_by_visits([knowing, other])
    assert SPACE.actions[order[0]] == other.mode.action
    assert sorted(order) == sorted({*shapes_by_visits([knowing]), *shapes_by_visits([other])})
    assert other.restricted(order[:4]).decider != "network" and knowing.restricted(order[:4]).decider == "network"


def test_the_modes_of_an_artefact_are_restricted_to_so_many(capsys: pytest.CaptureFixture[str]) -> None:
    data, module = texts(count=6, roots=12), opinionated()
    entries = [{**static_mode(timed(data)).row(), "mean_efficiency": [1.0] * len(SPACE.trees)}]
    entries[0] |= {"feature_levels": [LIGHT], "allowed": []}
    config = Config(name="a", verifiers=("traversal",), train={"verifier": "traversal"}, export={"tiers": 3})
    with torch.no_grad():
        modes, rows = limited_modes(config, module, data, entries, profile())
    assert "Speed with few shapes" in capsys.readouterr().out
    assert len(modes[0]["allowed"]) <= 3 and modes[0]["mean_efficiency"] == entries[0]["mean_efficiency"]
    assert SPACE.index(Mode.of(modes[0]).action) in modes[0]["allowed"]
    assert [len(row["shapes"]) for row in rows] == list(COUNTS[: len(rows)])
    assert set(rows[0]["ratios"][0]) == {"value", "error"}
