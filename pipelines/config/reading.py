"""Reads the config of a run from a YAML file and overrides, and lists its keys."""

from __future__ import annotations

import difflib
import typing
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from pipelines.config.sections import Config
from selector.schema import InputError

Values = dict[str, Any]
LOGS_BASE: Values = {  # the base of the stage `logs`
    "name": "logs",
    "sampling": [{"temperature": 0.0}],
    "prompts": {"validation": 0.15, "test": 0.25},
    "latency": {"stepped": False},
    "train": {"hidden": [256, 256], "batch": 4096, "epochs": 12, "objectives": ["regressor"]},
}


def load_config(file: Path | None, overrides: list[str], base: Values | None = None) -> Config:
    """The resolved config of a YAML file and `section.key=value` overrides.

    Args:
        file: None where the overrides and the base are all there is.
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
        raise InputError(_one_line(error)) from error


def _values(file: Path) -> Values:
    try:
        values = yaml.safe_load(file.read_text())
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise InputError(f"{file}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise InputError(f"{file}: expected a mapping of keys")
    return values


def _apply(values: Values, override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator:
        raise InputError(f"{override!r}: an override reads section.key=value")
    *sections, last = key.split(".")
    for section in sections:
        values = values.setdefault(section, {})
        if not isinstance(values, dict):
            raise InputError(f"{override!r}: {section} is not a section")
    try:
        values[last] = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError) as error:
        raise InputError(f"{key}: the value is not YAML") from error


def _merged(base: Values, values: Values) -> Values:
    both = {key: own for key, own in base.items() if isinstance(own, dict) and isinstance(values.get(key), dict)}
    return {**base, **values, **{key: _merged(own, values[key]) for key, own in both.items()}}


def _one_line(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    key = key if key.isprintable() else repr(key)  # it may hold a line break
    if first["type"] == "extra_forbidden":
        plain = ".".join(part for part in first["loc"] if isinstance(part, str))
        close = difflib.get_close_matches(plain, known_keys(), n=1)
        return f"unknown key {key}" + (f"; did you mean {close[0]}?" if close else "")
    message = first["msg"].removeprefix("Value error, ")
    return f"{key}: {message}" if key else message


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a key holds, or a list of; None for a plain value."""
    kind: Any = field.annotation
    if typing.get_origin(kind) is tuple:
        kind = typing.get_args(kind)[0]
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every dotted key, sections included."""
    found = []
    for key, field in model.model_fields.items():
        section = section_of(field)
        found += [prefix + key, *(known_keys(section, f"{prefix}{key}.") if section else ())]
    return found
