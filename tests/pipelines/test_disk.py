"""A disk that is full, or not ours to write to: one line with the path and what to do, and then the same command."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from pipelines.run import Journal
from selector.schema import InputError
from tests.pipelines.runs import SMALL, espalier, outcome, patch

ADVICE = "make room there, or make it writable; the same command then goes on"
STORE = "mend that, or set MLFLOW_TRACKING_URI to another store; the same command then goes on"


def full_from(name: str, most: int) -> None:
    """Once a function is called, no file grows beyond so many bytes: the nearest thing to a full disk for a process."""

    def limiting(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, resource.RLIM_INFINITY))
            return function(*arguments, **named)

        return call

    patch(name, limiting)


def refused(folder: Path, stage: str, at: str, most: int = 4000) -> str:
    """The last line of a stage whose disk is full from some point on; before it may stand what was found so far."""
    code, said = outcome(folder, stage, *SMALL, prepare=partial(full_from, at, most))
    *before, line = said.strip().splitlines()
    assert code == 2 and "Traceback" not in said, said
    assert not any(earlier.startswith("espalier: ") for earlier in before)
    return line


@pytest.fixture
def copy(demo: tuple[Path, str], tmp_path: Path) -> Path:
    """A folder with the finished run, and MLflow's store."""
    for name in ("runs", "mlruns"):
        shutil.copytree(demo[0] / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(
    ("stage", "output", "at", "most", "named"),
    [
        ("latency", "latency.json", "pipelines.latency.stage.write_json", 4000, "runs/demo/latency.json.tmp: "),
        # whose end Lightning, too, would like to record
        ("train", "training", "pytorch_lightning.Trainer.save_checkpoint", 30_000, "sqlite:///mlruns/mlflow.db: "),
        ("export", "selector", "selector.export.write.torchscript", 4000, "runs/demo/selector.tmp: "),
        ("report", "report.html", "pipelines.report.stage.page", 4000, "runs/demo/report.html.tmp: "),
    ],
)
def test_a_full_disk_under_the_run(copy: Path, stage: str, output: str, at: str, most: int, named: str) -> None:
    run = copy / "runs" / "demo"
    shutil.rmtree(run / output) if (run / output).is_dir() else (run / output).unlink()
    line = refused(copy, stage, at, most)
    assert line.startswith(f"espalier: {named}") and line.endswith((ADVICE, STORE)), line
    espalier(copy, stage, *SMALL)
    assert (run / output).exists()


def test_a_full_disk_under_the_store_of_mlflow(copy: Path) -> None:
    (copy / "runs" / "demo" / "report.html").unlink()
    line = refused(copy, "report", "pipelines.tracking.parameters")
    assert line.startswith("espalier: sqlite:///mlruns/mlflow.db: MLflow's store fails: ") and line.endswith(STORE)
    espalier(copy, "report", *SMALL)


def test_a_full_disk_under_the_journal(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "parts.jsonl", {})
    journal.path = Path("/dev/full")
    with pytest.raises(InputError, match=r"^/dev/full: cannot be written: No space left on device; make room"):
        journal.add([1])
    assert journal.entries == []


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nothing can be written in a folder; permissions do not bind root, an immutable folder does."""
    if os.geteuid():
        folder.chmod(0o555)
    elif not shutil.which("chattr") or subprocess.run(["chattr", "+i", folder], capture_output=True).returncode:
        pytest.skip("this file system has no immutable folders, and permissions do not bind root")
    try:
        yield
    finally:
        folder.chmod(0o755) if os.geteuid() else subprocess.run(["chattr", "-i", folder], check=True)


@pytest.mark.parametrize(
    ("folder", "named"),
    [
        ("runs/demo", "runs/demo/.lock: cannot be written: "),
        ("mlruns", "sqlite:///mlruns/mlflow.db: MLflow's"),
    ],
)
def test_a_folder_that_is_read_only(copy: Path, folder: str, named: str) -> None:
    (copy / "runs" / "demo" / "report.html").unlink()
    with read_only(copy / folder):
        code, said = outcome(copy, "report", *SMALL)
    line = said.strip().splitlines()[-1]
    assert code == 2 and "Traceback" not in said, said
    assert line.startswith(f"espalier: {named}") and line.endswith((ADVICE, STORE))
    espalier(copy, "report", *SMALL)
