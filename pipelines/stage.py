"""What all stages share: validity of earlier outputs, provenance, progress, and MLflow.

A stage's output is valid while the fingerprint of everything it depends on is the one it was made with. The
fingerprint is kept in the clear (`stages/<name>.json`), so that a mismatch can say what changed.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from data_gen.traces import differences, flat, listed_changes
from pipelines.config import Config
from selector.schema import InputError

console = Console(highlight=False, width=None if sys.stdout.isatty() else 150)
DEFAULT_STORE = "sqlite:///mlruns/mlflow.db"
PACKAGES = ("torch", "transformers", "pytorch-lightning", "torchmetrics", "datasets", "pyarrow", "mlflow")


@dataclass(frozen=True)
class Stage:
    """One stage of a run: what its output depends on, and the record of what it was made from.

    Attributes:
        depends: everything the output follows from; JSON values.
        outputs: files or folders that exist once the stage is done.
        costly: never made anew over an earlier output; a changed input is an error instead.
    """

    name: str
    config: Config
    depends: dict[str, Any]
    outputs: tuple[Path, ...]
    costly: bool = False

    @property
    def record(self) -> Path:
        return record_path(self.config, self.name)

    def begin(self, intact: Callable[[], bool] = lambda: True) -> bool:
        """Whether there is anything to do. Says so where earlier output is reused, or made anew, and why.

        Args:
            intact: a closer look at outputs that are there; asked before they are reused.

        Raises:
            InputError: the stage is costly, and there is output of other inputs.
        """
        recorded = read_json(self.record, self.name) if self.record.exists() else None
        changes = [] if recorded is None else differences(recorded["depends"], self.depends)
        reusable = recorded is not None and recorded["finished"] and not changes
        if self.costly and any(_holds_anything(path) for path in self.outputs):
            advice = "choose another name= or remove " + ("them" if len(self.outputs) > 1 else "it")
            places = " and ".join(str(path) for path in self.outputs)
            if recorded is None:
                raise InputError(f"{places}: there, but not known to be finished; {advice}")
            if changes:
                raise InputError(f"{places}: made from other inputs ({listed_changes(changes)}); {advice}")
        if reusable and all(path.exists() for path in self.outputs) and intact():
            self.say(f"reusing {self.outputs[0]}: nothing it depends on has changed")
            return False
        if changes:
            self.say(f"made anew: {listed_changes(changes)}")
        if self.costly:
            self.replace()
        return True

    def replace(self) -> None:
        """From here on the earlier output is no more: call it before the first write."""
        self._write(finished=False)

    def finish(self) -> None:
        """Record that the output is complete."""
        self._write(finished=True)

    def say(self, message: str) -> None:
        console.print(f"[bold]{self.name}[/]: {message}", soft_wrap=True)

    def _write(self, finished: bool) -> None:
        record = {"depends": self.depends, "finished": finished, "provenance": provenance(self.config)}
        write_json(self.record, record)


def record_path(config: Config, stage: str) -> Path:
    return config.folder / "stages" / f"{stage}.json"


def require(config: Config, stage: str, current: dict[str, Any]) -> None:
    """That an earlier stage is finished and was made from the current config.

    Args:
        current: what it depends on now; keys that are left out are not compared.

    Raises:
        InputError: it is missing, unfinished, or made from something else.
    """
    record = read_json(record_path(config, stage), stage)
    if not record["finished"]:
        raise InputError(f"{config.folder}: the {stage} stage is not finished: run it again")
    changes = differences({key: record["depends"].get(key) for key in current}, current)
    if changes:
        raise InputError(
            f"{config.folder}: the {stage} stage was run with other inputs ({listed_changes(changes)}): run it again"
        )


def _holds_anything(path: Path) -> bool:
    return any(path.iterdir()) if path.is_dir() else path.exists()


def write_json(path: Path, value: Any) -> None:
    """Write atomically: under a temporary name, then renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".tmp")
    try:
        partial.write_text(json.dumps(value, indent=1) + "\n")
        partial.replace(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written: {error.strerror}") from error


def read_json(path: Path, made_by: str) -> Any:
    """InputError that names the file where it is missing or not JSON."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist: run the {made_by} stage first") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"{path} is damaged: remove it and run the {made_by} stage again") from error


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


def tracking_uri() -> str:
    return os.environ.get("MLFLOW_TRACKING_URI", DEFAULT_STORE)


@contextmanager
def mlflow_run(config: Config, stage: str) -> Iterator[Any]:
    """An MLflow run of experiment `<name>` with the resolved config; yields the `mlflow` module.

    Raises:
        InputError: MLflow's store cannot be used or written; names it. What the stage itself raises comes first.
    """
    import mlflow  # seconds to import: only where it is used
    from sqlalchemy.exc import SQLAlchemyError

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    failures = (mlflow.MlflowException, SQLAlchemyError)
    uri = tracking_uri()
    try:
        try:
            if uri == DEFAULT_STORE:
                _make_store(Path(uri.removeprefix("sqlite:///")))
            mlflow.set_tracking_uri(uri)
            mlflow.set_experiment(config.name)
            mlflow.start_run(run_name=stage)
        except OSError as error:  # a folder that cannot be made
            raise InputError(f"{uri}: MLflow's store fails: {error}") from error
        try:
            mlflow.set_tag("stage", stage)
            mlflow.log_params(flat(config.model_dump(mode="json")))
            mlflow.log_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), "config.yaml")
            mlflow.log_dict(provenance(config), "provenance.json")
            yield mlflow
        except BaseException as error:
            status = "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
            logging.getLogger("mlflow").setLevel(logging.CRITICAL)
            with suppress(*failures):  # a full disk: the first error says more
                mlflow.end_run(status)
            raise
        mlflow.end_run()
    except failures as error:
        raise InputError(f"{uri}: MLflow's store fails: {str(error).splitlines()[0]}") from error


def _make_store(path: Path) -> None:
    """A new database under a temporary name: half a schema, left by a crash, would be refused ever after."""
    if path.exists():
        return
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    path.parent.mkdir(exist_ok=True)
    for stale in path.parent.glob(f"{path.name}.*.tmp*"):
        if not _alive(int(stale.name.removeprefix(f"{path.name}.").split(".")[0])):
            stale.unlink(missing_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    SqlAlchemyStore(f"sqlite:///{partial.resolve()}", str(path.parent.resolve())).engine.dispose()
    if path.exists():  # another process was faster
        partial.unlink()
    else:
        partial.replace(path)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
