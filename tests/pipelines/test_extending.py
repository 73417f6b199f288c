"""The new feature of `docs/extending.md`, from the page's change of the code to a selector that sees it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

from tests.pipelines.runs import ROOT, SMALL, command, environment

PAGE = (ROOT / "docs" / "extending.md").read_text()


def test_a_new_feature_is_replayed_on_traces_that_were_made_without_it(demo: tuple[Path, str], tmp_path: Path) -> None:
    code, folder = tmp_path / "code", tmp_path / "run"
    for room in ("selector", "data_gen", "pipelines"):
        shutil.copytree(ROOT / room, code / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(demo[0], folder)
    (change,) = re.findall(r"```diff\n(.*?)```", PAGE, flags=re.DOTALL)
    subprocess.run(["patch", "-p1", "--fuzz=0"], cwd=code, input=change, text=True, check=True)
    assert ".venv/bin/espalier train --config configs/demo.yaml\n```\n\nArtefacts that lack the feature" in PAGE
    variables = {**environment(), "PYTHONPATH": str(code)}
    todo = command("train", *SMALL, "train.objectives=[regressor]")
    said = subprocess.run(todo, cwd=folder, env=variables, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    assert len(re.findall(r"^ *T=[\d.]+ +\(.*\d\.\d+ ±\d\.\d+", said.stdout, flags=re.MULTILINE)) == 2, said.stdout
    record = json.loads((folder / "runs/demo/stages/train.json").read_text())
    before = json.loads((demo[0] / "runs/demo/stages/train.json").read_text())
    assert record["finished"] and record["depends"]["scalars"] != before["depends"]["scalars"]
