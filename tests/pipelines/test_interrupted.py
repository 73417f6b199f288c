"""Ctrl-C and kill -9 in every stage: the same command goes on, and what was there stays."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.runs import SMALL, espalier, outcome, patch

INTERRUPTED = "espalier: interrupted; the same command goes on"


def at_call(name: str, number: int, signum: int) -> None:
    """The process gets a signal when a function is called for the `number`-th time."""
    calls = 0

    def signalling(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signum)
            return function(*arguments, **named)

        return call

    patch(name, signalling)


def stopped(folder: Path, signum: int, stage: str, *arguments: str, at: str, call: int = 1) -> None:
    """Start a stage, send it a signal at some point of its work, and check how it ends."""
    code, output = outcome(folder, stage, *arguments, prepare=partial(at_call, at, call, signum))
    assert "Traceback" not in output
    assert (code == 130 and INTERRUPTED in output) if signum == signal.SIGINT else code == -signum, output


@pytest.fixture
def copy(demo: tuple[Path, str], tmp_path: Path) -> Path:
    """A folder with the finished run, and MLflow's store."""
    for name in ("runs", "mlruns"):
        shutil.copytree(demo[0] / name, tmp_path / name)
    return tmp_path


SIGNALS = (signal.SIGINT, signal.SIGKILL)


def test_the_latency_stage_is_run_again(copy: Path) -> None:
    profile, fewer = copy / "runs" / "demo" / "latency.json", [*SMALL, "latency.repeats=4"]
    before = profile.read_bytes()
    stopped(copy, signal.SIGINT, "latency", *fewer, at="pipelines.latency.stage.decision_seconds")
    assert "latency: reusing" in espalier(copy, "latency", *SMALL)  # nothing was touched so far
    stopped(copy, signal.SIGKILL, "latency", *fewer, at="pipelines.latency.stage.write_json")
    assert profile.read_bytes() == before
    code, output = outcome(copy, "train", *SMALL)  # whose profile that is, is not known any more
    assert code == 2 and output == "espalier: runs/demo: the latency stage is not finished: run it again\n"
    espalier(copy, "latency", *fewer)
    assert profile.read_bytes() != before and "latency: reusing" in espalier(copy, "latency", *fewer)


def test_the_data_stage_goes_on_and_ends_with_the_same_bytes(demo: tuple[Path, str], copy: Path) -> None:
    traces = copy / "runs" / "demo" / "traces"
    shutil.rmtree(traces)
    for signum, there in zip(SIGNALS, (2, 3), strict=True):
        stopped(copy, signum, "data", *SMALL, at="data_gen.traces.TraceStore.write", call=there)
    assert len(list(traces.rglob("part-*.parquet"))) == 3
    espalier(copy, "data", *SMALL)
    for shard in (demo[0] / "runs" / "demo" / "traces").rglob("part-*.parquet"):
        assert (copy / shard.relative_to(demo[0])).read_bytes() == shard.read_bytes()


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_training_that_is_stopped_leaves_the_earlier_one(copy: Path, signum: int) -> None:
    earlier = copy / "runs" / "demo" / "training"
    before = {path: path.read_bytes() for path in earlier.rglob("*") if path.is_file()}
    batch = "pipelines.train.fitting.StopBetweenBatches.on_train_batch_start"
    stopped(copy, signum, "train", *SMALL, "train.epochs=3", at=batch, call=4)
    assert before == {path: path.read_bytes() for path in earlier.rglob("*") if path.is_file()}
    assert "train: reusing" in espalier(copy, "train", *SMALL)


def test_an_evaluation_goes_on(copy: Path) -> None:
    run = copy / "runs" / "demo"
    (run / "evaluation.json").unlink()
    longer = [*SMALL, "evaluate.prompts=4"]
    journal = run / "evaluation.partial.jsonl"
    for signum, there in zip(SIGNALS, (2, 3), strict=True):
        stopped(copy, signum, "evaluate", *longer, at="pipelines.run.Journal.add", call=2)
        assert len(journal.read_text().splitlines()) == there  # a header, and a prompt each time
    header, first, *others = journal.read_text().splitlines()
    rows = json.loads(first)
    for row in rows:
        row["tokens"] += 10**9
    journal.write_text("\n".join([header, json.dumps(rows), *others]) + "\n")
    espalier(copy, "evaluate", *longer)
    assert not journal.exists()
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert {entry["prompts"] for entry in evaluation["methods"]} == {4}
    setting = rows[0]["temperature"]
    for entry in evaluation["methods"]:  # what stood in the journal was not decoded anew
        assert (entry["tokens"] > 10**9) == (entry["temperature"] == setting)


@pytest.mark.parametrize(
    ("stage", "output", "at"),
    [
        ("export", "selector/config.json", "pipelines.export.stage.register"),
        ("report", "report.html", "pipelines.report.stage.page"),
    ],
)
def test_a_short_stage_is_run_again(copy: Path, stage: str, output: str, at: str) -> None:
    path = copy / "runs" / "demo" / output
    path.unlink()
    for signum in SIGNALS:
        stopped(copy, signum, stage, *SMALL, at=at)
    assert f"{stage}: reusing" not in espalier(copy, stage, *SMALL)
    assert path.exists() and f"{stage}: reusing" in espalier(copy, stage, *SMALL)
