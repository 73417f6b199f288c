"""Data sets of prompts, on the hub or in a local file with the same fields: `.json`, `.jsonl` or
`.parquet`, packed or not; any other file is plain text with one record per line.

Only the first turn of a data set's conversations is taken. The source of its prompts is their text,
so that splits do not depend on the order of a file, and the same text is taken once.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import yaml
from pydantic import BaseModel, TypeAdapter
from pydantic_core import from_json

from data_gen.texts.prompts import Prompt, read_lines
from selector.files import first_line
from selector.schema import InputError


class PromptSet(BaseModel):
    """A data set, as `sets.yaml` describes it."""

    hub: dict[str, str] = {}
    prompts: list[str]
    kind: str = ""
    kinds: dict[str, str] = {}


SETS = TypeAdapter(dict[str, PromptSet]).validate_python(
    yaml.safe_load(Path(__file__).with_name("sets.yaml").read_text(encoding="utf-8"))
)


def read_set(
    name: str, file: Path | None = None, called: str | None = None
) -> tuple[list[Prompt], int]:
    """The prompts of a set, of the kinds of its tasks or `called`, and its number of records. Empty
    and repeated texts give no prompt. InputError, with the set and the record, where they cannot be
    read or a record has other fields."""
    prompt_set = SETS[name]
    origin = file or prompt_set.hub["path"]
    where = f"prompts.sets: {name}: {origin}"
    default_kind = name
    if file is not None and not prompt_set.hub:
        default_kind = file.stem
    prompts: dict[str, Prompt] = {}
    number = 0
    for number, record in enumerate(_records(name, file), 1):
        try:
            text = _first_filled(prompt_set.prompts, record)
            kind = called or _filled(prompt_set.kind, record) or default_kind
        except ValueError as error:
            raise InputError(f"{where}: record {number}: {error}") from error
        if text is None:
            templates = ", ".join(prompt_set.prompts)
            raise InputError(f"{where}: record {number} has not the fields of {templates!r}")
        identity = f"{name}:{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        if text.strip():
            kind = prompt_set.kinds.get(kind, kind)
            prompts.setdefault(identity, Prompt(identity, text, kind, identity))
    if not prompts:
        raise InputError(f"{where}: holds no prompts")
    return list(prompts.values()), number


class _Fields(string.Formatter):
    """Treats an empty field of a record as a missing one, and a string where there should be turns
    as the first one."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        name = field_name.partition("[")[0]
        whole = kwargs.get(name)
        if isinstance(whole, str):
            value = whole
        else:
            value, _ = super().get_field(field_name, args, kwargs)
        if value is None:
            raise KeyError(field_name)
        if not isinstance(value, str | int | float):
            raise ValueError(f"{field_name} is no text, but was read as a {type(value).__name__}")
        return value, name


def _first_filled(templates: Iterable[str], record: dict[str, Any]) -> str | None:
    for template in templates:
        text = _filled(template, record)
        if text is not None:
            return text
    return None


def _filled(template: str, record: dict[str, Any]) -> str | None:
    try:
        return _Fields().vformat(template, (), record)
    except (KeyError, IndexError, TypeError, AttributeError):
        return None


def _records(name: str, file: Path | None) -> Iterator[Any]:
    location: dict[str, Any] = SETS[name].hub
    try:
        if file is not None:
            if {".json", ".jsonl"} & {*file.suffixes}:
                yield from _json_records(file)
                return
            file_type = "parquet" if ".parquet" in file.suffixes else "text"
            location = {"path": file_type, "data_files": str(file)}
        from datasets import load_dataset  # a second to import

        arguments: dict[str, Any] = {"split": "train", **location}
        yield from load_dataset(**arguments, streaming=True)
    except Exception as error:  # a damaged file or a missing network may raise anything
        origin = file or location["path"]
        raise InputError(
            f"prompts.sets: {name}: cannot read {origin}: {first_line(error)}"
        ) from error


def _json_records(file: Path) -> list[Any]:
    """As they stand: `datasets` guesses dates, and quotes all texts of a field whose type changes
    in a large file."""
    try:
        content = from_json(pa.input_stream(str(file)).read())  # unpacks by the name's end
    except ValueError:  # lines
        return read_lines(file, lambda _, record: record)
    return content if isinstance(content, list) else [content]
