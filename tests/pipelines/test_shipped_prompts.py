"""The prompts that come with Espalier: their kinds, their lengths, and that every split has prompts of every kind."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from data_gen.texts.prompts import Prompt, read_prompts, split_of
from tests.pipelines.runs import ROOT

FILE = ROOT / "pipelines" / "pair" / "prompts.jsonl"
KINDS = ("writing", "coding", "translation", "easy_math", "hard_math", "material")
LEAST = {"test": 6, "validation": 4, "train": 18}
WORDS, CHARACTERS = (8, 220), 1300  # at most 320 tokens of SmolLM2 in its chat template
PASSAGE_WORDS = 60


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return read_prompts(FILE)


def test_there_are_forty_different_ones_of_every_kind(prompts: list[Prompt]) -> None:
    assert Counter(prompt.kind for prompt in prompts) == dict.fromkeys(KINDS, 40)
    assert len({prompt.id for prompt in prompts}) == len({prompt.text for prompt in prompts}) == 240


def test_the_lines_have_the_same_fields_in_the_same_order(prompts: list[Prompt]) -> None:
    for line in FILE.read_text(encoding="utf-8").splitlines():
        assert list(json.loads(line)) == ["id", "kind", "source", "text"]
    for kind in KINDS:
        assert [p.id for p in prompts if p.kind == kind] == [f"{kind}-{number:02d}" for number in range(1, 41)]


def test_only_given_material_has_a_source_that_is_not_the_id(prompts: list[Prompt]) -> None:
    for prompt in prompts:
        if prompt.kind == "material":
            assert prompt.source.startswith(("stdlib:", "package:"))
        else:
            assert prompt.source == prompt.id


@pytest.mark.parametrize("split", LEAST)
def test_every_kind_is_in_every_split(prompts: list[Prompt], split: str) -> None:
    found = Counter(prompt.kind for prompt in prompts if split_of(prompt, validation=0.2, test=0.25) == split)
    assert {kind: number for kind, number in found.items() if number >= LEAST[split]}.keys() == set(KINDS)


def test_they_are_neither_too_short_nor_too_long(prompts: list[Prompt]) -> None:
    for prompt in prompts:
        words = len(prompt.text.split())
        assert WORDS[0] <= words <= WORDS[1], prompt.id
        assert len(prompt.text) <= CHARACTERS, prompt.id
        assert prompt.text == prompt.text.strip(), prompt.id
        assert prompt.kind != "material" or words > PASSAGE_WORDS, prompt.id
