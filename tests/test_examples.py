"""The programs of `docs/examples` print what they say they print; `...` stands for what differs
from machine to machine."""

from __future__ import annotations

import doctest
from functools import cache
from pathlib import Path

import pytest

from tests.checks import ROOT, python

EXAMPLES = ROOT / "docs" / "examples"
MARK = "# It prints:\n"
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working directory with the files of the checkout that the programs read."""
    folder = tmp_path_factory.mktemp("examples")
    (folder / "pipelines").symlink_to(ROOT / "pipelines")
    return folder


@cache
def output(name: str, folder: Path) -> str:
    return python(EXAMPLES / name, folder=folder).stdout


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_a_program_prints_what_it_says(path: Path, folder: Path) -> None:
    if path.stem == "own_engine":
        output("replay_a_log.py", folder)  # trains its selector
    _, mark, comment = path.read_text().partition(MARK)
    lines = [line.removeprefix("#").removeprefix(" ") for line in comment.splitlines()]
    expected = "\n".join(lines).strip("\n") + "\n"
    printed = output(path.name, folder).strip("\n") + "\n"
    assert mark and doctest.OutputChecker().check_output(expected, printed, OPTIONS), printed
