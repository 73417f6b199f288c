"""Tiny EAGLE-3 heads with random weights, saved as the speculators library saves them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from tests.tiny import TEXT, train_tokenizer


def save_target(folder: Path, vocabulary: int = 300, hidden: int = 32, layers: int = 6) -> str:
    """A random Llama with peaked distributions, and its tokenizer."""
    tokenizer: PreTrainedTokenizerFast = train_tokenizer([TEXT], vocabulary)
    tokenizer.add_tokens([f"<{i}>" for i in range(vocabulary - len(tokenizer))])
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    for layer in model.model.layers:  # the last token matters most, which a head learns in seconds
        layer.self_attn.o_proj.weight.data *= 0.2
        layer.mlp.down_proj.weight.data *= 0.2
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def save_head(folder: Path, target: str, known: int | None = 200, seed: int = 0, **options: Any) -> str:
    """A head for a target, which knows `known` tokens drawn at random; None: all of them."""
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    own = AutoConfig.from_pretrained(target)
    layer = LlamaConfig(**{**own.to_dict(), "num_hidden_layers": 1, "head_dim": 8, "num_attention_heads": 4})
    layer._attn_implementation = "eager"
    config = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=known or own.vocab_size,
        eagle_aux_hidden_state_layer_ids=[1, 2, own.num_hidden_layers],
        speculators_config=SpeculatorsConfig(
            algorithm="eagle3",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=4)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=target, architectures=["LlamaForCausalLM"]),
        ),
        **options,
    )
    torch.manual_seed(seed)
    head = Eagle3DraftModel(config)
    for table in (head.embed_tokens, head.lm_head):
        table.weight.data.normal_(std=0.5)
    if known:
        ids = torch.randperm(own.vocab_size)[:known].sort().values
        head.t2d[ids] = True
        head.d2t.copy_(ids - torch.arange(known))
    head.save_pretrained(folder)
    return str(folder)


def changed(folder: Path, **values: Any) -> None:
    """Change a head's config."""
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


# The fields of two published heads' config.json that say how the head is built: nm-testing's conversion of
# EAGLE3-LLaMA3.1-Instruct-8B, and RedHatAI's for Qwen3-8B, whose layer is a Llama's, too.
_LAYER = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 2048,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 1,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "use_cache": True,
    "vocab_size": 128256,
}
_PROPOSAL = {"accept_tolerance": 0.0, "proposal_type": "greedy", "speculative_tokens": 5, "verifier_accept_k": 1}


def _published(architecture: str, verifier: str, before_residual: bool, **layer: Any) -> dict[str, Any]:
    return {
        "architectures": ["Eagle3Speculator"],
        "auto_map": {"": "eagle3.Eagle3SpeculatorConfig"},
        "draft_vocab_size": 32000,
        "has_no_defaults_at_init": False,
        "norm_before_residual": before_residual,
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [_PROPOSAL],
            "verifier": {"architectures": [architecture], "name_or_path": verifier},
        },
        "speculators_model_type": "eagle3",
        "speculators_version": "0.1.0.dev14",
        "target_hidden_size": None,
        "torch_dtype": "float32",
        "transformer_layer_config": {**_LAYER, **layer},
    }


LLAMA = _published("LlamaForCausalLM", "meta-llama/Llama-3.1-8B-Instruct", False)
QWEN = _published(
    "Qwen3ForCausalLM", "Qwen/Qwen3-8B", True, vocab_size=151936, intermediate_size=12288, rms_norm_eps=1e-06
)


def published(folder: Path, config: dict[str, Any]) -> tuple[str, str]:
    """A published head at tiny size and a target of its family, both without weights."""
    tiny = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 96, "num_attention_heads": 4}
    tiny |= {"num_key_value_heads": 2, "vocab_size": 512}
    family = "qwen3" if "Qwen3" in str(config["speculators_config"]) else "llama"
    own = AutoConfig.for_model(family, **tiny, num_hidden_layers=9, max_position_embeddings=512)
    (folder / "target").mkdir()
    own.save_pretrained(folder / "target")
    (folder / "head").mkdir()
    layer = {**config["transformer_layer_config"], **tiny}
    (folder / "head" / "config.json").write_text(
        json.dumps({**config, "draft_vocab_size": 128, "transformer_layer_config": layer})
    )
    return str(folder / "target"), str(folder / "head")
