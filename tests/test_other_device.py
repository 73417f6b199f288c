"""Data generation on a device that is not the CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.pipelines.runs import ROOT, environment


def numbers(value: Any) -> Iterator[Any]:
    """The leaves of nested lists and dictionaries."""
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list):
        for each in value:
            yield from numbers(each)
    else:
        yield value


def test_texts_and_labels_are_those_of_the_cpu(tmp_path: Path) -> None:
    """Tokens are equal. Numbers may differ by rounding, because a few are summed otherwise on a GPU; hidden states are
    recorded in half precision."""
    command = [sys.executable, "-m", "tests.other_device", str(tmp_path / "found.json")]
    said = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert not found["mixes"]
    for name, expected in found["cpu"].items():
        for one, other in zip(numbers(expected), numbers(found["cuda"][name]), strict=True):
            assert one == (pytest.approx(other, rel=1e-2, abs=1e-3) if isinstance(other, float) else other), name
