"""Tiny EAGLE-3 heads with random weights, saved as the speculators library saves them."""

from __future__ import annotations

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
        eagle_aux_hidden_state_layer_ids=[1, 2, own.num_hidden_layers - 1],
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
