"""What all stages share: whether earlier output is still valid, provenance, templates, JSON."""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import date
from functools import cache
from importlib.metadata import version
from io import BytesIO
from pathlib import Path
from typing import Any, TypeVar

import torch
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from rich.text import Text

from data_gen.traces import differences
from pipelines.config import Config
from pipelines.terminal import console
from selector.files import atomically, json_text
from selector.schema import FORMAT, InputError, sha256

T = TypeVar("T")
# the stage of each record that has another name
MADE_BY = {"prompts": "pair", "engine-latency": "latency"}
PACKAGES = (
    "torch",
    "transformers",
    "pytorch-lightning",
    "torchmetrics",
    "datasets",
    "pyarrow",
    "mlflow",
)

TODAY = date.today()  # one for the whole process


@dataclass(frozen=True)
class Stage:
    """One stage of a run, with the record of what its output was made from.

    Attributes:
        depends: everything that determines the output; JSON values.
        outputs: files or folders that exist once the stage is finished.
        hashed: the files whose checksums are recorded; None for all files of the outputs.
    """

    name: str
    config: Config
    depends: dict[str, Any]
    outputs: tuple[Path, ...]
    hashed: tuple[Path, ...] | None = None
    started: float = field(default_factory=time.monotonic, init=False, compare=False)

    def begin(self) -> bool:
        """Whether the stage has work to do. Prints that its output is reused, or why it is made
        again."""
        reason = self._reason_to_run()
        if reason is None:
            self.say(f"reusing {self.outputs[0]}: nothing it depends on has changed")
        elif reason:
            self.say(reason)
        if reason is not None:
            _keep_day(self.config)
        return reason is not None

    @property
    def changes(self) -> str:
        """The inputs that have changed since the output was made; empty where there is none."""
        with suppress(InputError):
            recorded = read_record(self.config, self.name)["depends"]
            return differences(recorded, {"format": FORMAT, **self.depends})
        return ""

    def differs_only_in(self, key: str) -> bool:
        """Whether the output is finished and unchanged, and made from the same inputs but for
        one."""
        with suppress(InputError):
            record = read_record(self.config, self.name)
            depends = {**self.depends, key: record["depends"].get(key)}
            return replace(self, depends=depends).is_reusable
        return False

    @property
    def is_reusable(self) -> bool:
        """Whether the output is finished, unchanged and made from the same inputs."""
        return self._reason_to_run() is None

    def _reason_to_run(self) -> str | None:
        """None where the output is reusable; empty where it is missing or unfinished."""
        path = record_path(self.config, self.name)
        if not path.exists():
            return ""
        try:
            record = read_record(self.config, self.name)
        except InputError:
            return f"{path} is damaged: made again"
        if self.changes:
            return f"made again: {self.changes}"
        if not record["finished"]:
            return ""
        damaged = _changed_file(self.config, record)
        if damaged is not None:
            return f"{damaged} was changed or removed since it was written: made again"
        if not all(output.exists() for output in self.outputs):
            return ""
        return None

    def parts(self, of_any_code: bool = False) -> Parts:
        """What the stage has made so far, by the same code unless it may be `of_any_code`. It is
        removed when the stage is finished."""
        code = {} if of_any_code else {"code": code_digest()}
        return Parts(self._parts_folder, {**self.depends, **code})

    @property
    def _parts_folder(self) -> Path:
        return self.config.folder / "parts" / self.name

    def replace(self) -> None:
        """Record that the earlier output is no longer valid. Call it before the first write."""
        self._write({"finished": False})

    def finish(self) -> None:
        """Record that the output is complete, with the checksums of its files."""
        files = self._output_files() if self.hashed is None else self.hashed
        sums = {str(path.relative_to(self.config.folder)): sha256(path) for path in files}
        # `--plan` says how long the last call took
        seconds = round(time.monotonic() - self.started, 1)
        self._write({"finished": True, "seconds": seconds, "files": sums})
        shutil.rmtree(self._parts_folder, ignore_errors=True)

    def _output_files(self) -> tuple[Path, ...]:
        paths = list(self.outputs)
        for folder in self.outputs:
            paths += sorted(folder.rglob("*"))
        return tuple(path for path in paths if path.is_file())

    def say(self, message: str) -> None:
        """Print a line that begins with the stage's name."""
        line = Text.assemble((self.name, "bold"), f": {message}")
        line.highlight_words(["warning"], "bold yellow")
        console.print(line, soft_wrap=True)

    def _write(self, outcome: dict[str, Any]) -> None:
        _keep_day(self.config)
        record = {
            "depends": {"format": FORMAT, **self.depends},
            **outcome,
            "provenance": provenance(self.config),
        }
        write_json(record_path(self.config, self.name), record)


@cache
def code_digest() -> str:
    """A checksum of the program's source."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for package in ("selector", "data_gen", "pipelines"):
        for path in sorted((root / package).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()


class Parts:
    """What a stage has made so far, by name, so that it goes on where it stopped. A folder of files
    that begins anew where they would depend on other inputs."""

    def __init__(self, folder: Path, depends: dict[str, Any]) -> None:
        self.folder = folder
        inputs_path = folder / "depends.json"
        inputs = {"format": FORMAT, **depends}
        if not inputs_path.exists() or inputs_path.read_text() != json_text(inputs):
            shutil.rmtree(folder, ignore_errors=True)
            write_json(inputs_path, inputs)

    def get(self, name: str, make: Callable[[], T]) -> T:
        """What `make` returns, or returned earlier."""

        def write(path: Path) -> None:
            buffer = BytesIO()  # torch's own writer ends in another error where the disk is full
            torch.save(make(), buffer)
            path.write_bytes(buffer.getvalue())

        path = self.file(f"{self._digest(name)}.pt", write)
        result: T = torch.load(path, weights_only=False)  # the run's own file
        return result

    def holds(self, name: str) -> bool:
        """Whether `get` has made it."""
        return (self.folder / f"{self._digest(name)}.pt").exists()

    def file(self, name: str, write: Callable[[Path], object]) -> Path:
        """The file of this name, which `write` writes where it is missing."""
        path = self.folder / name
        if not path.exists():
            with atomically(path) as partial_path:
                write(partial_path)
        return path

    @staticmethod
    def _digest(name: str) -> str:
        return hashlib.sha256(name.encode()).hexdigest()[:16]


def record_path(config: Config, stage: str) -> Path:
    return config.folder / "stages" / f"{stage}.json"


def day_of(config: Config) -> date:
    """The day that chat templates write into the run's prompts: the one on which its first stage
    began, so that a run that goes on later has the same prompts; before, today."""
    day = TODAY
    with suppress(OSError, ValueError, TypeError):
        day = date.fromisoformat(json.loads(_day_path(config).read_text()))
    return day


def _keep_day(config: Config) -> None:
    if not _day_path(config).exists():
        write_json(_day_path(config), TODAY.isoformat())


def _day_path(config: Config) -> Path:
    return config.folder / "stages" / "day.json"


def read_record(config: Config, name: str) -> dict[str, Any]:
    """What a stage has recorded: `depends`, `finished` and, once finished, `files` with their
    checksums; InputError where the record is missing or damaged."""
    path = record_path(config, name)
    stage = MADE_BY.get(name, name)
    record = read_json(path, stage)
    if not isinstance(record, dict):
        record = {}
    has_dicts = all(isinstance(record.get(key, {}), dict) for key in ("depends", "files"))
    if not (has_dicts and {"depends", "finished"} <= record.keys()):
        raise InputError(f"{path} is damaged: remove it and run the {stage} stage again")
    return record


def verify(config: Config, name: str) -> None:
    """Check the files of a record, if there is one; InputError for an interrupted stage, a missing
    or changed file."""
    if not record_path(config, name).exists():
        return
    record = read_record(config, name)
    stage = MADE_BY.get(name, name)
    if not record["finished"]:
        raise InputError(f"{config.folder}: the {stage} stage is not finished: run it again")
    changed = _changed_file(config, record)
    if changed is not None:
        raise InputError(
            f"{changed}: missing, or changed since it was written: run the {stage} stage again"
        )


def require(config: Config, stage: str, current: dict[str, Any]) -> None:
    """InputError unless an earlier stage is finished, its files are unchanged, and it ran with the
    `current` inputs. Inputs that are not given are not compared."""
    record = read_record(config, stage)
    verify(config, stage)
    current = {"format": FORMAT, **current}
    recorded = {key: record["depends"].get(key) for key in current}
    changes = differences(recorded, current)
    if changes:
        message = f"the {stage} stage was run with other inputs ({changes})"
        raise InputError(f"{config.folder}: {message}: run it again")


def _changed_file(config: Config, record: dict[str, Any]) -> Path | None:
    for name, digest in record.get("files", {}).items():
        path = config.folder / name
        if not path.is_file() or sha256(path) != digest:
            return path
    return None


def provenance(config: Config) -> dict[str, Any]:
    """Resolved config, command line, commit and package versions; JSON values."""
    in_repository = ["git", "-C", str(Path(__file__).parent)]
    describe = [*in_repository, "describe", "--always", "--dirty", "--abbrev=12"]
    commit = ""
    with suppress(OSError):  # there may be no git
        described = subprocess.run(describe, capture_output=True, text=True, check=False)
        commit = described.stdout.strip()
    return {
        "config": config.model_dump(mode="json"),
        "command": " ".join(["espalier", *sys.argv[1:]]),
        "commit": commit or None,
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
    }


def templates_beside(file: str, **settings: Any) -> Environment:
    """The Jinja templates in the folder `templates` beside a module's file; a name that is not
    given is an error."""
    loader = FileSystemLoader(Path(file).with_name("templates"))
    return Environment(
        loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, **settings
    )


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all."""
    with atomically(path) as partial:
        partial.write_text(json_text(value), encoding="utf-8")


def read_json(path: Path, made_by: str) -> Any:
    """The content of a JSON file; InputError where it is missing or not JSON, which says to run the
    stage `made_by`."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist: run the {made_by} stage first") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} is damaged: remove it and run the {made_by} stage again"
        ) from error
