"""Data sets of prompts, read from the hub or from a local file with the same fields.

A local file is `.json`, `.jsonl` or `.parquet`, packed or not; any other file is plain text with one record per line.
Only the first turn of a conversation is taken. A prompt's source is its text, so that splits do not depend on the order
of a file, and the same text is taken once.
"""

from __future__ import annotations

import hashlib
import string
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data_gen.texts.prompts import Prompt
from selector.files import first_line
from selector.schema import InputError

BUILDERS = {".json": "json", ".jsonl": "json", ".parquet": "parquet"}  # of local files, by suffix


@dataclass(frozen=True)
class PromptSet:
    """A data set. The format strings are over a record's fields."""

    hub: dict[str, str]  # arguments of `datasets.load_dataset`, with split `train` by default; empty: a file is needed
    prompts: tuple[str, ...]  # format strings; the first one whose fields all exist makes the prompt
    kind: str = ""  # a format string for the task; the set's name if empty
    kinds: dict[str, str] = field(default_factory=dict)  # other names for some of the tasks that `kind` gives


MULTI_TURN = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
CODE = "Write a Python program that solves this problem.\n\n{question_content}\n\n{starter_code}"
TRANSLATE = "Translate from English to {language}:\n\n{{translation[en]}}"
LIVECODE = "hf://datasets/livecodebench/code_generation_lite/*.jsonl"
SPEC_BENCH = "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
SUBTITLES = "hf://datasets/Helsinki-NLP/open_subtitles@refs%2Fconvert%2Fparquet/en-hi/train/*.parquet"
SETS = {
    "math500": PromptSet({"path": "HuggingFaceH4/MATH-500", "split": "test"}, ("{problem}",)),
    "olympiadbench": PromptSet({"path": "Hothan/OlympiadBench", "name": "OE_TO_maths_en_COMP"}, ("{question}",)),
    "livecodebench": PromptSet({"path": "json", "data_files": LIVECODE}, ("{turns[0]}", CODE)),
    "litbench": PromptSet({"path": "SAA-Lab/LitBench-Train"}, ("{prompt}",)),
    "opus_books": PromptSet(
        {"path": "Helsinki-NLP/opus_books", "name": "en-fr"}, (TRANSLATE.format(language="French"),)
    ),
    "opus_subtitles": PromptSet({"path": "parquet", "data_files": SUBTITLES}, (TRANSLATE.format(language="Hindi"),)),
    "spec_bench": PromptSet(
        {"path": "json", "data_files": SPEC_BENCH},
        ("{turns[0]}",),
        "{category}",
        dict.fromkeys(MULTI_TURN, "multi_turn"),
    ),
    "mt_bench": PromptSet({"path": "HuggingFaceH4/mt_bench_prompts"}, ("{turns[0]}", "{prompt[0]}"), "{category}"),
    "gsm8k": PromptSet({"path": "openai/gsm8k", "name": "main", "split": "test"}, ("{question}",)),
    "humaneval": PromptSet({"path": "openai/openai_humaneval", "split": "test"}, ("{prompt}",)),
    "lines": PromptSet({}, ("{text}",)),
}


def read_set(name: str, file: Path | None = None) -> tuple[list[Prompt], int]:
    """The prompts of a set, in its order, and its number of records. Empty and repeated texts give no prompt.
    InputError where the hub or the file cannot be read, or a record has other fields; names the set and the record."""
    own = SETS[name]
    where = str(file or own.hub["path"])
    prompts: dict[str, Prompt] = {}
    number = 0
    for number, record in enumerate(_records(name, file), 1):
        text = next((text for template in own.prompts if (text := _filled(template, record)) is not None), None)
        if text is None:
            fields = ", ".join(own.prompts)
            raise InputError(f"prompts.sets: {name}: {where}: record {number} has not the fields of {fields!r}")
        kind = _filled(own.kind, record) or (file.stem if file and not own.hub else name)
        identity = f"{name}:{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        if text.strip():
            prompts.setdefault(identity, Prompt(identity, text, own.kinds.get(kind, kind), identity))
    if not prompts:
        raise InputError(f"prompts.sets: {name}: {where}: holds no prompts")
    return list(prompts.values()), number


class _Fields(string.Formatter):
    """Treats an empty field of a record as a missing one."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        value, used = super().get_field(field_name, args, kwargs)
        if value is None:
            raise KeyError(field_name)
        return value, used


def _filled(template: str, record: dict[str, Any]) -> str | None:
    try:
        return _Fields().vformat(template, (), record)
    except (KeyError, IndexError, TypeError):
        return None


def _records(name: str, file: Path | None) -> Iterator[dict[str, Any]]:
    from datasets import load_dataset  # a second to import

    source: dict[str, Any] = SETS[name].hub
    if file is not None:
        builder = next((BUILDERS[suffix] for suffix in file.suffixes if suffix in BUILDERS), "text")
        source = {"path": builder, "data_files": str(file)}
    try:
        yield from load_dataset(**{"split": "train", **source}, streaming=True)
    except Exception as error:  # a damaged file or a missing network may raise anything
        raise InputError(f"prompts.sets: {name}: cannot read {file or source['path']}: {first_line(error)}") from error
