"""The latency profile is fitted to decoding steps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest

from data_gen import timing
from data_gen.decoding.loop import Chooser, Step
from data_gen.models.pair import ModelPair
from data_gen.timing import BETWEEN, fitted, late_drafts, plain_alone, real_steps, rounds, times
from selector.actions import EMPTY, Action
from selector.latency import Correction, LatencyProfile
from selector.tables import Table
from tests.selector.synthetic import profile

TREES = [Action(*shape) for shape in ((1, 1, 0), (1, 4, 0), (1, 8, 8), (2, 0, 2), (2, 4, 4), (4, 0, 8), (3, 8, 1))]


def steps_of(truth: LatencyProfile, name: str, action: Action) -> list[Step]:
    """Three steps of which one met a slow moment of the machine."""
    return [
        Step(length, action, 0, 1 + action.nodes, {"draft": factor * truth.action_seconds(action, length, name)})
        for length, factor in ((30, 1.0), (31, 1.0), (32, 9.0))
    ]


def test_what_steps_take_beyond_the_tables_is_found_for_every_verifier() -> None:
    table = profile().verify["traversal"]
    base = replace(profile(), verify={"traversal": table, "block": table})
    wanted = {"traversal": Correction(3e-4, -1e-4, 2e-4, 5e-4), "block": Correction(3e-4, -1e-4, 2e-4, -6e-4)}
    truth = replace(base, step=2e-4, corrections=wanted)
    steps = {(name, a): steps_of(truth, name, a) for name in wanted for a in (EMPTY, *TREES)}
    found = fitted(replace(base, step=0.0), steps)
    for name, correction in wanted.items():
        assert found.corrections[name] == pytest.approx(correction, rel=1e-2, abs=2e-6)  # lengths differ by a token
    for (name, action), taken in steps.items():
        predicted, measured = times(found, name, action, taken)
        assert predicted == pytest.approx(measured, rel=3e-3)
    unfitted = [times(base, name, action, taken) for (name, action), taken in steps.items()]
    assert max(abs(predicted / measured - 1) for predicted, measured in unfitted) > 0.05


def test_copied_chains_take_what_real_steps_say() -> None:
    """All of them longer by the same, whatever their verification took when it was timed alone."""
    base = replace(profile(), step=0.0, copied=Table([1, 16], [1], [[1e-4], [4e-4]]))
    truth = replace(base, copied=Table([1, 16], [1], [[8e-4], [11e-4]]))
    steps = {("traversal", a): steps_of(truth, "traversal", a) for a in (EMPTY, *TREES, *map(Action.copy, (4, 16)))}
    found = fitted(base, steps)
    for length in (1, 4, 10, 16):
        assert found.copied.at(length, 1) == pytest.approx(truth.copied.at(length, 1), rel=1e-6)
    unmet = fitted(base, {key: taken for key, taken in steps.items() if not key[1].copies})
    assert unmet.copied == base.copied


PROMPTS = [[5, 17, 203, 44, 91, 5, 17], [7, 8, 9]]
MET = (EMPTY, Action(1, 3, 0), Action(2, 1, 2), Action.copy(4))


def test_every_tree_has_its_steps(pair: ModelPair) -> None:
    """Of each text so many, after the first one; of lookups those that copy."""
    ticks: list[None] = []
    asked = [*product(("specinfer", "traversal"), MET)], PROMPTS
    steps = real_steps(pair, *asked, count=5, tokens=100, tick=lambda: ticks.append(None))
    assert len(ticks) == rounds(*asked) > 0
    for (_, action), taken in steps.items():
        assert len(taken) == 10 or (action == Action.copy(4) and 0 < len(taken) <= 10)
        assert {step.action for step in taken} == {action}
        assert all(step.nodes == 5 for step in taken) or action != Action.copy(4)
        assert all(step.length > 3 and sum(step.seconds.values()) > 0 for step in taken)
    short = real_steps(pair, [("traversal", action) for action in MET], PROMPTS, count=5, tokens=2)
    assert len(short["traversal", EMPTY]) == 2  # the second token of each text


def test_a_plain_step_is_timed_after_another_and_after_one_that_drafts(
    pair: ModelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft's passes take time of the next step: here as the machine's caches do, but exactly."""
    ran: list[Action] = []

    def steps(
        pair: ModelPair, verifier: str, chooser: Chooser, prompt: list[int], limit: int, seed: int
    ) -> Iterator[Step]:
        for _ in range(10):
            action = chooser.select(None)
            assert action is not None
            seconds = 3.0 if action == EMPTY and ran[-1] != EMPTY else 2.0
            ran.append(action)
            yield Step(30, action, 0, 1 + action.nodes, {"target": seconds})

    monkeypatch.setattr(timing, "steps_of", steps)
    assert plain_alone(pair, "traversal", PROMPTS, 4, 100) == pytest.approx(-1.0)
    assert ran == [BETWEEN, EMPTY, EMPTY] * 8
    assert plain_alone(pair, "traversal", [], 4, 100) == 0.0


def test_a_draft_is_timed_after_each_number_of_plain_steps(pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a draft takes longer by the tokens that it missed, exactly, and by the text's length, as the first draft of
    a decoding, and after another decoding's step. Where times fall, the table has their mean."""
    extra = {0: 0.0, 1: -0.5, 4: 2.0, 16: 1.0}
    latest: list[object] = [None]

    def steps(
        pair: ModelPair, verifier: str, chooser: Chooser, prompt: list[int], limit: int, seed: int
    ) -> Iterator[Step]:
        mine, missed, first = object(), 0, True
        for _ in range(limit):
            action = chooser.select(None)
            assert action is not None
            seconds = 1.0
            if action == BETWEEN:
                seconds = 2.0 + len(prompt) + extra[missed] + 9 * first + 5 * (latest[0] is not mine)
                missed, first = 0, False
            else:
                missed += 1
            latest[0] = mine
            yield Step(30, action, 0, 1 + action.nodes, {"draft": seconds})

    monkeypatch.setattr(timing, "steps_of", steps)
    late = late_drafts(pair, "traversal", PROMPTS, 6, 60)
    assert [late.at(0, tokens) for tokens in (0, 1, 2, 3, 4, 8, 12, 40)] == [0, 0, 0.5, 1, 1.5, 1.5, 1.5, 1.5]
    assert late_drafts(pair, "traversal", PROMPTS, 6, 24).sizes == [0, 1, 4]  # no second draft after 16 others
    for nothing in (late_drafts(pair, "traversal", [], 6, 60), late_drafts(pair, "traversal", PROMPTS, 6, 5)):
        assert nothing.at(0, 16) == 0.0


def test_plain_decoding_has_a_time_of_its_own() -> None:
    """Where nothing decides, so that nothing is ever drafted; not at a root where a selector drafts nothing."""
    own = replace(profile(), plain=-2e-3)
    for action in (EMPTY, Action(1, 4, 0), Action.copy(4)):
        for levels in ((), ("match",), ("early",)):
            change = own.action_seconds(action, 30, "traversal", levels) - profile().action_seconds(
                action, 30, "traversal", levels
            )
            assert change == pytest.approx(-2e-3 if action == EMPTY and not levels else 0.0, abs=1e-12)
