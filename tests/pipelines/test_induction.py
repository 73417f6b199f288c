"""The induction head that a target begins with: what it looks at, and what it copies."""

from __future__ import annotations

import torch
from transformers import LlamaForCausalLM

from pipelines.config import Embedded
from pipelines.pair import language_model

VOCABULARY = 2048


def built(layers: int) -> LlamaForCausalLM:
    return language_model.build_model(Embedded(hidden=256), layers, VOCABULARY, 0, 1)


def test_it_copies_before_any_training_and_one_layer_does_not() -> None:
    once, again = language_model.copy_losses(built(6), 256, 1)
    assert once > 7
    assert again < 1
    once, again = language_model.copy_losses(built(1), 256, 1)
    assert abs(once - again) < 0.2


def test_one_layer_looks_at_the_token_before_and_the_next_at_what_followed_the_last_time() -> None:
    model = built(6)
    model.set_attn_implementation("eager")
    tokens_T = torch.randperm(VOCABULARY)[:100]
    with torch.no_grad():
        seen = model(tokens_T.repeat(1, 2), output_attentions=True).attentions
    heads = model.config.num_attention_heads
    at = torch.arange(101, 199)  # of the second time
    assert seen[0][0, : heads // 2, at, at - 1].min() > 0.9
    assert seen[1][0, :, at, at - 99].mean() > 0.8  # one after the same token, 100 positions before
