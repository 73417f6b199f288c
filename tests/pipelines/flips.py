"""Bytes flipped in the files of a finished run, and what the same command then makes of it.

    python -m tests.pipelines.flips RUN_FOLDER 200 [section.key=value ...]

copies the run for every flip, prints what was made of it, and how many were refused, mended, or without effect. None
may pass.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from pipelines.cli import run
from pipelines.run import console
from selector.schema import InputError

ROOT = Path(__file__).parents[2]
WITHOUT_MEANING = ("provenance",)  # of a stage's record: who made it, and when; nothing reads it


def files_of(run_folder: Path) -> list[Path]:
    """What may be damaged: everything that a run leaves, locks apart; relative paths."""
    return sorted(
        path.relative_to(run_folder)
        for path in run_folder.rglob("*")
        if path.is_file() and path.stat().st_size > 0 and path.name != ".lock"
    )


def flip(path: Path, rng: random.Random) -> None:
    """One bit of one byte."""
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def outcome(folder: Path, original: Path, damaged: Path, overrides: list[str]) -> tuple[str, str]:
    """What `demo` makes of a run with one damaged file: `refused`, `mended`, `without effect`, or `passed`; and why.

    Args:
        folder: holds `runs/demo`, a copy of `original`.
        damaged: relative to the run.
    """
    said = io.StringIO()
    with _inside(folder), contextlib.redirect_stdout(said):
        console.file = said
        try:
            run("demo", ROOT / "configs" / "demo.yaml", overrides, plan=False)
        except InputError as error:
            return "refused" if "\n" not in str(error) else "passed", str(error)
        finally:
            console.file = None  # whatever the output is by then
    now = folder / "runs" / "demo" / damaged
    if not now.exists() or now.read_bytes() == (original / damaged).read_bytes():
        return "mended", "as it was, or removed"
    if "made anew" in said.getvalue():
        return "mended", "made anew"
    return ("without effect", "nothing reads it") if _means_the_same(now, original / damaged) else ("passed", "")


def _means_the_same(one: Path, other: Path) -> bool:
    """Whether two files differ in what nothing reads."""
    if one.suffix != ".json":
        return False
    values = []
    for path in (one, other):
        try:
            value = json.loads(path.read_text())
        except (ValueError, UnicodeDecodeError):
            return False
        if isinstance(value, dict):
            value = {name: each for name, each in value.items() if name not in WITHOUT_MEANING}
        values.append(value)
    return values[0] == values[1]


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def main() -> None:
    original, count, overrides = Path(sys.argv[1]).resolve(), int(sys.argv[2]), sys.argv[3:]
    rng = random.Random(0)
    kinds = files_of(original)
    found: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as store:
        # one store for all: MLflow keeps a process's connection to it, and the folder of each flip goes
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{store}/mlflow.db"
        for number in range(count):
            damaged = kinds[number % len(kinds)]
            with tempfile.TemporaryDirectory() as temporary:
                shutil.copytree(original, Path(temporary) / "runs" / "demo")
                flip(Path(temporary) / "runs" / "demo" / damaged, rng)
                result, why = outcome(Path(temporary), original, damaged, overrides)
            found[result] += 1
            print(f"{result:14} {damaged}: {why}", file=sys.stderr)
    print(dict(found), file=sys.stderr)


if __name__ == "__main__":
    main()
