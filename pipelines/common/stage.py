"""What all stages share: validity of earlier outputs, and provenance.

A stage's output is valid while the fingerprint of everything it depends on is the one it was made with. The
fingerprint is kept in the clear (`stages/<name>.json`), so that a mismatch can say what changed.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from data_gen.traces import differences, listed_changes
from pipelines.common.console import console
from pipelines.common.files import read_json, write_json
from pipelines.config import Config
from selector.schema import InputError

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
