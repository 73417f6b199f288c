"""An engine's own step times, read into a profile with a batch axis; and the step times of pairs
without their weights."""

from __future__ import annotations

import importlib
import json
import statistics
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from pipelines.config import Config
from pipelines.latency.timings import (
    misfit,
    profile_of,
    read_timings,
    run,
    stage_of,
    unsteady,
)
from selector.actions import EMPTY, ActionSpace
from selector.latency import MOST_TOKENS, LatencyProfile
from selector.schema import InputError
from selector.train.mixed import step_seconds
from tests.checks import one_line
from tests.pipelines.gpus import (
    BATCHES,
    CONTEXT,
    VERIFIED,
    Seconds,
    flat,
    read,
    step,
    stepped,
    timings,
)
from tests.pipelines.small_logs import recorded, seconds_of
from tests.selector.synthetic import profile

SPACE = ActionSpace.default()
HEAD = "batch,context,verified,passes,seconds\n"


@pytest.mark.parametrize("seconds", [flat, stepped], ids=lambda seconds: seconds.__name__)
def test_the_profile_gives_back_every_timed_step(seconds: Seconds, tmp_path: Path) -> None:
    made = read(tmp_path, timings(seconds))
    for batch in BATCHES:
        at_size = made.at_batch(batch)
        for verified in VERIFIED:
            predicted = at_size.action_seconds(SPACE.chain(verified - 1), CONTEXT, "traversal")
            assert predicted == pytest.approx(
                step(seconds, batch, verified, verified - 1), rel=1e-6
            )


def test_a_byte_order_mark_before_the_columns_is_no_part_of_them(tmp_path: Path) -> None:
    content = timings(flat)
    assert read(tmp_path, f"\ufeff{content}").to_json() == read(tmp_path, content).to_json()


def test_sizes_between_cost_the_next_larger_one_and_beyond_the_largest_they_rise_linearly(
    tmp_path: Path,
) -> None:
    rows = [(1, 1, 10), (1, 5, 14), (4, 1, 12), (4, 5, 20), (8, 1, 16), (8, 5, 28)]
    text = HEAD + "".join(
        f"{b},100,{v},0,{ms}e-3\n{b},100,0,2,2e-3\n" for b, v, ms in rows if v == 1
    )
    text += "".join(f"{b},100,{v},0,{ms}e-3\n" for b, v, ms in rows if v > 1)
    made, linear = read(tmp_path, text), read(tmp_path, text, stepped=False)
    assert made.at_batch(3).target.at(100, 1) == pytest.approx(12e-3)
    assert linear.at_batch(3).target.at(100, 1) == pytest.approx((10 + 2 * 2 / 3) * 1e-3)
    assert made.at_batch(4).target.at(100, 2) == pytest.approx(20e-3)
    assert linear.at_batch(4).target.at(100, 2) == pytest.approx(14e-3)
    for moved in (made, linear):
        # 1 ms for each further request
        assert moved.at_batch(10).target.at(100, 1) == pytest.approx(18e-3)
        assert moved.at_batch(4).target.at(100, 7) == pytest.approx(24e-3)
        assert moved.at_batch(2).draft.at(100, 1) == pytest.approx(1e-3)
        assert moved.at_batch(1).action_seconds(EMPTY, 100, "traversal") == pytest.approx(10e-3)


def test_means_between_one_token_and_two_are_times_of_batches_in_which_some_draft(
    tmp_path: Path,
) -> None:
    rows = "8,100,1,0,0.048\n8,100,1.25,0,0.060\n8,100,2,0,0.063\n8,100,0,2,0.002\n"
    times = read(tmp_path, HEAD + rows, stepped=False).step_times(8)
    one_more_token = (times.target_LV[0, -1] - 0.048) / (MOST_TOKENS - 1)
    assert times.prices(100.0, 8)[0] == pytest.approx(one_more_token / 8)
    assert (
        float(step_seconds(times, 100.0, 0.25, 0)) == pytest.approx(0.060)
        and float(step_seconds(times, 100.0, 0.125, 0)) < 0.055
    )


def test_drafting_once_each_pass_and_verification_are_told_apart(tmp_path: Path) -> None:
    text = HEAD + "1,100,3,0,0.010\n1,100,3,2,0.0145\n1,100,3,4,0.0185\n1,100,5,4,0.0215\n"
    made = read(tmp_path, text)
    assert not misfit(read_timings(tmp_path / "timings.csv"), made)
    single = made.at_batch(1)
    assert (single.draft.at(100, 1), single.drafting.at(100, 0)) == pytest.approx((0.002, 0.0005))
    assert single.target.at(100, 3) == pytest.approx(0.010) and single.target.at(
        100, 5
    ) == pytest.approx(0.013)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\0", ""),
        ("batch,context,verified,seconds\n1,1,1,1\n", "line 2: passes: Field required"),
        (HEAD[:-1] + ",more\n1,1,1,1,1,1\n", "line 2: more: Extra inputs"),
        (HEAD, "no rows"),
        (
            HEAD + "1,100,1,0,0.01\n1,100,one,0,0.01\n",
            "line 3: verified: Input should be a valid number",
        ),
        (HEAD + "1,100,1,0\n", "line 2: seconds: Input should be a valid number"),
        (HEAD + "1,100,1,0,0.01,7\n", "line 2: a cell too many: Extra inputs"),
        (HEAD + "0,100,1,0,0.01\n", "line 2: batch: Input should be greater than 0"),
        (
            HEAD + "100000,100,1,0,0.01\n",
            "line 2: batch: Input should be less than or equal to 4096",
        ),
        (
            HEAD + f"1,1{'0' * 30},1,0,0.01\n",
            "line 2: context: Input should be less than 2147483648",
        ),
        (HEAD + "1,100,1,0,1e308\n", "line 2: seconds: Input should be less than 3600"),
        (HEAD + "1,100,1,0,0.01\n1,100,1,0,0.02\n", "line 3: the step of an earlier line again"),
        (
            HEAD + "1,100,1,0,0.01\n1,100,2,1,0.02\n",
            "batch 1, context 100: drafting cannot be told from",
        ),
        (
            HEAD + "1,100,1,0,0.02\n1,100,1,1,0.01\n",
            "batch 1, context 100: by least squares, a pass of the draft",
        ),
        (
            HEAD + "1,100,2,1,0.01\n1,100,0,1,0.01\n",
            "batch 1, context 100: by least squares, a pass of the draft",
        ),
        (HEAD + "1,100,0,1,0.01\n", "batch 1, context 100: no row verifies anything"),
    ],
)
def test_what_is_wrong_with_a_file_is_one_line_with_its_place(
    text: str, message: str, tmp_path: Path
) -> None:
    with one_line("", "timings.csv", message):
        read(tmp_path, text)


def latency_of(lines: list[dict[str, Any]], drafts: bool = True) -> LatencyProfile:
    """The profile that the stage makes of a record, whose last line is not finished."""
    path = Path("steps.jsonl")
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines) + '{"batch": 1')
    config = Config(name="traffic")
    stage = stage_of(config, "latency", path, "pair", Path("runs/traffic/latency.json"))
    run(stage, path, drafts)
    return LatencyProfile.load(Path("runs/traffic/latency.json"))


def test_recorded_steps_tell_what_steps_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also of how many requests there were none, and how sure that is; another program that takes
    the machine for a while is not part of it."""
    monkeypatch.chdir(tmp_path)
    plain = {"context": 500, "verified": 1, "passes": 0, "drafter": False}
    lines = recorded(20_000)
    for line in lines[4_000:7_000]:
        line["seconds"] *= 50
    for batch in (1, 8):
        seconds = seconds_of(batch, 500, 1, 0) - 1e-3 * batch
        lines.append({**plain, "batch": batch, "seconds": seconds})
    made = latency_of(lines)
    out = capsys.readouterr().out
    assert out.count("of the measured time") == 8 and "warning" not in out
    errors = []
    for batch, context, verified, passes in product((1, 2, 3, 8), (300, 700), (1, 1.5, 4), (0, 3)):
        if (verified > 1 or passes == 0) and verified * batch % 1 == 0:
            at_size = made.at_batch(batch)
            seconds = at_size.target.at(context, verified)
            if passes:
                seconds += at_size.drafting.at(context, 0) + passes * at_size.draft.at(context, 1)
            errors.append(seconds / seconds_of(batch, context, verified, passes) - 1)
    assert max(map(abs, errors)) < 0.05
    assert made.at_batch(8).presence == pytest.approx(8e-3, abs=2e-3)
    spread = statistics.stdev(draw.at_batch(8).target.at(500, 1) for draw in made.drawn)
    assert 0 < spread < 0.01 * seconds_of(8, 500, 1, 0)


def test_too_little_traffic_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with one_line("", "steps.jsonl: too few steps", "that draft nothing", "100 of each"):
        latency_of(recorded(500))
    with one_line("", "0 that draft with a model"):
        latency_of([line for line in recorded(9000) if not line["passes"]])
    latency_of([line for line in recorded(9000) if not line["passes"]], drafts=False)
    with one_line("", "steps.jsonl line 2: batch: Input should be greater"):
        latency_of([*recorded(1), {**recorded(1)[0], "batch": 0}])


def test_a_log_without_a_drafter_leaves_out_the_steps_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    latency_of(recorded(20_000), drafts=False)
    checks = json.loads(Path("runs/traffic/latency.json").read_text())["check"]
    ratios = [check["ratio"] for check in checks if check["action"].endswith(", drafting")]
    assert len(ratios) == 4 and max(abs(ratio - 1) for ratio in ratios) < 0.06


def test_a_profile_with_batches_survives_the_file_and_one_of_a_single_request_has_none(
    tmp_path: Path,
) -> None:
    made = read(tmp_path, timings(stepped, (1, 8)))
    (path := tmp_path / "latency.json").write_text(json.dumps(made.to_json()))
    assert LatencyProfile.load(path) == made
    single = profile()
    assert "batches" not in single.to_json() and single.at_batch(1) == single
    with pytest.raises(InputError, match="times of one request alone"):
        single.at_batch(8)


def test_predictions_that_miss_the_measured_steps_are_noticed() -> None:
    near, far = ([{"ratio": 1 + sign * share} for sign in (1, -1)] for share in (0.08, 0.16))
    assert unsteady([]) == unsteady(near) == ""
    assert unsteady([*near, *far]).startswith("predicted step times are 12% away")


def test_the_step_times_of_a_pair_need_no_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "docs" / "examples" / "engines")
    clocks = importlib.import_module("clocks")
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 6,
        "vocab_size": 90,
        "head_dim": 8,
    }
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    gemma = {
        "gemma": tuple(sizes_of | sizes for sizes_of in clocks.PAIRS["gemma3-27b_gemma3-270m"])
    }
    for name, value in {
        "PAIRS": gemma,
        "BATCHES": (1, 2),
        "CONTEXTS": (2048,),
        "VERIFIED": (1, 4),
    }.items():
        monkeypatch.setattr(clocks, name, value)
    clocks.main(tmp_path, "cpu", torch.float32)
    rows = read_timings(tmp_path / "cpu_gemma.csv")
    made = profile_of(rows, "gemma", False, "pair", ["traversal"])
    # how well the profile fits them depends on what else the machine does
    assert len(rows) == 6 and made.batches is not None and made.batches.sizes == [1, 2]
