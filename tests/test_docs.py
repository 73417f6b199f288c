"""The commands, keys, paths and links of the README and of all pages exist; generated pages are
those of the code."""

from __future__ import annotations

import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from pipelines.cli import ALL, STAGES, app
from pipelines.config import Config, known_keys, load_config
from tests.pipelines.runs import APART

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
README = PAGES[0].read_text()


def blocks(language: str) -> list[str]:
    """The code blocks of a language, of all pages."""
    fence = rf"```{language}\n(.*?)```"
    return [
        block for page in PAGES for block in re.findall(fence, page.read_text(), flags=re.DOTALL)
    ]


COMMANDS = sorted(
    {line.split("  #")[0] for block in blocks("sh") for line in block.strip().splitlines()}
)


@pytest.mark.parametrize("line", [line for line in COMMANDS if line.startswith("make ")])
def test_make_targets_exist_and_their_options_are_valid(line: str) -> None:
    _, target, *assignments = shlex.split(line)
    help_ = subprocess.run(
        ["make", "-C", str(ROOT), "help"], capture_output=True, text=True, check=True
    ).stdout
    assert re.search(rf"^\s+{target}\s", help_, flags=re.MULTILINE)
    options = dict(assignment.split("=", 1) for assignment in assignments)
    load_config(
        ROOT / options.get("CONFIG", "configs/demo.yaml"), shlex.split(options.get("ARGS", ""))
    )


@pytest.mark.parametrize("line", [line for line in COMMANDS if "espalier" in line])
def test_commands_run_as_plans(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(line)[1:]
    done = CliRunner().invoke(app, words if words[0] == "check-verifier" else [*words, "--plan"])
    assert done.exit_code == 0 and done.stdout.strip(), done.output


@pytest.mark.parametrize("line", [line for line in COMMANDS if " -m " in line])
def test_modules_that_are_run_exist(line: str) -> None:
    _, _, module, *arguments = (word for word in shlex.split(line) if not word.startswith("--"))
    assert module == "pytest" or (ROOT / module.replace(".", "/")).with_suffix(".py").exists()
    paths, overrides = (
        [each for each in arguments if ("=" in each) == kind] for kind in (False, True)
    )
    assert all((ROOT / path).exists() for path in paths if "/" in path)
    if overrides:
        load_config(ROOT / paths[0], overrides)


def test_every_command_is_covered() -> None:
    assert all(
        line.startswith(("make ", "cp -r runs/")) or "espalier" in line or " -m " in line
        for line in COMMANDS
    )
    assert len(COMMANDS) >= 8


def test_yaml_examples_are_valid_configs() -> None:
    for block in blocks("yaml"):
        Config.model_validate(yaml.safe_load(block))


def test_files_and_links_exist() -> None:
    for page in PAGES:
        text = page.read_text()
        for name in re.findall(
            r"`((?:tests|configs|pipelines|selector|data_gen|docs)/[\w/.]+)`", text
        ):
            assert (ROOT / name).exists(), (page.name, name)
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (page.parent / link).exists(), (page.name, link)


def test_every_stage_has_a_make_target_and_its_place_in_the_readme() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for stage in (*STAGES, *APART, ALL):
        assert re.search(rf"^{stage}: .*## ", makefile, flags=re.MULTILINE), stage
    assert all(f"| `{stage}` |" in README for stage in STAGES)
    assert all(f"make {stage}" in README for stage in (*APART, ALL))


@pytest.mark.parametrize("name", ["configuration.md", "config.schema.json", "reference.md"])
def test_generated_pages_are_those_of_the_code(name: str) -> None:
    made = runpy.run_path(str(ROOT / "docs" / "build.py"))["PAGES"][name]()
    assert (ROOT / "docs" / name).read_text(encoding="utf-8") == made, "run make docs"


def test_every_config_key_says_what_it_means() -> None:
    reference = (ROOT / "docs" / "configuration.md").read_text()
    assert not re.findall(r"^\| `[\w.]+` \| .* \|  \|$", reference, flags=re.MULTILINE)


def test_help_lists_the_stages_and_of_each_its_options() -> None:
    said = CliRunner().invoke(app, ["--help"]).stdout
    assert all(
        re.search(rf"^  {stage}\s+\S", said, flags=re.MULTILINE) for stage in (*STAGES, *APART, ALL)
    )
    assert "--timings" in CliRunner().invoke(app, ["logs", "--help"]).stdout
    assert "--timings" not in CliRunner().invoke(app, ["train", "--help"]).stdout


def test_the_version_is_that_of_the_package() -> None:
    """In a process that begins as a user's."""
    line = [sys.executable, "-m", "pipelines", "--version"]
    said = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(r"espalier \d+\.\d+\.\d+\n", said)


def test_the_schema_describes_the_configs() -> None:
    """Every key is in it, with its meaning; and it is found from every config that begins by naming
    it."""
    schema = json.loads((ROOT / "docs" / "config.schema.json").read_text())
    sections = {"": schema, **schema["$defs"]}
    keys = {key for own in sections.values() for key in own["properties"]}
    assert {key.rpartition(".")[2] for key in known_keys()} <= keys
    assert all(own["additionalProperties"] is False for own in sections.values())
    assert schema["$defs"]["Train"]["properties"]["epochs"]["description"].startswith(
        "passes over the training roots"
    )
    for path in (ROOT / "configs").glob("*.yaml"):
        first = path.read_text().partition("\n")[0].removeprefix("# yaml-language-server: $schema=")
        assert (path.parent / first).resolve() == ROOT / "docs" / "config.schema.json"
