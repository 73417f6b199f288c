"""One finished run for the whole test session, which the tests of this folder copy before they
change it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from tests.pipelines.runs import SMALL, espalier


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Its folder, and what it said. All workers share one; the first that asks for it makes it."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "demo"
    output_path = folder / "said.txt"
    with FileLock(f"{folder}.lock"):
        if not output_path.exists():
            folder.mkdir()
            output_path.write_text(espalier(folder, "demo", *SMALL))
    return folder, output_path.read_text()


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder, the working directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def store(inside: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A store of MLflow in it for stages in this process, by its absolute path: MLflow keeps
    relative ones."""
    uri = f"sqlite:///{inside}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    return uri


@pytest.fixture
def copy(demo: tuple[Path, str], store: str, inside: Path) -> Path:
    """The working directory, with a copy of the finished run that a test may change."""
    shutil.copytree(demo[0] / "runs", inside / "runs")
    return inside
