"""Requests that come and go: an engine that serves them one after another, and one in which they
meet."""

from __future__ import annotations

import numpy as np
import pytest

from selector.files import Array
from selector.latency import StepTimes
from selector.train.arrivals import Choose, Engine, Load, Served
from selector.train.mixed import step_seconds
from tests.selector import logged

DATA = logged.timed(count=4)
CHAIN = DATA.space.index(DATA.space.chain(2))


def always(action: int, deciding: float = 0.0) -> Choose:
    def choose(root_B: Array, length: float, times: StepTimes) -> tuple[Array, float]:
        return np.full(len(root_B), action), deciding

    return choose


def served(arrived: list[float], most: int = 8, choose: Choose | None = None) -> Served:
    engine = Engine(DATA, logged.profile(), most)
    load = Load(np.array(arrived), np.arange(len(arrived)) % len(DATA.texts))
    return engine.serve(load, choose or always(CHAIN))


def alone(text: int) -> float:
    """The seconds of a text by itself: its prompt's pass, and each step by its own length."""
    times = logged.profile().step_times(1)
    begin = int(DATA.texts.size_X[:text].sum())
    root, end = begin, begin + int(DATA.texts.size_X[text])
    length_R = DATA.texts.length_R.tolist()
    seconds = times.prices(length_R[begin], 1)[0] * length_R[begin]
    while root < end:
        seconds += step_seconds(times, float(length_R[root]), 2.0, 2)
        accepted = int(DATA.survivals_RS[root, : DATA.space.depth].sum())
        root += 1 + min(accepted, 2)
    return float(seconds)


@pytest.mark.parametrize("most", [1, 8])
def test_requests_far_apart_take_as_long_as_each_alone(most: int) -> None:
    outcome = served([0.0, 1000.0, 2000.0], most)
    np.testing.assert_allclose(outcome.latency_N, [alone(0), alone(1), alone(2)])
    assert outcome.requests == 1
    assert outcome.speed == pytest.approx(int(DATA.texts.size_X[:3].sum()) / (2000 + alone(2)))


def test_one_place_makes_the_later_ones_wait() -> None:
    outcome = served([0.0, 0.0, 0.0], most=1)
    np.testing.assert_allclose(outcome.latency_N, np.cumsum([alone(0), alone(1), alone(2)]))


def test_requests_that_meet_share_steps_and_decisions_are_charged() -> None:
    together, apart = served([0.0] * 4), served([0.0] * 4, most=1)
    assert together.requests > 2 and together.speed > apart.speed
    slow = served([0.0] * 4, choose=always(CHAIN, deciding=1.0))
    steps = slow.seconds - together.seconds  # of a second each
    assert steps > 4 and steps == pytest.approx(round(steps))
