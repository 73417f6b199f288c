from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from selector.actions import COPY, EMPTY, Action
from selector.decision import LookupRule, Setting
from selector.export.writer import config_of
from selector.runtime.network import Network
from selector.runtime.selector import Selector, load_selector
from selector.sampling import Sampling
from selector.schema import LIGHT, InputError
from selector.train.data import Timed
from selector.train.module import SelectorModule
from tests.selector.exported import (
    SETTINGS,
    batch_of,
    coordinates_of,
    efficiencies,
    in_turn,
    loaded,
    module_of,
    most_lost,
    one_by_one,
    roots_of,
    worth,
)
from tests.selector.synthetic import SPACE, profile

LIMITS = [
    [action for action in SPACE if action.nodes <= 5],
    [(1, 2, 0), (2, 3, 2), (3, 0, 4)],
    [(4, 8, 8), (4, 8, 7)],  # none of the limited setting's own
    [(1, 3, 0), (2, 0, 4), (1, 8, 0, COPY), (1, 16, 0, COPY)],
    [(1, 4, 0), (1, 3, 0), (2, 2, 3), (1, 8, 0, COPY)],  # the rule's own tree, and faster ones
    [EMPTY],
]


@pytest.mark.parametrize("shapes", LIMITS)
@pytest.mark.parametrize("objective", ["policy", "regressor"])
def test_only_allowed_trees_are_chosen(
    artefacts: dict[tuple[str, str], Path], objective: str, shapes: list[tuple[Any, ...]]
) -> None:
    """The best of those that an engine can draft; the static one is the fastest tree, and time is
    worth less. A rule has those of its lookups that are among them."""
    selector, made = loaded(artefacts[objective, LIGHT]), module_of(objective)
    can = sorted(SPACE.index(Action.of(shape)) for shape in shapes)
    for setting in SETTINGS:
        policy = selector.at(*coordinates_of(setting), shapes=shapes)
        speed_A = selector.config.static_speeds(
            selector.settings[SETTINGS.index(setting)], selector.latency
        )
        best = max((a for a in can if a < len(SPACE.trees)), key=lambda a: float(speed_A[a]))
        lengths = []
        for least, length in setting.rule.lengths if setting.rule else ():
            if SPACE.index(Action.copy(length)) in can:
                lengths.append((least, length))
        if lengths and SPACE.index(setting.action) in can:
            best = SPACE.index(setting.action)  # the tree that goes with the rule
        assert policy.setting.feature_levels == setting.feature_levels
        assert policy.setting.rule == (LookupRule.of(lengths) if lengths else None)
        assert policy.select(None) == SPACE.actions[best]
        may = {a for a in can if a in (setting.allowed or range(len(SPACE)))} or set(can)
        assert set(policy.setting.allowed) == {*may, best}
        factor = float(speed_A[best] / speed_A[SPACE.index(setting.action)])
        assert policy.setting.speed == pytest.approx(factor * setting.speed)
        data, rows = roots_of(setting, LIGHT, count=1)
        roots = one_by_one(batch_of(data, rows, LIGHT))
        chosen = [in_turn(policy.select, policy.setting, features) for features in roots]
        assert set(chosen) <= set(can)
        assert most_lost(made, data, policy.setting, rows, chosen) < 1e-4


def test_limits_that_leave_no_tree_are_refused(artefact: Path) -> None:
    selector = load_selector(artefact)
    for shapes, message in (
        ([], "no tree is left"),
        ([(1, 8, 0, COPY), (1, 16, 0, COPY)], "no tree is left"),
        ([(1, 3, 0), (1, 3, 0, COPY)], "lookup 3 is not in the space"),
        ([(4, 8)], ""),
        ([(9, 0, 8)], r"\(9, 0, 8\) is not in the space"),
    ):
        with pytest.raises(InputError, match=f"shapes: {message}"):
            selector.at(1.0, shapes=shapes)


def test_an_engine_may_draft_trees_that_the_selector_does_not_have() -> None:
    """These are left out, and the others remain."""
    chosen = Action(2, 0, 3)
    space = SPACE.restricted_to([chosen])
    efficiencies = [1.0 + 0.2 * tree.depth for tree in space.trees]
    setting = Setting(Sampling(1.0), space.chain(3), mean_efficiency=tuple(efficiencies))
    module = SelectorModule("regressor", LIGHT, [], {"hidden": [8]}, space=space.to_json()).eval()
    config = config_of(module, "traversal", setting.action, [setting])
    selector = Selector(Network(module.state_dict(), config), profile(), [setting])
    policy = selector.at(1.0, shapes=[(1, 3, 0), chosen, (3, 0, 4)])
    assert [space.actions[a] for a in policy.setting.allowed] == [space.chain(3), chosen]
    with pytest.raises(InputError, match="no tree is left"):
        selector.at(1.0, shapes=[(3, 0, 4)])


def test_another_machine_has_its_own_static_trees_speeds_and_times(artefact: Path) -> None:
    """The best static tree by that machine's times and what trees yielded; g in proportion to the
    speeds; any tree. It decides by these times."""
    slow = replace(profile(draft=8e-3), device="slow")
    here = load_selector(artefact)
    there = load_selector(artefact, latency=slow)
    made = module_of("regressor")
    for at, (setting, moved) in enumerate(zip(here.settings, there.settings, strict=True)):
        speeds = []
        for times_of in (profile(), slow):
            seconds = [
                times_of.action_seconds(action, 100, "traversal", (), setting.sampling)
                for action in SPACE.trees
            ]
            speeds.append(efficiencies(at) / torch.tensor(seconds))
        before_A, speed_A = speeds
        best = int(speed_A.argmax())
        ratio = float(speed_A[best] / before_A[SPACE.index(setting.action)])
        assert moved.speed == pytest.approx(setting.speed * ratio) and ratio < 1
        assert moved == replace(setting, action=SPACE.actions[best], speed=moved.speed, allowed=())
        assert there.at(*coordinates_of(setting)).select(None) == moved.action
        data, rows = roots_of(moved, LIGHT, count=1)
        data = Timed(data.texts, "traversal", slow)
        scores_BA = there.scores(batch_of(data, rows, LIGHT))
        expected_BA = worth(made, data, moved)[rows]
        assert torch.allclose(scores_BA, expected_BA, atol=1e-3, rtol=1e-5)
    assert here.settings[0].action != there.settings[0].action


def test_the_same_machine_changes_nothing(artefact: Path) -> None:
    for same in (None, str(artefact / "latency.json"), profile()):
        assert load_selector(artefact, latency=same).settings == list(SETTINGS)
