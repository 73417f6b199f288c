"""The prompts that come with Espalier: their kinds, their lengths, and that every split has prompts of every kind."""

from __future__ import annotations

import json
from collections import Counter

from data_gen.texts.prompts import read_prompts, split_of
from tests.pipelines.runs import ROOT

FILE = ROOT / "pipelines" / "pair" / "prompts.jsonl"
KINDS = ("writing", "coding", "translation", "easy_math", "hard_math", "material")
LEAST = {"test": 6, "validation": 4, "train": 18}
PROMPTS = read_prompts(FILE)


def test_there_are_forty_different_ones_of_every_kind() -> None:
    assert [prompt.id for prompt in PROMPTS] == [f"{kind}-{number:02d}" for kind in KINDS for number in range(1, 41)]
    assert len({prompt.text for prompt in PROMPTS}) == 240
    assert {tuple(json.loads(line)) for line in FILE.read_text().splitlines()} == {("id", "kind", "source", "text")}
    for prompt in PROMPTS:
        given, words = prompt.kind == "material", len(prompt.text.split())
        assert prompt.source.startswith(("stdlib:", "package:")) if given else prompt.source == prompt.id
        assert (60 if given else 7) < words <= 220 and len(prompt.text) <= 1300, prompt.id  # at most 320 tokens
        assert prompt.text == prompt.text.strip(), prompt.id


def test_every_kind_is_in_every_split() -> None:
    for split, least in LEAST.items():
        found = Counter(prompt.kind for prompt in PROMPTS if split_of(prompt, validation=0.2, test=0.25) == split)
        assert found.keys() == set(KINDS) and min(found.values()) >= least
