"""One finished run, which the tests of this folder share and copy before they change it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from filelock import FileLock

from tests.pipelines.runs import SMALL, command, environment


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """Its folder and what it said; the first worker that asks makes it for all."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder, said = shared / "demo", shared / "demo.txt"
    with FileLock(shared / "demo.lock"):
        if not said.exists():
            folder.mkdir(exist_ok=True)
            todo = command("demo", *SMALL)  # as a user starts it; other tests save the seconds that the imports take
            result = subprocess.run(todo, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
            assert result.returncode == 0, result.stdout + result.stderr
            said.write_text(result.stdout + result.stderr)
    return folder, said.read_text()
