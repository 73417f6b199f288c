from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from selector.actions import EMPTY, Action, ActionSpace
from selector.latency import LatencyProfile, Verification
from selector.sampling import Sampling
from selector.schema import DRAFTER, EARLY, FORMAT, FULL, LIGHT, MATCH, TEXT, InputError
from selector.tables import Table, interpolated_at
from tests.selector.synthetic import profile

FLAT = LatencyProfile(
    "here",
    "pair",
    draft=Table([10, 20], [1, 4], [[1.0, 4.0], [1.0, 4.0]]),  # seconds are the width
    target=Table([10, 20], [1, 33], [[100.0, 132.0], [100.0, 132.0]]),  # 99 + nodes
    verify={"traversal": Verification(0.1, 300.0)},
    decide={TEXT: 3000.0, DRAFTER: 4000.0, EARLY: 5000.0, LIGHT: 10_000.0, FULL: 20_000.0},
    drafting=Table.constant(1000.0),
)
ACTIONS = ActionSpace.with_lookups().actions


@pytest.mark.parametrize(
    ("action", "passes"),
    [
        (Action(1, 0, 0), 0),
        # the root (and a token it may lack), two trunk nodes; the last one is a leaf
        (Action(1, 3, 0), 2 + 2),
        (Action(4, 0, 1), 2),  # all first branch tokens come from the root's row
        (Action(2, 0, 3), 2 + 2 * 2),
        (Action(3, 2, 2), 2 + 2 + 3),
        (Action.copy(4), 0),
        (Action.copy(16), 0),
    ],
    ids=str,
)
def test_every_pass_is_charged_at_its_width(action: Action, passes: int) -> None:
    drafting = 1000.0 + 0.1 * action.nodes + 300.0 * (action.K > 1) if action.drafts else 0.0
    expected = passes + 100.0 + action.nodes + drafting
    assert FLAT.action_seconds(action, 15, "traversal") == pytest.approx(expected)


def test_a_greedy_tree_takes_the_time_of_its_nodes_and_of_its_own_verification() -> None:
    """All its branches differ. Where greedy trees were not timed, they are verified as others
    are."""
    # i.i.d. branches are copies of one another
    same = replace(FLAT, distinct={"T=1": {"3": [1.0] * 8}})
    greedy, iid = Action(3, 2, 2, "greedy"), Action(3, 2, 2)
    seconds = FLAT.action_seconds(iid, 15, "traversal")
    assert (
        same.action_seconds(greedy, 15, "traversal")
        == FLAT.action_seconds(greedy, 15, "traversal")
        == seconds
    )
    assert same.action_seconds(iid, 15, "traversal") == seconds - 4
    timed = replace(FLAT, verify={**FLAT.verify, "greedy": Verification(token=0.5)})
    of_others = 0.1 * greedy.nodes + 300.0
    assert timed.action_seconds(greedy, 15, "traversal") == pytest.approx(
        seconds - of_others + 0.5 * greedy.nodes
    )
    assert timed.action_seconds(iid, 15, "traversal") == seconds


LATE = [((LIGHT,), 10_000), ((FULL,), 20_000), ((EARLY, LIGHT), 15_000), ((EARLY, FULL), 25_000)]
OTHERS = [((EARLY,), 5000), ((TEXT,), 3000), ((DRAFTER,), 4000), ((MATCH,), 0), ((), 0)]


@pytest.mark.parametrize(
    ("feature_levels", "decision", "passes"), [(*e, 2) for e in LATE] + [(*e, 0) for e in OTHERS]
)
def test_a_selector_pays_for_itself_and_where_it_looks_at_the_drafts_rows_for_the_root_pass(
    feature_levels: tuple[str, ...], decision: float, passes: float
) -> None:
    """For every decision that it has made, and for the pass whether or not the draft then
    drafts."""
    assert FLAT.action_seconds(EMPTY, 15, "traversal", feature_levels) == pytest.approx(
        decision + passes + 100
    )
    assert FLAT.action_seconds(Action.copy(8), 15, "traversal", feature_levels) == pytest.approx(
        decision + passes + 108
    )
    # where something is drafted the draft passes the root anyway
    for action in (Action(1, 1, 0), Action(3, 2, 2)):
        base = FLAT.action_seconds(action, 15, "traversal")
        assert FLAT.action_seconds(action, 15, "traversal", feature_levels) == pytest.approx(
            base + decision
        )


def test_tables_are_linear_between_and_constant_beyond_the_grid() -> None:
    table = Table([10, 30], [1, 3], [[1.0, 3.0], [2.0, 6.0]])
    assert table.at(20, 2) == pytest.approx(3.0)
    assert table.at(50, 9) == table.at(30, 3) == 6.0
    assert table.at(0, 0) == table.at(10, 1) == 1.0


def test_interpolated_rows_agree_with_the_profile() -> None:
    lengths, table = profile().table(ACTIONS, "traversal", (EARLY, LIGHT))
    for row, length in zip(table, (10, 100), strict=True):
        times = [
            profile().action_seconds(action, length, "traversal", (EARLY, LIGHT))
            for action in ACTIONS
        ]
        assert row.tolist() == pytest.approx(times)
    rows = interpolated_at(
        table.unsqueeze(0),
        lengths,
        torch.zeros(5, dtype=torch.int64),
        torch.tensor([10, 55, 100, 300, 1]),
    )
    assert torch.allclose(rows[0], table[0]) and torch.allclose(rows[2], table[1])
    assert torch.allclose(rows[1], (table[0] + table[1]) / 2)
    assert torch.equal(rows[3], rows[2]) and torch.equal(rows[4], rows[0])  # constant beyond


def test_a_decision_that_was_not_measured_is_named() -> None:
    """But for the match: looking at it takes no time to speak of."""
    light = replace(profile(), decide={LIGHT: 1e-4})
    with pytest.raises(InputError, match="no time for a decision that sees early"):
        light.table(ACTIONS, "traversal", (EARLY, LIGHT))
    for free, dear in zip(
        light.table(ACTIONS, "traversal"), light.table(ACTIONS, "traversal", (MATCH,)), strict=True
    ):
        assert torch.equal(free, dear)


def test_a_profile_survives_the_file(tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    lag, distinct = Table([0], [0, 4], [[0.0, 1e-3]]), {"T=0": {"2": [1.0] * 8}}
    whole = replace(profile(), drafting=Table.constant(1e-4), lag=lag, distinct=distinct)
    for saved in (profile(), whole):
        path.write_text(json.dumps({**saved.to_json(), "check": [], "matrices": []}))
        assert LatencyProfile.load(path) == saved


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not a latency profile"),
        ("[]", "not a latency profile"),
        (json.dumps(profile().to_json())[:-40], "not a latency profile"),
        (f'{{"format": {FORMAT}, "draft": 3}}', "not a latency profile"),
        ('{"format": 99}', f"format 99; this program reads {FORMAT}"),
    ],
)
def test_a_profile_that_is_damaged_or_of_another_version_is_named(
    tmp_path: Path, content: str, message: str
) -> None:
    path = tmp_path / "latency.json"
    path.write_text(content)
    with pytest.raises(InputError, match=f"latency.json: {message}"):
        LatencyProfile.load(path)


def test_every_row_is_charged_for_the_nucleus_where_there_is_one() -> None:
    sorting = replace(FLAT, nucleus=0.5)
    for action, rows in (
        (Action(1, 0, 0), 1),
        (Action(1, 3, 0), 4 + 2 + 2),
        (Action(2, 1, 2), 6 + 2 + 1 + 2),
        (Action.copy(4), 5),
    ):
        plain, filtered = (
            sorting.action_seconds(action, 15, "traversal", sampling=Sampling(1.0, p))
            for p in (1.0, 0.9)
        )
        assert filtered - plain == pytest.approx(0.5 * rows), action


def test_coinciding_branches_are_one_node() -> None:
    """All of them at temperature 0; the pass is as long as that of the tree that is left, halves
    included."""
    distinct = {
        "T=0": dict.fromkeys(("2", "3", "4"), [1.0] * 8),
        "T=0.5, top-p=0.9": {"2": [1.5] + [2.0] * 7, "3": [2.5] * 8, "4": [3.0] * 8},
    }
    merged, upper = replace(profile(), distinct=distinct), profile()
    assert merged.nodes(Action(4, 2, 8), Sampling(0.0)) == 11
    assert merged.nodes(Action(2, 3, 4), Sampling(0.5, 0.9)) == 1 + 3 + 1.5 + 3 * 2
    assert (
        merged.nodes(Action(2, 3, 4), Sampling())
        == upper.nodes(Action(2, 3, 4), Sampling(0.0))
        == 12
    )
    assert (
        merged.nodes(Action(1, 8, 3), Sampling(0.0)) == 12
        and merged.nodes(Action.copy(5), Sampling(0.0)) == 6
    )
    for action, sampling in (
        (Action(4, 2, 8), Sampling(0.0)),
        (Action(3, 0, 5), Sampling(0.5, 0.9)),
    ):
        saved = upper.target.at(20, 1 + action.nodes) - upper.target.at(
            20, merged.nodes(action, sampling)
        )
        rows = (1 + action.nodes - merged.nodes(action, sampling)) * upper.nucleus
        seconds = [
            latency.action_seconds(action, 20, "traversal", sampling=sampling)
            for latency in (upper, merged)
        ]
        assert (
            seconds[0] - seconds[1] == pytest.approx(saved + (rows if sampling.top_p < 1 else 0))
            and saved > 0
        )
