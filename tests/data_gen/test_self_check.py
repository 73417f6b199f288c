"""Which families a pass over a token tree is right for, and which are refused; tiny models of their real classes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from data_gen.self_check import check_model, lengths
from selector.schema import InputError

V, LONGEST = 64, 128
PLAIN = {
    "vocab_size": V,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": LONGEST,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GROUPED = {**PLAIN, "num_key_value_heads": 2, "head_dim": 8}
EXPERTS = {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
OTHER_NAMES = {"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LONGEST}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64,
}
RIGHT = {
    "Llama": PLAIN,
    "Mistral": {**GROUPED, "sliding_window": None},
    "Qwen2": GROUPED,
    "Qwen3": GROUPED,
    "Qwen3Moe": EXPERTS,
    "Phi3": PLAIN,
    "Olmo2": PLAIN,
    "GPTNeoX": PLAIN,
    "GPT2": OTHER_NAMES,
    "OPT": {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 48}
    | {"word_embed_proj_dim": 32, "max_position_embeddings": LONGEST},
}
WINDOW = {**GROUPED, "sliding_window": 16}
REFUSED = {  # and what the line says
    "Mistral": (WINDOW, "cannot pass token trees"),
    "Gemma2": (WINDOW, "cannot pass token trees"),
    "Gemma3Text": (WINDOW, "cannot pass token trees"),
    "Starcoder2": ({**PLAIN, "num_key_value_heads": 2, "sliding_window": 16}, "cannot pass token trees"),
    "Phi3": (
        {**PLAIN, "rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
        "behind 61 tokens the logits after a branch was committed differ",
    ),
    "GPTNeo": (
        {"vocab_size": V, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "max_position_embeddings": LONGEST}
        | {"window_size": 16, "attention_types": [[["global", "local"], 1]]},
        "behind 13 tokens the logits after 3 drafted tokens differ",
    ),
    "Mpt": ({"vocab_size": V, "d_model": 32, "n_layers": 2, "n_heads": 4}, "behind 6 tokens the logits after 2"),
    "Bloom": ({"vocab_size": V, "hidden_size": 32, "n_layer": 2, "n_head": 4}, "cannot pass token trees"),
    "Falcon": (
        {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "alibi": True},
        "cannot pass token trees",
    ),
    "Qwen3Next": (
        {**EXPERTS, "shared_expert_intermediate_size": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2}
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
        "cannot pass token trees",
    ),
    "Mamba": ({"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2}, "cannot pass token trees"),
}


def model_of(family: str, values: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(getattr(transformers, f"{family}Config")(**values)).eval()


@pytest.mark.parametrize("family", RIGHT)
def test_these_families_are_right(family: str) -> None:
    """A wrong mask or position shows as 1e-3 and more, rounding in float32 as 1e-6."""
    assert check_model(model_of(family, RIGHT[family]), family, LONGEST) < 1e-5


@pytest.mark.parametrize("family", REFUSED)
def test_these_are_refused_in_one_line(family: str) -> None:
    values, message = REFUSED[family]
    with pytest.raises(InputError, match=f"^{family}: .*{message}") as refused:
        check_model(model_of(family, values), family, LONGEST)
    assert "\n" not in str(refused.value)


def test_a_change_beyond_what_is_used_does_not_matter() -> None:
    values, _ = REFUSED["GPTNeo"]
    assert check_model(model_of("GPTNeo", values), "GPTNeo", 26) < 1e-5


def test_bfloat16_is_judged_by_its_own_rounding() -> None:
    model = model_of("Llama", PLAIN).to(torch.bfloat16)
    assert check_model(model, "Llama", LONGEST) < 0.1


def test_contexts_end_around_every_change_that_the_config_names() -> None:
    config = transformers.Phi3Config(**PLAIN, original_max_position_embeddings=64, rope_parameters=LONGROPE)
    assert lengths(config, LONGEST) == [6, 61, 67]
    assert lengths(config, 70) == [6]  # too short for the tree that would follow
