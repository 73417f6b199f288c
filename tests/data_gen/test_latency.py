"""The latency profile is fitted to decoding steps."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice, pairwise, product, repeat
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from data_gen import timing
from data_gen.decoding.loop import Step
from data_gen.models.pair import ModelPair
from data_gen.timing import (
    BURST,
    LAGS,
    NODES,
    WIDTHS,
    Sample,
    bursts,
    fitted,
    real_steps,
    samples_of,
    times,
)
from selector.actions import EMPTY, Action
from selector.latency import LatencyProfile, Verification
from selector.tables import Table
from tests.selector.synthetic import profile

TREES = [
    (1, 1, 0),
    (1, 2, 0),
    (1, 4, 0),
    (1, 8, 0),
    (1, 8, 8),
    (2, 0, 2),
    (2, 4, 4),
    (3, 8, 1),
    (4, 0, 8),
]
ACTIONS = [EMPTY, *map(Action.of, [*TREES, (4, 8, 4), (4, 8, 8)]), *map(Action.copy, (2, 4, 8, 16))]
OTHERS = [Action.of(shape) for shape in ((1, 3, 0), (1, 8, 4), (2, 2, 5), (3, 1, 6), (4, 4, 4))]
LENGTHS = (50, 150, 400)
PROMPTS = [[5, 17, 203, 44, 91, 5, 17], [7, 8, 9]]
MET = (EMPTY, Action(1, 3, 0), Action(2, 1, 2), Action.copy(4))


def true_profile() -> LatencyProfile:
    """Of the kind that can be fitted exactly: contexts take a time of their own, whatever the
    size."""

    def table(knots: tuple[int, ...], first: float, further: float, context: float) -> Table:
        rows = [
            [first + further * (size - 1) ** 0.7 + context * length for size in knots]
            for length in LENGTHS
        ]
        return Table([*LENGTHS], [*knots], rows)

    return replace(
        profile(),
        target=table(NODES, 20e-3, 2e-3, 1e-6),
        draft=table(WIDTHS, 3e-3, 1e-3, 2e-6),
        verify={"traversal": Verification(2e-4, 1e-3), "block": Verification(1e-4, 2e-3)},
        drafting=Table.constant(1e-3),
        lag=Table([0], [*LAGS], [[0.0, 1e-3, 2e-3, 4e-3]]),
    )


def samples(
    truth: LatencyProfile, actions: list[Action], lag: tuple[int, ...] = LAGS
) -> Iterator[Sample]:
    """In every context; of ten alike one met a slow moment of the machine."""
    for name, action, length, missed in product(truth.verify, actions, (60, 140, 390), lag):
        if missed == 0 or action.drafts:
            seconds = truth.action_seconds(action, length, name) + truth.lag.at(0, missed)
            for factor in [1.0] * 9 + [5.0]:
                step = Step(length, action, 0, 1 + action.nodes, {"draft": factor * seconds})
                yield Sample(name, step, missed)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A pair of which a fit needs little."""
    monkeypatch.setattr(timing, "known_weights_of", lambda model: "")
    named = {"fingerprint": "pair", "target": None, "draft": None, "vocabulary": 8}
    return SimpleNamespace(device=torch.device("cpu"), **named)


def test_the_times_of_other_steps_follow_from_those_that_were_timed(small: Any) -> None:
    truth = true_profile()
    fit = fitted(small, samples(truth, ACTIONS), LENGTHS, "here")
    for name, action, length in product(truth.verify, ACTIONS + OTHERS, (60, 200, 390)):
        seconds = fit.action_seconds(action, length, name)
        assert seconds == pytest.approx(truth.action_seconds(action, length, name), rel=1e-3), (
            name,
            action,
        )
    assert [fit.lag.at(0, tokens) for tokens in LAGS] == pytest.approx(
        [0.0, 1e-3, 2e-3, 4e-3], rel=1e-3
    )
    predicted, measured = times(fit, [*samples(truth, OTHERS[:1], (0,))][:10])
    assert predicted == pytest.approx(measured, rel=3e-3)
    assert set(fit.verify) == {"traversal", "block"} and fit.device == "here"


def test_times_never_fall_with_the_size(small: Any) -> None:
    """Whatever the noise of the measurements."""
    factors = random.Random(0)
    noisy = [
        sample._replace(
            step=replace(
                sample.step, seconds={"draft": sample.step.total * factors.uniform(0.5, 1.5)}
            )
        )
        for sample in samples(true_profile(), ACTIONS)
    ]
    fit = fitted(small, noisy, LENGTHS, "here")
    for table in (fit.target, fit.draft, fit.lag):
        for row in table.seconds:
            assert row == sorted(row) and row[0] >= 0


def test_every_case_has_its_steps(pair: ModelPair) -> None:
    """Of lookups those that copy; the first step of a burst only where the draft lags."""
    ticks: list[None] = []
    cases = [*product(("specinfer", "traversal"), MET)]
    steps = real_steps(pair, cases, PROMPTS, 200, 300, tick=lambda: ticks.append(None))
    assert len(ticks) == len(steps) >= 300
    assert {(sample.verifier, sample.step.action) for sample in steps} >= {
        case for case in cases if not case[1].copies
    }
    for verifier, step, lag in steps:
        assert step.nodes == 5 or step.action != Action.copy(4)
        assert lag == 0 or step.action.drafts
        assert step.length > 3 and step.total > 0 and verifier in ("specinfer", "traversal")
    assert any(lag for *_, lag in steps)
    few = real_steps(pair, cases, PROMPTS, 200, 1)
    assert len(few) < 3 * BURST * len(cases)  # all texts together take each in turn
    assert {(sample.verifier, sample.step.action) for sample in few} >= {
        case for case in cases if not case[1].copies
    }


@pytest.mark.parametrize("longest", [30, 200])
def test_texts_begin_anew_before_they_are_long(longest: int, pair: ModelPair) -> None:
    steps = samples_of(pair, "traversal", repeat(EMPTY), [7, 8, 9], longest, 0)
    lengths = [sample.step.length for sample in islice(steps, 300)]
    assert (
        max(lengths) < min(longest, 3 + timing.GROWN)
        and sum(b < a for a, b in pairwise(lengths)) > 1
    )


def test_actions_are_drafted_in_bursts() -> None:
    coming = bursts(MET, random.Random(0))
    drawn = [[*islice(coming, BURST)] for _ in range(3 * len(MET))]
    assert sorted(burst * BURST for burst in map(list, zip(MET * 3))) == sorted(drawn)
