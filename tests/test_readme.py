"""The README's commands, keys and paths exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from pipelines.cli import ALL, APART, STAGES
from pipelines.config import Config, load_config
from selector.schema import InputError

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


COMMANDS = [line for block in blocks("sh") for line in block.strip().splitlines()]


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("make ")])
def test_make_targets_exist_and_their_options_are_valid(line: str) -> None:
    _, target, *assignments = shlex.split(line)
    help_ = subprocess.run(["make", "-C", str(ROOT), "help"], capture_output=True, text=True, check=True).stdout
    assert re.search(rf"^\s+{target}\s", help_, flags=re.MULTILINE)
    options = dict(assignment.split("=", 1) for assignment in assignments)
    load_config(ROOT / options.get("CONFIG", "configs/demo.yaml"), options.get("ARGS", "").split())


@pytest.mark.parametrize("line", [line for line in COMMANDS if "espalier" in line])
def test_commands_run_as_plans(line: str) -> None:
    arguments = shlex.split(line)[1:]
    todo = [sys.executable, "-m", "pipelines.cli", *arguments, "--plan"]
    result = subprocess.run(todo, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip()


def test_every_command_is_covered() -> None:
    assert all(line.startswith("make ") or "espalier" in line for line in COMMANDS)
    assert len(COMMANDS) >= 5


def test_yaml_examples_are_valid_configs() -> None:
    for block in blocks("yaml"):
        Config.model_validate(yaml.safe_load(block))


def test_files_that_the_readme_names_exist() -> None:
    for name in re.findall(r"`((?:tests|configs|pipelines|selector|data_gen)/[\w/.]+)`", README):
        assert (ROOT / name).exists(), name


def test_every_stage_has_a_row_and_a_make_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for stage in (*STAGES, *APART, ALL):
        assert re.search(rf"^{stage}: .*## ", makefile, flags=re.MULTILINE), stage
    for stage in (*STAGES, *APART):
        assert f"| `{stage}` |" in README


def test_no_stage_is_run_by_an_unknown_name() -> None:
    from pipelines.cli import run

    with pytest.raises(InputError, match="unknown stage"):
        run("demmo", ROOT / "configs" / "demo.yaml", [], plan=True)
