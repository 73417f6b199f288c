"""Artefact directories on the Hugging Face hub."""

from __future__ import annotations

import re
from pathlib import Path

from selector.schema import InputError

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")


def local_folder(folder: str | Path, revision: str | None = None) -> Path:
    """The directory itself, or what is stored of a hub id, fetched where it is not.

    Args:
        folder: a directory, or `organisation/name`.
        revision: branch, tag or commit on the hub.

    Raises:
        InputError: there is no such directory, and the hub does not give it.
    """
    path = Path(folder)
    if path.is_dir() or isinstance(folder, Path) or not HUB_ID.fullmatch(folder):
        return path
    try:
        from huggingface_hub import snapshot_download
    except ModuleNotFoundError as error:
        raise InputError(f"{folder}: no such directory; to fetch it from the hub, install huggingface_hub") from error
    try:
        return Path(snapshot_download(folder, revision=revision))
    except Exception as error:  # the network's, the hub's and the cache's own, of many kinds
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{folder}: no such directory, and the hub does not give it: {reason}") from error
