"""What earlier processes found out about models: hashes of their weights, and up to what length
they were checked.

Both take seconds and never change. An entry is a small JSON file in the user's cache. It belongs to
the files that a model was loaded from, by their names, sizes and times of change, to its config,
and to the versions of the packages that loaded it. A model that was not loaded here, or whose
weights were changed in memory since, has no entry, and is remembered in its process alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import weakref
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from data_gen.models.prepack import PrepackedLinear
from selector.files import atomically
from selector.schema import InputError

PACKAGES = ("torch", "transformers", "espalier-decoding")
State = tuple[int, int]  # as `_state` returns it


class Origin(NamedTuple):
    """Where a model's weights came from, and their state when they did."""

    files: str  # a digest
    state: State


_origins: weakref.WeakKeyDictionary[Any, Origin] = weakref.WeakKeyDictionary()
# what is known in this process, by the model as it is (`_as_it_is`)
_entries: weakref.WeakKeyDictionary[Any, dict[str, dict[str, Any]]] = weakref.WeakKeyDictionary()


def cache_folder() -> Path:
    """Where converted models and what is known of models are kept: `$ESPALIER_CACHE`, else
    `espalier` in the user's cache."""
    espalier_cache = os.environ.get("ESPALIER_CACHE")
    if espalier_cache:
        return Path(espalier_cache).absolute()
    user_cache = os.environ.get("XDG_CACHE_HOME")
    if user_cache:
        return Path(user_cache) / "espalier"
    return Path.home() / ".cache" / "espalier"


def loaded_from(model: Any, folder: Path, target: Any = None) -> None:
    """Remember that a model's weights are those of a folder's files; of a distilled draft also
    those of its target."""
    files = []
    for path in sorted(folder.iterdir()):
        if path.is_file():
            about = path.stat()  # of what a link points to
            files.append([str(path.resolve()), about.st_size, about.st_mtime_ns, about.st_ctime_ns])
    target_files = None
    if target is not None:
        origin = _origins.get(target)
        if origin is None:
            return
        target_files = origin.files
    parts = [files, target_files, *map(version_of, PACKAGES)]
    digest = hashlib.sha256(json.dumps(parts).encode()).hexdigest()
    _origins[model] = Origin(digest, _state(model))


def version_of(package: str) -> str:
    """A package's version; empty where it is not installed."""
    with suppress(PackageNotFoundError):  # inside an engine, from a folder on the path
        return version(package)
    return ""


def recall(model: Any, key: str) -> Any:
    """What is remembered of a model under a key; None for nothing."""
    return _entries_of(model).get(key)


def remember(model: Any, key: str, value: Any) -> None:
    """Remember a JSON value, for later processes, too, if the model's files are known; an
    unwritable cache only costs time."""
    _entries_of(model)[key] = value
    path = _path(model)
    if path:
        with suppress(InputError), atomically(path) as partial:
            partial.write_text(json.dumps({**_read(path), key: value}))


def _entries_of(model: Any) -> dict[str, Any]:
    by_state = _entries.setdefault(model, {})
    state = _as_it_is(model)
    if state not in by_state:
        path = _path(model)
        by_state[state] = _read(path) if path else {}
    return by_state[state]


def _read(path: Path) -> dict[str, Any]:
    entries: dict[str, Any] = {}
    with suppress(OSError, ValueError):  # there is none, or it is damaged
        entries = json.loads(path.read_text())
    return entries


def _path(model: Any) -> Path | None:
    origin = _origins.get(model)
    if origin is None or origin.state != _state(model):
        return None
    digest = hashlib.sha256(f"{origin.files} {_as_it_is(model)}".encode()).hexdigest()
    return cache_folder() / "known" / f"{digest[:32]}.json"


def _as_it_is(model: Any) -> str:
    """The model's weights, by `_state`, and how it computes."""
    implementation = model.config.get_text_config()._attn_implementation
    parts = [
        _state(model),
        model.config.to_json_string(),
        implementation,
        str(model.dtype),
        model.device.type,
    ]
    return json.dumps(parts)


def _state(model: Any) -> State:
    """The number of a model's weights, and a number that rises when one of them is changed in
    place. Prepacked weights count as before; tied ones stay parameters."""
    weights = list(model.parameters())
    count = len(weights)
    changes = sum(weight._version for weight in weights if not weight.is_inference())
    for layer in model.modules():
        if isinstance(layer, PrepackedLinear) and not layer.is_tied:
            count += 1
            changes += layer.changes
    return count, changes
