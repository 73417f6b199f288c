"""What tests of all folders ask for: a refusal in one line, and a program that ends well."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from selector.schema import InputError

ROOT = Path(__file__).parents[1]


@contextmanager
def one_line(start: str, *words: str) -> Iterator[None]:
    """An InputError in one line that begins so, and holds all these words."""
    with pytest.raises(InputError) as error:
        yield
    message = str(error.value)
    assert message.startswith(start) and "\n" not in message
    for word in words:
        assert word in message


def environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"} | {
        "PYTHONPATH": str(ROOT)
    }


def python(
    *arguments: str | Path, folder: Path = ROOT, **variables: str
) -> subprocess.CompletedProcess[str]:
    """A program in a process that begins as a user's."""
    line = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        line,
        cwd=folder,
        env=environment() | variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done
