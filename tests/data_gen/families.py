"""Tiny models of the families' real classes, from real configs."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from data_gen.models.pair import ModelPair

V, LONGEST, WINDOW = 64, 128, 16
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
SLIDING = {**GROUPED, "sliding_window": WINDOW}
SOME = {**SLIDING, "use_sliding_window": True, "max_window_layers": 1}  # the layers from here on
MIXED = {**SLIDING, "layer_types": ["sliding_attention", "full_attention"]}
UNTIED = {**MIXED, "tie_word_embeddings": False}  # or a tiny model repeats what it reads
VISION = {
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
    "original_max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
RIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", PLAIN),
    "Mistral": ("Mistral", {**GROUPED, "sliding_window": None}),
    "Mistral, sliding window": ("Mistral", SLIDING),
    "Qwen 2 and 2.5": ("Qwen2", GROUPED),
    "Qwen 2, sliding window": ("Qwen2", SOME),
    "Qwen 3": ("Qwen3", GROUPED),
    "Qwen 3, sliding window": ("Qwen3", SOME),
    "Qwen 3, mixture of experts": ("Qwen3Moe", EXPERTS),
    "Mixtral": ("Mixtral", {**SLIDING, "num_local_experts": 4}),
    "Gemma": ("Gemma", GROUPED),
    "Gemma 2": ("Gemma2", MIXED),
    "Gemma 3, text": ("Gemma3Text", MIXED),
    "Gemma 3, nested": (
        "Gemma3",
        {"text_config": UNTIED, "vision_config": VISION, "tie_word_embeddings": False},
    ),
    "Phi 1 and 2": ("Phi", PLAIN),  # with a bias in the output layer
    "Phi-3": ("Phi3", PLAIN),
    "Phi-3, sliding window": ("Phi3", {**PLAIN, "sliding_window": WINDOW}),
    "GPT-OSS": ("GptOss", {**MIXED, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "OLMo 2": ("Olmo2", PLAIN),
    "OLMo 3": ("Olmo3", MIXED),
    "Command R7B": ("Cohere2", MIXED),
    "Starcoder 2": ("Starcoder2", {**PLAIN, "num_key_value_heads": 2, "sliding_window": WINDOW}),
    "GPT-NeoX": ("GPTNeoX", PLAIN),
    "GPT-2": (
        "GPT2",
        {"vocab_size": V, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": LONGEST}
        | {"bos_token_id": 1, "eos_token_id": 2},
    ),
    "OPT": (
        "OPT",
        {
            "vocab_size": V,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 48,
        }
        | {"word_embed_proj_dim": 32, "max_position_embeddings": LONGEST},
    ),
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {  # and what the line says
    "Phi-3, longrope": (
        "Phi3",
        {**PLAIN, "rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
        "behind 61 tokens the logits after 0 drafted tokens differ",
    ),
    "Llama, dynamic NTK": (
        "Llama",
        {**PLAIN, "max_position_embeddings": 64, "rope_parameters": DYNAMIC},
        "behind 61 tokens the logits after 0 drafted tokens differ",
    ),
    "GPT-Neo": (
        "GPTNeo",
        {
            "vocab_size": V,
            "hidden_size": 32,
            "num_layers": 2,
            "num_heads": 4,
            "max_position_embeddings": LONGEST,
        }
        | {"window_size": WINDOW, "attention_types": [[["global", "local"], 1]]},
        "behind 6 tokens the logits after 9 drafted tokens differ",
    ),
    "MPT": (
        "Mpt",
        {"vocab_size": V, "d_model": 32, "n_layers": 2, "n_heads": 4},
        "behind 6 tokens the logits after",
    ),
    "Bloom": (
        "Bloom",
        {"vocab_size": V, "hidden_size": 32, "n_layer": 2, "n_head": 4},
        "cannot pass token trees",
    ),
    "Falcon, ALiBi": (
        "Falcon",
        {
            "vocab_size": V,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "alibi": True,
        },
        "cannot pass token trees",
    ),
    "Llama 4": (
        "Llama4Text",
        {**GROUPED, "attention_chunk_size": WINDOW, "num_local_experts": 2},
        "has layers of the kind chunked_attention; token trees need full or sliding attention",
    ),
    "Qwen 3 Next": (
        "Qwen3Next",
        {
            **EXPERTS,
            "shared_expert_intermediate_size": 16,
            "linear_num_value_heads": 4,
            "linear_num_key_heads": 2,
        }
        | {"linear_key_head_dim": 8, "linear_value_head_dim": 8},
        "has layers of the kind linear_attention; token trees need",
    ),
    "Mamba": (
        "Mamba",
        {"vocab_size": V, "hidden_size": 32, "num_hidden_layers": 2},
        "has layers of the kind linear_attention; token trees need",
    ),
}


def config_of(family: str) -> Any:
    kind, values = (RIGHT | REFUSED)[family][:2]
    return getattr(transformers, f"{kind}Config")(**values)


def model_of(family: str, attention: str | None = None, **changes: Any) -> Any:
    """With weights so large that a token more or less in sight shows.

    Args:
        changes: to the config.
    """
    torch.manual_seed(0)
    config = config_of(family)
    for name, value in changes.items():
        setattr(config.get_text_config(), name, value)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    for weights in model.parameters():
        if weights.dim() > 1:
            torch.nn.init.normal_(weights, 0, 0.2)
    return model


def random_llama(vocabulary: int, layers: int, seed: int, positions: int = 64) -> LlamaForCausalLM:
    """A model whose texts can be enumerated, peaked enough that drafted tokens are rejected and
    accepted."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=layers,
        num_attention_heads=2,
        max_position_embeddings=positions,
        initializer_range=0.5,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return LlamaForCausalLM(config).eval()


def nameless(target: Any, draft: Any) -> ModelPair:
    """A pair without a tokenizer."""
    return ModelPair(target, draft, None, ("target", "draft"), "")  # type: ignore[arg-type]
