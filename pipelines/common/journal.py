"""Finished parts of a long stage, so that an interrupted one goes on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from selector.files import atomically, unwritable


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
