"""Data sets read from small files of their schemas; the hub is not asked."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data_gen.texts.prompt_sets import read_set
from data_gen.texts.prompts import read_prompts
from tests.checks import one_line
from tests.pipelines.small_logs import write

TRANSLATE = "Translate from English to {}:\n\nGood day."
# set, a record of its schema, the prompt, the task
RECORDS: list[tuple[str, dict[str, Any], str, str]] = [
    (
        "math500",
        {"problem": "1 + 1?", "answer": "2", "subject": "Algebra", "unique_id": "a/1"},
        "1 + 1?",
        "math500",
    ),
    (
        "olympiadbench",
        {"id": 1, "context": None, "question": "Find $x$.", "unit": None},
        "Find $x$.",
        "olympiadbench",
    ),
    ("livecodebench", {"turns": ["Sort {them}."]}, "Sort {them}.", "livecodebench"),
    (
        "livecodebench",
        {"question_content": "Sort.", "starter_code": "def f():", "platform": "leetcode"},
        "Write a Python program that solves this problem.\n\nSort.\n\ndef f():",
        "livecodebench",
    ),
    (
        "litbench",
        {"prompt": "A ship.", "chosen_story": "It sank.", "rejected_story": ""},
        "A ship.",
        "litbench",
    ),
    (
        "opus_books",
        {"id": "0", "translation": {"en": "Good day.", "fr": ""}},
        TRANSLATE.format("French"),
        "opus_books",
    ),
    (
        "opus_subtitles",
        {"translation": {"en": "Good day.", "hi": ""}},
        TRANSLATE.format("Hindi"),
        "opus_subtitles",
    ),
    ("flores", {"text": "Good day."}, TRANSLATE.format("French"), "flores"),
    ("spec_bench", {"question_id": 5, "category": "qa", "turns": ["Who?"]}, "Who?", "qa"),
    ("spec_bench", {"question_id": 5, "category": "qa", "turns": "Who?"}, "Who?", "qa"),
    (
        "mt_bench",
        {"question_id": 81, "category": "writing", "turns": ["Go.", "Rewrite."]},
        "Go.",
        "writing",
    ),
    (
        "mt_bench",
        {"prompt_id": 81, "category": "stem", "prompt": ["Why?", "Rewrite."]},
        "Why?",
        "stem",
    ),
    ("gsm8k", {"question": "How many?", "answer": "#### 3"}, "How many?", "gsm8k"),
    (
        "humaneval",
        {"task_id": "HumanEval/0", "prompt": "def f():\n", "test": ""},
        "def f():\n",
        "humaneval",
    ),
]


@pytest.mark.parametrize(("name", "record", "text", "kind"), RECORDS)
def test_a_record_gives_its_prompt_and_its_task(
    tmp_path: Path, name: str, record: dict[str, Any], text: str, kind: str
) -> None:
    (prompt,), records = read_set(name, write(tmp_path / "set.jsonl", [record]))
    assert (prompt.text, prompt.kind, records) == (text, kind, 1)
    assert prompt.id == prompt.source and prompt.id.startswith(f"{name}:")


@pytest.mark.parametrize("suffix", [".json", ".json.gz", ".jsonl.gz", ".parquet"])
def test_files_of_all_kinds_give_the_same_prompts(tmp_path: Path, suffix: str) -> None:
    records = [{"problem": f"{n} + 1?", "unit": None, "turns": ["a", "b"]} for n in range(5)]
    plain, path = write(tmp_path / "set.jsonl", records), tmp_path / f"other{suffix}"
    if suffix.startswith(".json") and not suffix.startswith(".jsonl"):
        array = json.dumps(records).encode()
        path.write_bytes(gzip.compress(array) if suffix.endswith(".gz") else array)
    elif suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(records), path)
    else:
        path.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_set("math500", path) == read_set("math500", plain)


def test_plain_lines_are_prompts_of_the_kind_of_their_file(tmp_path: Path) -> None:
    (tmp_path / "alice.txt").write_text("Down.\n\n  \nUp.\nDown.\n")
    prompts, records = read_set("lines", tmp_path / "alice.txt")
    assert [(prompt.text, prompt.kind) for prompt in prompts] == [
        ("Down.", "alice"),
        ("Up.", "alice"),
    ]
    assert records == 5


def test_texts_that_look_like_something_else_stay_texts(tmp_path: Path) -> None:
    """Like the ends of lines, types of Arrow, or JSON."""
    odd = [
        "a\u2028b\u2029c\u0085d",
        "list<item: string>",
        "timestamp[s]",
        '{"a": 1}',
        "null",
        "2024-01-10",
    ]
    lines, plain = tmp_path / "set.jsonl", tmp_path / "set.txt"
    lines.write_text(
        "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in odd), encoding="utf-8"
    )
    plain.write_text("\n".join(odd), encoding="utf-8")
    for prompts in (read_prompts(lines), *(read_set("lines", path)[0] for path in (lines, plain))):
        assert [prompt.text for prompt in prompts] == odd


def test_the_same_text_is_taken_once_and_keeps_its_source_in_any_order(tmp_path: Path) -> None:
    records = [{"prompt": text} for text in ("A ship.", "A cat.", "A ship.")]
    one, records_seen = read_set("litbench", write(tmp_path / "one.jsonl", records))
    other, _ = read_set("litbench", write(tmp_path / "other.jsonl", records[::-1]))
    assert (len(one), records_seen) == (2, 3)
    assert sorted(one, key=lambda p: p.id) == sorted(other, key=lambda p: p.id)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"problem": "a"}\n{"question": "b"}\n', "record 2 has not the fields of '{problem}'"),
        ('{"problem": "a"}\n{"problem"', "cannot read"),
        ('{"problem": " "}\n', "holds no prompts"),
        ('[{"problem": "a"}, 5]', "record 2 has not the fields"),
        ('{"problem": ["a"]}\n', "record 1: problem is no text, but was read as a list"),
        (
            f'{{"problem": "{"a" * 2**20}"}}\n' * 12 + '{"problem": {"a": "b"}}',
            "record 13: problem is no text",
        ),
        ("", ""),
    ],
)
def test_a_file_that_does_not_fit_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(content)
    with one_line("prompts.sets: math500: ", message):
        read_set("math500", path)


def test_a_date_is_no_text(tmp_path: Path) -> None:
    dates = pa.table({"problem": pa.array([1704844800], pa.timestamp("s"))})
    pq.write_table(dates, tmp_path / "dates.parquet")
    with one_line("", "record 1: problem is no text"):
        read_set("math500", tmp_path / "dates.parquet")
