from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from selector.actions import Action, ActionSpace
from selector.latency import LatencyProfile, Table, gpu_like, interpolated, interpolated_at
from selector.runtime import Mode, decision_tables
from selector.schema import InputError
from tests.selector.synthetic import profile

FLAT = LatencyProfile(
    "here",
    "pair",
    draft=Table([10, 20], [1, 4], [[1.0, 4.0], [1.0, 4.0]]),  # seconds are the width
    target=Table([10, 20], [1, 33], [[100.0, 132.0], [100.0, 132.0]]),  # 99 + nodes
    verify={"traversal": Table([1, 16], [1, 4], [[1000.0, 1000.0], [1000.0, 1000.0]])},
    select=10_000.0,
    revise=1e4,
    step=0.0,
)


@pytest.mark.parametrize(
    ("action", "passes"),
    [
        (Action(1, 0, 0), 0),
        (Action(1, 3, 0), 2 + 2),  # the root (and a token it may lack), two trunk nodes; the last one is a leaf
        (Action(4, 0, 1), 2),  # all first branch tokens come from the root's row
        (Action(2, 0, 3), 2 + 2 * 2),
        (Action(3, 2, 2), 2 + 2 + 3),
    ],
    ids=str,
)
def test_every_pass_is_charged_at_its_width(action: Action, passes: int) -> None:
    verification = 1000.0 if action.nodes else 0.0
    expected = passes + 100.0 + action.nodes + verification
    assert FLAT.action_seconds(action, 15, "traversal") == pytest.approx(expected)


def test_a_selector_pays_for_itself_and_for_the_root_pass() -> None:
    assert FLAT.action_seconds(Action(1, 0, 0), 15, "traversal", selector=True) == pytest.approx(10_000 + 2 + 100)
    assert FLAT.action_seconds(Action(1, 1, 0), 15, "traversal", selector=True) == pytest.approx(
        10_000 + 2 + 101 + 1000
    )


def test_tables_are_linear_between_and_constant_beyond_the_grid() -> None:
    table = Table([10, 30], [1, 3], [[1.0, 3.0], [2.0, 6.0]])
    assert table.at(20, 2) == pytest.approx(3.0)
    assert table.at(50, 9) == table.at(30, 3) == 6.0
    assert table.at(0, 0) == table.at(10, 1) == 1.0


def test_interpolated_rows_agree_with_the_profile() -> None:
    actions = ActionSpace.default().actions
    lengths, table = profile().table(actions, "traversal", selector=True)
    rows = interpolated(table, lengths, torch.tensor([10, 55, 100, 300, 1]))
    assert torch.allclose(rows[0], table[0]) and torch.allclose(rows[2], table[1])
    assert torch.allclose(rows[1], (table[0] + table[1]) / 2)
    assert torch.equal(rows[3], rows[2]) and torch.equal(rows[4], rows[0])  # constant beyond


def test_a_verifier_that_was_not_measured_is_named() -> None:
    with pytest.raises(InputError, match="no times for specinfer"):
        profile().table(ActionSpace.default().actions, "specinfer", selector=True)


def test_a_profile_survives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    path.write_text(json.dumps({**profile().to_json(), "check": []}))
    assert LatencyProfile.load(path) == profile()


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"schema_version": 2, "draft": 3}'])
def test_a_damaged_profile_is_named(tmp_path: Path, content: str) -> None:
    path = tmp_path / "latency.json"
    path.write_text(content)
    with pytest.raises(InputError, match=r"latency.json: not a latency profile"):
        LatencyProfile.load(path)


def test_a_profile_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    path.write_text(json.dumps({**profile().to_json(), "schema_version": 99}))
    with pytest.raises(InputError, match="schema version 99"):
        LatencyProfile.load(path)


def test_a_gpu_like_profile_verifies_32_tokens_at_the_price_of_one() -> None:
    made = gpu_like("pair", ["traversal"], draft_share=0.05)
    assert made.device.startswith("synthetic: ")
    times = {a: made.action_seconds(Action(*a), 100, "traversal") for a in ((1, 0, 0), (1, 1, 0), (4, 0, 7), (4, 0, 8))}
    target = made.target.at(100, 1)
    assert times[1, 1, 0] - times[1, 0, 0] == pytest.approx(0.05 * target)
    assert times[4, 0, 7] - times[1, 1, 0] == pytest.approx(6 * 0.05 * target)
    assert times[4, 0, 8] - times[4, 0, 7] == pytest.approx((0.05 + 0.5 / 32) * target)  # the 33rd token is not free


def test_decisions_are_charged_where_they_are_made() -> None:
    base = FLAT.action_seconds(Action(1, 3, 0), 15, "traversal")
    for first, decisions in ((0, 4), (1, 3), (3, 1), (5, 0)):
        charged = FLAT.action_seconds(Action(1, 3, 0), 15, "traversal", revising=first)
        assert charged == pytest.approx(base + decisions * FLAT.revise)
    empty = FLAT.action_seconds(Action(1, 0, 0), 15, "traversal", revising=0)
    root_pass = 2.0  # the root, and a token that the draft may lack
    assert empty == pytest.approx(FLAT.action_seconds(Action(1, 0, 0), 15, "traversal") + root_pass + FLAT.revise)


def test_every_row_is_charged_for_the_nucleus_where_there_is_one() -> None:
    sorting = replace(FLAT, nucleus=0.5)
    for action, rows in ((Action(1, 0, 0), 1), (Action(1, 3, 0), 4 + 2 + 2), (Action(2, 1, 2), 6 + 2 + 1 + 2)):
        plain, filtered = (sorting.action_seconds(action, 15, "traversal", filtered=f) for f in (False, True))
        assert filtered - plain == pytest.approx(0.5 * rows), action


def test_decisions_are_charged_by_sampling_setting_and_by_the_verifier_of_the_action() -> None:
    free = Table([1], [1], [[0.0]])
    two = replace(FLAT, nucleus=0.5, verify={**FLAT.verify, "free": free})
    actions = ActionSpace.default().actions
    own = tuple(int(action.K > 1) for action in actions)
    modes = [
        Mode(0.5, 1.0, Action(1, 3, 0), False, False, 0.0),
        Mode(1.0, 0.9, Action(1, 3, 0), False, False, 0.0, verifier_of=own),
    ]
    settings_S2, lengths_L, seconds_SLA, option_SA = decision_tables(two, modes, ["traversal", "free"], regressor=True)
    assert settings_S2.tolist() == [[0.5, 1.0], [1.0, pytest.approx(0.9)]]
    assert option_SA.tolist() == [list(range(233)), [a + 233 * (action.K > 1) for a, action in enumerate(actions)]]
    assert decision_tables(two, modes, ["traversal", "free"], regressor=False)[3].tolist() == [list(range(233))] * 2
    for action in (Action(1, 3, 0), Action(2, 1, 2)):
        times = interpolated_at(seconds_SLA, lengths_L, torch.arange(2), torch.full((2,), 15.0))
        for mode, name, found in zip(modes, ("traversal", "free"), times[:, actions.index(action)], strict=True):
            name = name if action.K > 1 else "traversal"
            expected = two.action_seconds(action, 15, name, selector=True, filtered=mode.top_p < 1)
            assert float(found) == pytest.approx(expected)
