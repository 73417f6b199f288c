"""What all stages share: the validity of earlier outputs, provenance, the terminal, and files of a run."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from data_gen.traces import differences, listed_changes
from pipelines.config import Config
from selector.files import atomically, unwritable
from selector.schema import InputError, sha256

PACKAGES = ("torch", "transformers", "pytorch-lightning", "torchmetrics", "datasets", "pyarrow", "mlflow")


@dataclass(frozen=True)
class Stage:
    """One stage of a run: what its output depends on, and the record of what it was made from.

    Attributes:
        depends: everything the output follows from; JSON values.
        outputs: files or folders that exist once the stage is done.
        costly: never made anew over an earlier output; a changed input is an error instead.
        self_described: the output itself says what it was made from and checks its parts: the record decides nothing.
        hashed: the files whose checksums are recorded; all files of the outputs if None.
    """

    name: str
    config: Config
    depends: dict[str, Any]
    outputs: tuple[Path, ...]
    costly: bool = False
    self_described: bool = False
    hashed: tuple[Path, ...] | None = None

    @property
    def record(self) -> Path:
        return record_path(self.config, self.name)

    def begin(self, intact: Callable[[], bool] = lambda: True) -> bool:
        """Whether there is anything to do. Says so where earlier output is reused, or made anew, and why.

        Args:
            intact: a closer look at outputs that are there; asked before they are reused.

        Raises:
            InputError: the stage is costly, and there is output of other inputs, or output that was changed since.
        """
        recorded = self._recorded()
        changes = [] if recorded is None else differences(recorded["depends"], self.depends)
        finished = recorded is not None and recorded["finished"] and not changes
        changed = _changed_file(self.config, recorded) if recorded is not None and finished else None
        if self.costly and not self.self_described and any(_holds_anything(path) for path in self.outputs):
            places = " and ".join(str(path) for path in self.outputs)
            advice = f"choose another name= or remove {'them' if len(self.outputs) > 1 else 'it'}"
            if recorded is None:
                raise InputError(f"{places}: there, but not known to be finished; {advice}")
            if changes:
                raise InputError(f"{places}: made from other inputs ({listed_changes(changes)}); {advice}")
            if changed is not None:
                raise InputError(f"{changed}: changed since it was written; put it back, or remove {places}")
        if finished and changed is None and all(path.exists() for path in self.outputs) and intact():
            self.say(f"reusing {self.outputs[0]}: nothing it depends on has changed")
            return False
        if changed is not None:
            self.say(f"{changed} was changed or removed since it was written: made anew")
        elif changes:
            self.say(f"made anew: {listed_changes(changes)}")
        if self.costly:
            self.replace()
        return True

    def _recorded(self) -> dict[str, Any] | None:
        """The stage's record; None where there is none, or where it is damaged and nothing depends on it."""
        try:
            return read_record(self.config, self.name) if self.record.exists() else None
        except InputError:
            if self.costly and not self.self_described:
                raise
            self.say(f"{self.record} is damaged: made anew")
            return None

    def replace(self) -> None:
        """From here on the earlier output is no more: call it before the first write."""
        self._write(finished=False)

    def finish(self) -> None:
        """Record that the output is complete."""
        self._write(finished=True)

    def say(self, message: str) -> None:
        console.print(f"[bold]{self.name}[/]: {message}", soft_wrap=True)

    def _write(self, finished: bool) -> None:
        record: dict[str, Any] = {"depends": self.depends, "finished": finished}
        if finished:
            record["files"] = {str(path.relative_to(self.config.folder)): sha256(path) for path in self._files()}
        write_json(self.record, record | {"provenance": provenance(self.config)})

    def _files(self) -> list[Path]:
        if self.hashed is not None:
            return list(self.hashed)
        folders = [path for path in self.outputs if path.is_dir()]
        inside = [path for folder in folders for path in sorted(folder.rglob("*")) if path.is_file()]
        return [*(path for path in self.outputs if path.is_file()), *inside]


def record_path(config: Config, stage: str) -> Path:
    return config.folder / "stages" / f"{stage}.json"


def read_record(config: Config, stage: str) -> dict[str, Any]:
    """What a stage has recorded of itself; InputError where the file is missing or damaged."""
    path = record_path(config, stage)
    record = read_json(path, stage)
    whole = isinstance(record, dict) and isinstance(record.get("depends"), dict) and "finished" in record
    if not whole or not isinstance(record.get("files", {}), dict):
        raise InputError(f"{path} is damaged: remove it and run the {stage} stage again")
    return record


def verify(config: Config, stage: str, made_by: str | None = None) -> None:
    """That the files which a stage has recorded are still those that it wrote; nothing where it has no record.

    Args:
        made_by: the stage to run again; `stage` itself if None.

    Raises:
        InputError: the stage was interrupted, or a file is missing or was changed; names it.
    """
    if record_path(config, stage).exists():
        record, again = read_record(config, stage), made_by or stage
        if not record["finished"]:
            raise InputError(f"{config.folder}: the {again} stage is not finished: run it again")
        changed = _changed_file(config, record)
        if changed is not None:
            raise InputError(f"{changed}: missing, or changed since it was written: run the {again} stage again")


def _changed_file(config: Config, record: dict[str, Any]) -> Path | None:
    """The first recorded file that is missing or has another checksum."""
    files = ((config.folder / name, digest) for name, digest in record.get("files", {}).items())
    return next((path for path, digest in files if not path.is_file() or sha256(path) != digest), None)


def require(config: Config, stage: str, current: dict[str, Any]) -> None:
    """That an earlier stage is finished, was made from the current config, and that its files are as it wrote them.

    Args:
        current: what it depends on now; keys that are left out are not compared.

    Raises:
        InputError: it is missing, unfinished, made from something else, or a file was changed since.
    """
    record = read_record(config, stage)
    verify(config, stage)
    changes = differences({key: record["depends"].get(key) for key in current}, current)
    if changes:
        raise InputError(
            f"{config.folder}: the {stage} stage was run with other inputs ({listed_changes(changes)}): run it again"
        )


def _holds_anything(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists()


def provenance(config: Config) -> dict[str, Any]:
    """Resolved config, command line, commit and package versions."""
    return {
        "config": config.model_dump(mode="json"),
        "command": " ".join(["espalier", *sys.argv[1:]]),
        "commit": _commit(),
        "python": platform.python_version(),
        "packages": {name: version(name) for name in PACKAGES},
    }


def _commit() -> str | None:
    here = Path(__file__).parent
    result = subprocess.run(
        ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"],
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout.strip() or None


console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)


@contextmanager
def progress() -> Iterator[Progress]:
    """A progress bar on the terminal; plain text where there is none."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as bar:
        yield bar


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all."""
    with atomically(path) as partial:
        partial.write_text(json.dumps(value, indent=1) + "\n")


def read_json(path: Path, made_by: str) -> Any:
    """InputError that names the file where it is missing or not JSON."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist: run the {made_by} stage first") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is damaged: remove it and run the {made_by} stage again") from error


class Journal:
    """One JSON line per finished part, after a header that holds what the parts follow from.

    Entries of other inputs, and a line that was not written to its end, are dropped.

    Attributes:
        entries: those of earlier runs, and what was added since.
    """

    def __init__(self, path: Path, inputs: dict[str, Any]) -> None:
        self.path = path
        header = json.dumps(inputs, sort_keys=True)
        lines = path.read_text().splitlines() if path.exists() else []
        finished = [line for line in lines[1:] if _complete(line)] if lines and lines[0] == header else []
        self.entries: list[Any] = [json.loads(line) for line in finished]
        with atomically(path) as partial:  # a full disk must not cost what is there
            partial.write_text("\n".join([header, *finished]) + "\n")

    def add(self, entry: Any) -> None:
        """Raises InputError where the disk is full; a line that is cut short is dropped when the file is read."""
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(entry) + "\n")
        except OSError as error:
            raise unwritable(self.path, error) from error
        self.entries.append(entry)


def _complete(line: str) -> bool:
    """Whether a line was written to its end."""
    try:
        return bool(json.loads(line))
    except json.JSONDecodeError:
        return False
