"""The lock of a run's folder: one command at a time, whatever ended the one before, and no file elsewhere."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from pipelines.cli import only_one
from selector.schema import InputError
from tests.pipelines.runs import environment
from tests.pipelines.test_refusals import failure

FOLDER = Path("runs/demo")
KILLED = """
import os, signal
from pathlib import Path
from pipelines.cli import only_one

with only_one(Path("runs/demo")):
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_two_commands_exclude_each_other_and_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "temp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temp"))
    with only_one(FOLDER):
        for _ in range(2):  # a refused command does not remove the other one's lock
            with pytest.raises(InputError, match=r"^runs/demo: another espalier is at work there"), only_one(FOLDER):
                pass
        with only_one(Path("runs/other")):
            pass
    assert [path.name for path in tmp_path.rglob("*")] == ["temp"]


def test_the_files_of_a_run_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with only_one(FOLDER):
        (FOLDER / "latency.json").write_text("{}")
    assert [path.name for path in FOLDER.iterdir()] == ["latency.json"]


def test_a_killed_command_leaves_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert subprocess.run([sys.executable, "-c", KILLED], env=environment()).returncode == -signal.SIGKILL
    with only_one(FOLDER):
        pass
    assert not list(FOLDER.iterdir())


@pytest.mark.parametrize("what", ["link", "folder"])
def test_something_else_in_the_place_of_the_lock(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    FOLDER.mkdir(parents=True)
    if what == "link":
        Path("secret").write_text("stays")
        os.symlink(tmp_path / "secret", FOLDER / ".lock")
    else:
        (FOLDER / ".lock").mkdir()
    message = failure(capsys, monkeypatch, "report")
    assert message == "espalier: runs/demo/.lock: a link or a folder is where the run's lock belongs: remove it"
    assert what == "folder" or Path("secret").read_text() == "stays"
