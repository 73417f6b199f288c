"""The commands, keys, paths and links of the README and of all pages exist; generated pages are
those of the code."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from pipelines.cli import ALL, STAGES, app
from pipelines.config import Config, known_keys, load_config
from tests.checks import ROOT, python
from tests.pipelines.runs import APART

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.glob("*.md"))]
MAKEFILE = (ROOT / "Makefile").read_text()
PATH = r"`((?:tests|configs|pipelines|selector|data_gen|docs)/[\w/.]+)`"


def blocks(language: str) -> list[str]:
    """The code blocks of a language, of all pages."""
    text = "\n".join(page.read_text() for page in PAGES)
    return re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)


COMMANDS = sorted({line.split("  #")[0] for line in "".join(blocks("sh")).splitlines()})


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_are_valid(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make targets with their configs and keys exist, stages run as plans, and tests are there."""
    monkeypatch.chdir(ROOT)
    program, *words = shlex.split(line)
    if program == "make":
        options = dict(word.split("=", 1) for word in words[1:])
        assert re.search(rf"^{words[0]}: .*## ", MAKEFILE, flags=re.MULTILINE)
        config = Path(options.get("CONFIG", "configs/demo.yaml"))
        load_config(config, shlex.split(options.get("ARGS", "")))
    elif program.endswith("espalier"):
        if words[0] != "check-verifier":
            words.append("--plan")
        done = CliRunner().invoke(app, words)
        assert done.exit_code == 0 and done.stdout.strip(), done.output
    else:
        assert words[:2] == ["-m", "pytest"] and all(Path(word).exists() for word in words[2:])


def test_yaml_examples_are_valid_configs() -> None:
    for block in blocks("yaml"):
        Config.model_validate(yaml.safe_load(block))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_and_links_exist(page: Path) -> None:
    text = page.read_text()
    missing = [name for name in re.findall(PATH, text) if not (ROOT / name).exists()]
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    missing += [link for link in links if not (page.parent / link).exists()]
    assert not missing


@pytest.mark.parametrize("stage", [*STAGES, *APART, ALL])
def test_every_stage_has_a_make_target_and_its_place_in_the_readme(stage: str) -> None:
    assert re.search(rf"^{stage}: .*## ", MAKEFILE, flags=re.MULTILINE)
    listed = f"| `{stage}` |" if stage in STAGES else f"make {stage}"
    assert listed in PAGES[0].read_text()
    help_of_all = CliRunner().invoke(app, ["--help"]).stdout
    assert re.search(rf"^  {stage}\s+\S", help_of_all, flags=re.MULTILINE)


@pytest.mark.parametrize("name", ["configuration.md", "config.schema.json", "reference.md"])
def test_generated_pages_are_those_of_the_code(name: str) -> None:
    made = runpy.run_path(str(DOCS / "build.py"))["PAGES"][name]()
    assert (DOCS / name).read_text(encoding="utf-8") == made, "run make docs"


def test_the_version_is_that_of_the_package() -> None:
    output = python("-m", "pipelines", "--version").stdout
    assert re.fullmatch(r"espalier \d+\.\d+\.\d+\n", output)


def test_the_schema_describes_the_configs() -> None:
    """Every key is in it, with its meaning; and it is found from every config that begins by naming
    it."""
    schema = json.loads((DOCS / "config.schema.json").read_text())
    keys: dict[str, dict[str, str]] = {}
    for section in (schema, *schema["$defs"].values()):
        assert section["additionalProperties"] is False
        keys |= section["properties"]
    for key in known_keys():
        key_schema = keys[key.rpartition(".")[2]]
        assert "$ref" in key_schema or key_schema["description"], key
    for path in (ROOT / "configs").glob("*.yaml"):
        first = path.read_text().partition("\n")[0].removeprefix("# yaml-language-server: $schema=")
        assert (path.parent / first).resolve() == DOCS / "config.schema.json"
