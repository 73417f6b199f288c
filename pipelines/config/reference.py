"""All keys of the config with their defaults and meanings, from the schema: for `--help` and for the docs."""

from __future__ import annotations

import inspect
import json
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from pipelines.config.whole import Config

READS = {  # sections that a stage reads, beside the keys of the run itself
    "pair": ("pair", "prompts"),
    "latency": ("pair", "prompts", "sampling", "latency", "train"),
    "data": ("pair", "prompts", "sampling", "data"),
    "train": ("sampling", "data", "train"),
    "evaluate": ("pair", "prompts", "sampling", "train", "evaluate"),
    "export": ("pair", "sampling", "train", "export"),
    "report": ("sampling", "train"),
    "logs": ("logs", "sampling", "prompts", "train"),
    "quick": ("pair", "prompts", "sampling", "data", "latency", "quick"),
    "audit": ("pair", "prompts", "data", "audit"),
    "bench": ("bench",),
}


@dataclass(frozen=True)
class Key:
    """One key: its dotted name, its default as JSON (or "required"), and what it means."""

    name: str
    default: str
    meaning: str


@dataclass(frozen=True)
class Part:
    """A section of the config, "" for the keys of the run itself; and its own keys."""

    name: str
    meaning: str
    keys: list[Key]


def parts(model: type[BaseModel] = Config, name: str = "", default: BaseModel | None = None) -> Iterator[Part]:
    """A section, then the sections in it.

    Args:
        default: the section as it is where the file does not mention it; None where it must be mentioned.
    """
    prefix = f"{name}." if name else ""
    keys = [
        Key(f"{prefix}{key}", _default(key, field, default), field.description or "")
        for key, field in model.model_fields.items()
        if inner_section(field) is None
    ]
    yield Part(name, inspect.getdoc(model) or "", keys)
    for key, field in model.model_fields.items():
        if (inner := inner_section(field)) is not None:
            given = field.default if isinstance(field.default, BaseModel) else None
            yield from parts(inner, f"{prefix}{key}", given)


def inner_section(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a key holds, or a list of them; None for any other key."""
    annotation: Any = field.annotation
    if typing.get_origin(annotation) is tuple:
        annotation = typing.get_args(annotation)[0]
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def known_keys() -> list[str]:
    """Every dotted key, sections included."""
    return [name for part in parts() for name in (part.name, *(key.name for key in part.keys)) if name]


def _default(key: str, field: FieldInfo, default: BaseModel | None) -> str:
    if default is None and field.is_required():
        return "required"
    return json.dumps(field.default if default is None else getattr(default, key), default=str)
