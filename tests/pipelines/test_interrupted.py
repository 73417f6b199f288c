"""Ctrl-C in every long stage: the same command goes on, and what was there stays."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import time
from pathlib import Path

from tests.pipelines.runs import SMALL, command, environment, espalier


def interrupted(folder: Path, stage: str, *arguments: str, once: str, lines: int = 0) -> None:
    """Start a stage, press Ctrl-C as soon as a file matching `once` has so many lines, and check how it ends."""
    process = subprocess.Popen(
        command(stage, *arguments),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a background job of a shell ignores SIGINT, and would hand that down
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )

    def there() -> bool:
        found = (folder / "runs").rglob(once)
        return any(lines == 0 or len(file.read_text().splitlines()) >= lines for file in found)

    while not there():
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate()
    assert process.returncode == 130, error
    assert "espalier: interrupted; the same command goes on" in error
    assert "Traceback" not in error


def test_an_interrupted_data_stage_goes_on_and_ends_with_the_same_bytes(demo: tuple[Path, str], tmp_path: Path) -> None:
    traces = demo[0] / "runs" / "demo" / "traces"
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    for part in ("pair", "stages"):
        shutil.copytree(demo[0] / "runs" / "demo" / part, tmp_path / "runs" / "demo" / part)
    (tmp_path / "runs" / "demo" / "stages" / "data.json").unlink()
    interrupted(tmp_path, "data", *SMALL, once="part-*.parquet")
    finished = list((tmp_path / "runs" / "demo" / "traces").rglob("part-*.parquet"))
    assert len(finished) < len(list(traces.rglob("part-*.parquet")))
    espalier(tmp_path, "data", *SMALL)
    for shard in traces.rglob("part-*.parquet"):
        copy = tmp_path / shard.relative_to(demo[0])
        assert copy.read_bytes() == shard.read_bytes()


def test_an_interrupted_training_leaves_the_earlier_one(demo: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(demo[0] / "runs", tmp_path / "runs")
    earlier = tmp_path / "runs" / "demo" / "training"
    before = {path: path.read_bytes() for path in earlier.rglob("*") if path.is_file()}
    endless = [*SMALL, "train.epochs=100000"]
    interrupted(tmp_path, "train", *endless, once="training.tmp/*/best.ckpt")
    assert before == {path: path.read_bytes() for path in earlier.rglob("*") if path.is_file()}
    assert "train: reusing" in espalier(tmp_path, "train", *SMALL)


def test_an_interrupted_evaluation_goes_on(demo: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(demo[0] / "runs", tmp_path / "runs")
    run = tmp_path / "runs" / "demo"
    (run / "evaluation.json").unlink()
    longer = [*SMALL, "evaluate.prompts=6", "evaluate.assisted=false"]
    journal = run / "evaluation.partial.jsonl"
    interrupted(tmp_path, "evaluate", *longer, once=journal.name, lines=3)  # a header, and two prompts
    header, first, *others = journal.read_text().splitlines()
    rows = json.loads(first)
    for row in rows:
        row["tokens"] += 10**9
    journal.write_text("\n".join([header, json.dumps(rows), *others]) + "\n")
    espalier(tmp_path, "evaluate", *longer)
    assert not journal.exists()
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert {entry["prompts"] for entry in evaluation["methods"]} == {6}
    setting = rows[0]["temperature"]
    for entry in evaluation["methods"]:  # what stood in the journal was not decoded anew
        assert (entry["tokens"] > 10**9) == (entry["temperature"] == setting)


def test_an_interrupted_pair_stage_ends_with_the_same_weights(demo: tuple[Path, str], tmp_path: Path) -> None:
    interrupted(tmp_path, "pair", *SMALL, once="pair/models/target/config.json")
    espalier(tmp_path, "pair", *SMALL)
    for role in ("target", "draft"):
        name = Path("runs", "demo", "pair", "models", role, "model.safetensors")
        assert (tmp_path / name).read_bytes() == (demo[0] / name).read_bytes()
