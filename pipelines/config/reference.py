"""All keys of the config with their defaults and meanings, for `--help` and for the docs."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipelines.config.whole import Config


class Key(NamedTuple):
    """One key: its dotted name, its default as JSON (or "required"), and its description."""

    name: str
    default: str
    meaning: str


class Part(NamedTuple):
    """A section of the config and its own keys. The section with the name "" holds the keys of the run itself."""

    name: str
    meaning: str
    keys: list[Key]


def parts(model: type[BaseModel] = Config, name: str = "", default: BaseModel | None = None) -> Iterator[Part]:
    """A section, then the sections in it.

    Args:
        default: the section where the file does not mention it; None where it must be mentioned.
    """
    prefix = f"{name}." if name else ""
    keys, inner = [], []
    for key, field in model.model_fields.items():
        section = _section_in(field)
        if section is not None:
            own = field.default if isinstance(field.default, BaseModel) else None
            inner.append((section, prefix + key, own))
            continue
        required = default is None and field.is_required()
        value = field.default if default is None else getattr(default, key)
        keys.append(
            Key(prefix + key, "required" if required else json.dumps(value, default=str), field.description or "")
        )
    yield Part(name, inspect.getdoc(model) or "", keys)
    for arguments in inner:
        yield from parts(*arguments)


def known_keys() -> list[str]:
    """Every dotted key, sections included."""
    return [name for part in parts() for name in (part.name, *(key.name for key in part.keys)) if name]


def _section_in(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a key holds, or a list of them; None for any other key."""
    annotation: Any = field.annotation
    if typing.get_origin(annotation) is tuple:
        annotation = typing.get_args(annotation)[0]
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None
