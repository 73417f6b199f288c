from __future__ import annotations

import json
from pathlib import Path

import pytest

from data_gen.prompts import Prompt, read_prompts, split_of, take_evenly, write_prompts
from selector.schema import InputError


def prompts(count: int) -> list[Prompt]:
    return [Prompt(f"p{i}", f"text {i}", ("code", "prose")[i % 2], f"file{i // 3}") for i in range(count)]


def test_prompts_survive_the_file(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", prompts(4))
    assert read_prompts(tmp_path / "p.jsonl") == prompts(4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "holds no prompts"),
        ("\n\n", "holds no prompts"),
        ("not json", r"p.jsonl:1: expected a JSON object"),
        ('{"text": "a"}\n{"txet": "b"}', r"p.jsonl:2: expected a JSON object with `text`"),
        ('{"text": "  "}', r"p.jsonl:1: `text` is empty"),
        ('{"text": "a", "id": 1}\n{"text": "b", "id": 1}', "two prompts have the same id"),
    ],
)
def test_a_bad_prompt_file_is_one_line_that_names_it(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        read_prompts(path)


def test_a_missing_prompt_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none.jsonl"):
        read_prompts(tmp_path / "none.jsonl")


def test_a_source_falls_into_one_split() -> None:
    splits: dict[str, set[str]] = {}
    for prompt in prompts(300):
        splits.setdefault(prompt.source, set()).add(split_of(prompt, 0.2, 0.25))
    assert all(len(found) == 1 for found in splits.values())
    assert {split for found in splits.values() for split in found} == {"train", "validation", "test"}


def test_kinds_take_turns_and_the_order_does_not_depend_on_the_file() -> None:
    taken = take_evenly(prompts(20), 6)
    assert [prompt.kind for prompt in taken] == ["code", "prose"] * 3
    assert take_evenly(prompts(20)[::-1], 6) == taken


def test_plain_lines_need_only_a_text(tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"text": "hello"}) + "\n")
    assert read_prompts(tmp_path / "p.jsonl") == [Prompt("line-1", "hello", "text", "line-1")]
