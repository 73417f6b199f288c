"""One finished run, which the tests of this folder share and copy before they change it."""

from __future__ import annotations

import subprocess
from pathlib import Path

import mlflow
import pytest

from tests.pipelines.runs import SMALL, command, environment


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("demo")
    todo = command("demo", *SMALL)  # as a user starts it; other tests save the seconds that the imports take
    result = subprocess.run(todo, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder, result.stdout + result.stderr


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The database of a new MLflow store, to be copied: making one takes seconds."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    assert mlflow.MlflowClient(f"sqlite:///{path}").search_registered_models() == []
    return path
