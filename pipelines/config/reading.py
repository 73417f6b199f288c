"""From a YAML file and overrides to a config: strict, complete, and resolved before any work."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from pipelines.config.reference import known_keys
from pipelines.config.whole import Config
from selector.schema import InputError


def load_config(file: Path | None, overrides: list[str], base: dict[str, Any] | None = None) -> Config:
    """The resolved config of a YAML file and `section.key=value` overrides.

    Args:
        file: none for what the overrides and the base say alone.
        base: values that the file and the overrides may change.

    Raises:
        InputError: the file is missing or no YAML mapping, a key is unknown, or a value does not fit; one line.
    """
    values = {} if file is None else _values(file)
    for override in overrides:
        _apply(values, override)
    try:
        return Config.model_validate(_merged(base or {}, values))
    except ValidationError as error:
        raise InputError(f"{_origin(file, overrides, error)}: {_one_line(error)}") from error


def _values(file: Path) -> dict[str, Any]:
    """The keys of a YAML file; InputError where it is missing or holds none."""
    try:
        values = yaml.safe_load(file.read_text())
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise InputError(f"{file}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise InputError(f"{file}: expected a mapping of keys")
    return values


def _merged(base: dict[str, Any], values: dict[str, Any]) -> dict[str, Any]:
    """The values, and those of the base that they do not set."""
    merged = {**base, **values}
    for key, own in base.items():
        if isinstance(own, dict) and isinstance(values.get(key), dict):
            merged[key] = _merged(own, values[key])
    return merged


def _origin(file: Path | None, overrides: list[str], error: ValidationError) -> str:
    """Where the first mistake stands: in an override, of which the last one counts, or in the file.

    Where a section does not fit together, it is those overrides of its keys that the message mentions.
    """
    first = error.errors()[0]
    wrong = ".".join(str(part) for part in first["loc"])
    keys = {override.partition("=")[0]: override for override in overrides}
    exact = [override for key, override in keys.items() if f"{wrong}.".startswith(f"{key}.")]
    inside = [key for key in keys if not wrong or key.startswith(f"{wrong}.")]
    found = exact or [keys[key] for key in inside if key.rpartition(".")[2] in first["msg"]]
    return " ".join(map(repr, found)) if found else str(file or "the command line")


def _apply(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise InputError(f"{override!r}: an override reads section.key=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{override!r}: the value is not YAML") from error
    *sections, last = key.split(".")
    node = values
    for section in sections:
        inner = node.setdefault(section, {})
        if not isinstance(inner, dict):
            raise InputError(f"{override!r}: {section} is not a section")
        node = inner
    node[last] = value


def _one_line(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    key = key if key.isprintable() else repr(key)  # a line break in it would make two lines of the message
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        plain = ".".join(str(part) for part in first["loc"] if isinstance(part, str))
        close = difflib.get_close_matches(plain, known_keys(), n=1, cutoff=0.6)
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"unknown key {key}{hint}{more}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{key}: {message}{more}" if key else f"{message}{more}"
