"""What one clock has decoded, another machine's clock need not decode again."""

from __future__ import annotations

from dataclasses import replace

import pytest

from data_gen.decoding import Fixed
from data_gen.models import ModelPair
from data_gen.sampling import Sampling
from pipelines.methods import Speculative, Task
from selector.actions import Action
from selector.runtime import gpu_like

SAMPLING, ACTION = Sampling(0.8), Action(2, 1, 3)


def task() -> Task:
    return Task([5, 17, 203, 44, 91], "code", 24, seed=3)


def test_a_tree_is_decoded_once_for_all_synthetic_clocks(pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = gpu_like("pair", ["traversal"], 0.2)
    wall = Speculative("static", "traversal", Fixed(ACTION), action=ACTION)
    there = replace(wall, clock="gpu_like_1/5", profile=profile)
    alone = there.decode(pair, SAMPLING, task())
    shared = task()
    measured = wall.decode(pair, SAMPLING, shared)
    monkeypatch.setattr("pipelines.methods.Decoder", None)  # nothing is decoded any more
    assert there.decode(pair, SAMPLING, shared) == alone
    assert (alone.tokens, alone.steps, alone.actions) == (measured.tokens, measured.steps, measured.actions)
    seconds = [profile.action_seconds(ACTION, length, "traversal") for length in (5, 20)]
    assert alone.seconds == pytest.approx(alone.steps * seconds[0]) and seconds[0] == seconds[1]


def test_the_clock_on_the_wall_decodes_every_time_and_another_tree_is_another_decoding(pair: ModelPair) -> None:
    shared = task()
    wall = Speculative("static", "traversal", Fixed(ACTION), action=ACTION)
    first, second = (wall.decode(pair, SAMPLING, shared) for _ in range(2))
    assert first.seconds != second.seconds and first.tokens == second.tokens
    profile = gpu_like("pair", ["traversal", "specinfer"], 0.2)
    for other in (
        Speculative("static", "specinfer", Fixed(ACTION), "there", profile),
        Speculative("static", "traversal", Fixed(Action(1, 4, 0)), "there", profile),
    ):
        assert other.decode(pair, SAMPLING, shared) == other.decode(pair, SAMPLING, task())
    assert set(shared.decoded) == {("traversal", ACTION), ("specinfer", ACTION), ("traversal", Action(1, 4, 0))}


def test_the_nucleus_is_paid_for_where_top_p_cuts(pair: ModelPair) -> None:
    profile = replace(gpu_like("pair", ["traversal"], 0.2), nucleus=1e-3)
    there = Speculative("static", "traversal", Fixed(ACTION), "there", profile)
    for sampling in (SAMPLING, Sampling(0.8, 0.9)):
        found = there.decode(pair, sampling, task())
        each = profile.action_seconds(ACTION, 5, "traversal", filtered=sampling.top_p < 1)
        assert found.seconds == pytest.approx(found.steps * each)
