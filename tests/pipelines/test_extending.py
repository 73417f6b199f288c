"""The new feature of `docs/extending.md`, from the page's change of the code to its replayed gain."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

from tests.pipelines.runs import ROOT, SMALL, environment

PAGE = (ROOT / "docs" / "extending.md").read_text()


def test_a_new_feature_is_replayed_on_traces_that_were_made_without_it(demo: tuple[Path, str], tmp_path: Path) -> None:
    code, folder = tmp_path / "code", tmp_path / "run"
    for room in ("selector", "data_gen", "pipelines"):
        shutil.copytree(ROOT / room, code / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(demo[0], folder)
    (change,) = re.findall(r"```diff\n(.*?)```", PAGE, flags=re.DOTALL)
    subprocess.run(["patch", "-p1", "--fuzz=0"], cwd=code, input=change, text=True, check=True)
    (line,) = re.findall(r"^.venv/bin/python (-m pipelines.studies.features .*)$", PAGE, flags=re.MULTILINE)
    _, module, config, name = shlex.split(line)
    command = [sys.executable, "-m", module, str(ROOT / config), name, *SMALL]
    variables = {**environment(), "PYTHONPATH": str(code)}
    said = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert f"speed with {name} over speed without" in said.stdout
    assert len(re.findall(r"^T=[\d.]+: \d\.\d+ ±\d\.\d+$", said.stdout, flags=re.MULTILINE)) == 2, said.stdout
