"""Files of a run: written whole or not at all, and read with a clear word where they are damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from selector.files import atomically
from selector.schema import InputError


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
