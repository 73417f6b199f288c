"""Files and folders that are written completely or not at all, their JSON, and arrays in files."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selector.schema import InputError

Array = NDArray[Any]
DTYPES = {"F32": np.float32, "I64": np.int64, "BOOL": np.bool_}


@contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`, whose file or folder is renamed to `path` when the block ends
    without an error.

    After an error, `path` is unchanged, and nothing stays beside it. Raises InputError, which names
    the path, where something cannot be written.
    """
    partial = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove(partial)
        yield partial
        if partial.is_dir():
            old = path.with_name(path.name + ".old")  # a folder cannot be renamed over another one
            _remove(old)
            if path.exists():
                path.rename(old)
            partial.rename(path)
            _remove(old)
        else:
            with partial.open("rb") as file:
                os.fsync(file.fileno())
            partial.replace(path)
    except Exception as error:
        _remove(partial)
        # as errors of libraries in Rust end
        if not isinstance(error, OSError) and "(os error " not in str(error):
            raise
        raise unwritable(partial, error) from error


def json_text(value: Any) -> str:
    """JSON; numbers that are not finite, which JSON cannot hold, become null."""
    return json.dumps(_finite(value), indent=1, allow_nan=False) + "\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def read_tensors(path: Path) -> dict[str, Array]:
    """The arrays of a safetensors file by name; without its library, which an engine need not
    have."""
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    header.pop("__metadata__", None)
    body = memoryview(content)[8 + size :]
    arrays: dict[str, Array] = {}
    for name, entry in header.items():
        flat: Array = np.frombuffer(body[slice(*entry["data_offsets"])], DTYPES[entry["dtype"]])
        arrays[name] = flat.reshape(entry["shape"])
    return arrays


def unwritable(path: Path | str, error: Exception) -> InputError:
    """The message for a disk that is full or not writable."""
    reason = str(error)
    if isinstance(error, OSError) and error.strerror:
        reason = error.strerror
    # a copy's destination, if it has one, is the path that could not be written
    failed_path = path
    for attribute in ("filename2", "filename"):
        if getattr(error, attribute, None):
            failed_path = getattr(error, attribute)
            break
    advice = "make room there, or make it writable; the same command then goes on"
    return InputError(f"{failed_path}: cannot be written: {reason}; {advice}")


def first_line(error: Exception) -> str:
    """The first line of a library's message; the error's class where there is none."""
    message = str(error).strip()
    if not message:
        return type(error).__name__
    return message.splitlines()[0]


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()
