"""Files and folders that are written whole or not at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selector.schema import InputError


@contextmanager
def atomically(path: Path) -> Iterator[Path]:
    """A temporary path beside `path`; what stands there when the block ends without an error takes the place of `path`.

    A file is on the disk before it is renamed, so one with its final name is whole. An earlier folder is removed once
    the new one stands. After an error, what was there before is unchanged.

    Raises:
        InputError: something cannot be written; names the path.
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
        if not isinstance(error, OSError) and "(os error " not in str(error):  # as errors of libraries in Rust end
            raise
        _remove(partial)
        raise unwritable(partial, error) from error


def unwritable(path: Path | str, error: Exception) -> InputError:
    """The message where a disk is full, or not writable."""
    reason = error.strerror if isinstance(error, OSError) else None
    place = getattr(error, "filename2", None) or getattr(error, "filename", None) or path  # the second: copied to
    advice = "make room there, or make it writable; the same command then goes on"
    return InputError(f"{place}: cannot be written: {reason or error}; {advice}")


def _remove(path: Path) -> None:
    """A file, a folder, or nothing."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
