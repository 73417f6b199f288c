"""Decisions that traces promise to pay, tried in decoding."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from data_gen.models import ModelPair
from pipelines.config import load_config
from pipelines.confirm import Trial
from selector.actions import EMPTY, Action
from selector.latency import LatencyProfile, Table
from selector.modes import Judged
from selector.runtime import Mode
from tests.selector.synthetic import Traces, module, profile

ROOT = Path(__file__).parents[2]
PROFILE = profile()
WIDTHS = [32, 32, 32]  # the pair's
SHORT, HUGE = Action(1, 1, 0), Action(4, 8, 8)
NEVER, ALWAYS = 1e9, 1e-9  # tokens a second is charged at: nothing is drafted then, or as much as there is


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory, pair: ModelPair) -> Trial:
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = ({"text": f"the quick brown fox number {n} jumps over", "source": f"file {n // 2}"} for n in range(80))
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    overrides = [f"prompts.file={prompts}", "prompts.tokens=8", "data.tokens=12", "train.confirm=4"]
    return Trial(load_config(ROOT / "configs" / "demo.yaml", overrides), pair)


def ways(static: Action, gain: float, ratio: float = 1.5, error: float = 0.1) -> list[Judged]:
    """Decisions at the root that the traces promise so much of, and none."""
    mode = Mode(1.0, 1.0, static, False, False, gain)
    return [Judged(replace(mode, at_root=True), ratio, error, {}), Judged(mode, 1.0, 0.0, {})]


def confirmed(trial: Trial, judged: list[Judged], times: LatencyProfile = PROFILE) -> list[Judged]:
    traces = Traces(64, WIDTHS)
    traces.profile = times
    (result,) = trial.confirmed(module("regressor", widths=WIDTHS), traces, [judged])  # type: ignore[arg-type]
    return result


def test_what_decoding_confirms_is_kept(trial: Trial) -> None:
    """Where many tokens are very dear to verify, nothing at all is faster than a tree of 40."""
    dear = replace(PROFILE, target=Table([10, 100], [1, 33], [[0.005, 0.5], [0.005, 0.5]]))
    kept, static = confirmed(trial, ways(HUGE, NEVER), dear)
    assert kept.mode.at_root and kept.decoded is not None and kept.decoded.prompts == 4
    assert kept.decoded.ratio > 2
    assert kept.assured == kept.decoded.ratio - kept.decoded.error
    assert kept.row()["decoded"]["ratio"] == kept.decoded.ratio
    assert static.decoded is None and static.assured == 1


def test_what_decoding_refutes_is_dropped(trial: Trial) -> None:
    kept, dropped = confirmed(trial, ways(SHORT, ALWAYS))
    assert kept.static
    assert dropped.decoded is not None and dropped.decoded.ratio < 1 < dropped.ratio - 2 * dropped.error


def test_the_ratio_is_that_of_times_per_token(trial: Trial) -> None:
    """Without a draft every token takes one step, whose time is known."""
    static, never = (PROFILE.action_seconds(EMPTY, 20, "traversal", at_root) for at_root in (False, True))
    (kept, dropped) = confirmed(trial, ways(EMPTY, NEVER))
    assert kept.static and dropped.decoded is not None
    assert dropped.decoded.ratio == pytest.approx(static / never, rel=0.05)  # lengths differ a little


def test_what_is_not_promised_is_not_tried(trial: Trial) -> None:
    judged = ways(HUGE, NEVER, ratio=1.1, error=0.06)[::-1]
    assert confirmed(trial, judged) == judged


def test_it_can_be_turned_off(trial: Trial) -> None:
    train = trial.config.train.model_copy(update={"confirm": 0})
    off = Trial(trial.config.model_copy(update={"train": train}), trial.pair)
    judged = ways(SHORT, ALWAYS)
    assert confirmed(off, judged) == judged
