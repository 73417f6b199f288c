"""Writes the generated files: the reference of all config keys, their JSON schema, and the
reference of what `selector` and `data_gen` export.

`make docs` runs this script; a test fails if a page differs from what it writes.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from types import ModuleType
from typing import Any

from pydantic import BaseModel

import data_gen
import selector
from pipelines.config import Config, section_of

DOCS = Path(__file__).parent

CONFIGURATION = """# Configuration

This page lists every key of a run's YAML file. It is generated from the schema (`make docs`). On
the command line `section.key=value` overrides a key, for example
`espalier demo train.epochs=4 "verifiers=[specinfer,traversal]"`. An unknown key is an error that
names the nearest known one.

Editors with a YAML language server complete and check the keys where a file begins with this line,
whose path is relative to the file:
`# yaml-language-server: $schema=../docs/config.schema.json`.
"""


def configuration(
    model: type[BaseModel] = Config, section: str = "", default: BaseModel | None = None
) -> str:
    """The reference of the keys of a section, then those of the sections in it.

    Args:
        default: the section where the file does not mention it; None where it must be mentioned.
    """
    prefix = f"{section}." if section else ""
    lines = []
    sections = []
    for key, field in model.model_fields.items():
        inner_model = section_of(field)
        if inner_model:
            whole = field.default if isinstance(field.default, BaseModel) else None
            sections.append(configuration(inner_model, prefix + key, whole))
            continue
        shown = "required"
        if default is not None or not field.is_required():
            value = field.default if default is None else getattr(default, key)
            shown = f"`{_escaped(json.dumps(value, default=str))}`"
        description = _escaped(" ".join((field.description or "").split()))
        lines.append(f"| `{prefix}{key}` | {shown} | {description} |\n")
    title = f"`{section}`" if section else "The run"
    page = f"\n## {title}\n\n{inspect.getdoc(model)}\n"
    if lines:
        page += "\n| key | default | meaning |\n|---|---|---|\n" + "".join(lines)
    if not section:
        page = CONFIGURATION + page
    return page + "".join(sections)


def _escaped(text: str) -> str:
    return text.replace("|", "\\|")


def schema() -> str:
    """The JSON schema of a run's YAML file, by which editors complete and check its keys."""
    return json.dumps(Config.model_json_schema(), indent=1) + "\n"


WIDTH = 100  # of a line of code
LONGEST_DEFAULT = 30  # characters of a default that is shown
REFERENCE = """# Reference

This page lists what `selector` and `data_gen` export. It is generated from their docstrings (`make
docs`). The names of tensors end in letters for their axes: A actions, B requests, D hidden width, F
scalars, K branches, N nodes of a tree, R positions, T tokens, V vocabulary. Times are in seconds.
[Examples](examples) show most of it in use.
"""


def reference() -> str:
    """The reference of what the packages export."""
    parts = [REFERENCE]
    for package in (selector, data_gen):
        parts.append(f"\n## `{package.__name__}`\n\n{inspect.getdoc(package)}\n")
        parts += _entries(package)
    return "".join(parts)


def _entries(package: ModuleType) -> Iterator[str]:
    """What a package exports, in the order of its list."""
    for name in package.__all__:
        value = getattr(package, name)
        if not callable(value):
            yield f"\n### `{name}`\n\nThe keys are {', '.join(f'`{key}`' for key in value)}.\n"
            continue
        yield f"\n### `{name}`\n\n{_signature(name, value)}{_page_text(value)}"
        if inspect.isclass(value):
            yield from _members(value)


def _members(cls: type) -> Iterator[str]:
    """The documented methods and properties of a class."""
    for name, member in vars(cls).items():
        if isinstance(member, classmethod | staticmethod):
            member = getattr(cls, name)
        if name.startswith("_") or not inspect.getdoc(member):
            continue
        if isinstance(member, property | cached_property):
            yield f"\n`{cls.__name__}.{name}`\n\n{inspect.getdoc(member)}\n"
        elif inspect.isroutine(member):
            yield f"\n{_signature(f'{cls.__name__}.{name}', member)}{_page_text(member)}"


class _Shown(str):
    """A part of a signature that is shown as it is, without quotes."""

    __slots__ = ()
    __repr__ = str.__str__


def _annotation(annotation: Any) -> str:
    """An annotation as it stands in the code."""
    if isinstance(annotation, str):
        return annotation
    return getattr(annotation, "__forward_arg__", None) or inspect.formatannotation(annotation)


def _parameter(parameter: inspect.Parameter) -> str:
    if parameter.annotation is not parameter.empty:
        parameter = parameter.replace(annotation=_Shown(_annotation(parameter.annotation)))
    default = repr(parameter.default)
    if len(default) > LONGEST_DEFAULT or default == "<factory>":  # of a dataclass's field
        parameter = parameter.replace(default=_Shown(".."))
    return str(parameter)


def _signature(name: str, function: Any) -> str:
    """A signature as a block of code, on one line where it fits; nothing for an exception."""
    if inspect.isclass(function) and issubclass(function, Exception):
        return ""
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    words = [_parameter(parameter) for parameter in parameters if parameter.name != "self"]
    returned = ""
    if not inspect.isclass(function):
        returned = f" -> {_annotation(signature.return_annotation)}"
    line = f"{name}({', '.join(words)}){returned}"
    if len(line) > WIDTH:
        line = f"{name}(\n    " + ",\n    ".join(words) + f",\n){returned}"
    return f"```text\n{line}\n```\n\n"


def _page_text(documented: Any) -> str:
    """A docstring in Markdown, in which the entries of its sections (`Args:`) are lists."""
    text = inspect.getdoc(documented) or ""
    if text.startswith(f"{documented.__name__}("):  # written by `dataclass`
        return ""
    text = re.sub(r"^(\w+):\n(?=    )", r"\1:\n\n", text, flags=re.MULTILINE)
    text = re.sub(r"^    (\w[\w, ]*):", r"- `\1`:", text, flags=re.MULTILINE)
    return re.sub(r"^        (?=\S)", "  ", text, flags=re.MULTILINE) + "\n"


PAGES = {
    "configuration.md": configuration,
    "config.schema.json": schema,
    "reference.md": reference,
}

if __name__ == "__main__":
    for name, made in PAGES.items():
        (DOCS / name).write_text(made(), encoding="utf-8")
