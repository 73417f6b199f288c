"""A copy on the hub: what is said without a token, and without a network."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from pathlib import Path
from pipelines.export import stage
try:
    stage.check_token("org/selector")
    stage.push(Path(sys.argv[1]), "org/selector")
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("token", "message"),
    [
        ({}, "export.push=org/selector: no hub token here: run `hf auth login`, or set HF_TOKEN"),
        ({"HF_TOKEN": "hf_none"}, "is complete, but org/selector did not get its copy: "),
    ],
    ids=["no token", "no network"],
)
def test_a_push_that_cannot_be_is_one_line(tmp_path: Path, token: dict[str, str], message: str) -> None:
    bare = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment = {**bare, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", **token}
    (tmp_path / "selector").mkdir()
    (tmp_path / "selector" / "config.json").write_text("{}")
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "selector")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert message in done.stdout and len(done.stdout.splitlines()) == 1
