"""One finished run for the whole test session, which the tests of this folder copy before they change it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from filelock import FileLock

from tests.pipelines.runs import SMALL, espalier, new_store


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Its folder, and what it said. All workers share one; the first that asks for it makes it."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "demo"
    said = folder / "said.txt"
    with FileLock(f"{folder}.lock"):
        if not said.exists():
            folder.mkdir()
            said.write_text(espalier(folder, "demo", *SMALL))
    return folder, said.read_text()


@pytest.fixture
def copy(demo: tuple[Path, str], empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a copy of the finished run that a test may change.

    Stages in this process have a store of MLflow of their own beside it, by its absolute path: MLflow keeps relative
    ones. Stages in other processes have a copy of the run's.
    """
    for name in ("runs", "mlruns"):
        shutil.copytree(demo[0] / name, tmp_path / name)
    shutil.copyfile(empty_store, tmp_path / "mlflow.db")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture(scope="session")
def empty_store() -> Path:
    """The database of a new MLflow store, to be copied."""
    return new_store()
