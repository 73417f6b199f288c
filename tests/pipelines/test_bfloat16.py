"""In bfloat16, for every family: greedy text with trees parts from `generate()` at ties alone, by the stated rule."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from data_gen.models.pair import ModelPair
from data_gen.texts.prompts import Prompt
from pipelines.config import load_config
from pipelines.evaluate.losslessness import greedy_check
from tests.data_gen.families import RIGHT, model_of
from tests.pipelines.runs import ROOT, UNTEMPLATED

CONFIG = load_config(ROOT / "configs" / "demo.yaml", [*UNTEMPLATED, "prompts.tokens=12", "data.tokens=12"])
PROMPTS = [Prompt(str(n), text, "prose", "a") for n, text in enumerate(("the quick brown fox", "over the lazy dog"))]


@pytest.mark.parametrize("family", RIGHT)
def test_texts_part_at_ties_alone(family: str, pair_folders: tuple[str, str]) -> None:
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(pair_folders[0])
    changes = {"max_position_embeddings": 256, "tie_word_embeddings": False, "vocab_size": len(tokenizer)}
    models = [model_of(family, **changes).to(torch.bfloat16) for _ in range(2)]
    checked = greedy_check(ModelPair(*models, tokenizer, ("target", "draft"), ""), CONFIG, PROMPTS)
    assert checked["continuations"] == 12 and not checked["differing"]
