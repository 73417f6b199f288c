"""Tiny models of real classes, as llama.cpp's converter would write them to GGUF files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.pre_tokenizers import ByteLevel, Digits, Split
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from tests.data_gen.families import GROUPED

TEXT = "the quick brown fox jumps over 12345 lazy dogs, and then 67 more of them follow it\n"
SPECIAL = ["<|end|>", "<|start|>"]
TEMPLATE = "{% for message in messages %}<|start|>{{ message['content'] }}<|end|>{% endfor %}"
FAMILIES = {"qwen2": gguf.MODEL_ARCH.QWEN2, "llama": gguf.MODEL_ARCH.LLAMA}
RULES = {
    "smollm": [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)],
    "qwen2": [
        Split(Regex(PRETOKENIZE_REGEX), "isolated"),
        ByteLevel(add_prefix_space=False, use_regex=False),
    ],
    "gpt-2": [ByteLevel(add_prefix_space=False)],
}
VOCABULARY = 320


LLAMA3 = {  # as Llama 3.1 and 3.2 scale their positions
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def random_model(
    family: str, tied: bool = False, rope: dict[str, Any] | None = None
) -> PreTrainedModel:
    """All weights are random, biases and norms too."""
    torch.manual_seed(0)
    sizes = {
        **GROUPED,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
    }
    rope = rope or {"rope_type": "default", "rope_theta": 500.0}
    config = AutoConfig.for_model(family, **sizes, tie_word_embeddings=tied, rope_parameters=rope)
    model = AutoModelForCausalLM.from_config(config).eval()
    for weights in model.parameters():
        torch.nn.init.normal_(weights, std=0.3)
    return model


def byte_level(rule: str) -> Tokenizer:
    """A byte-level BPE of at most VOCABULARY tokens, that splits texts by a rule of `RULES`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.Sequence(RULES[rule]),
        decoders.ByteLevel(),
    )
    alphabet = ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=SPECIAL,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT] * 20, trainer)
    return tokenizer


def factors(width: int) -> np.ndarray:
    """By what llama.cpp's converter divides the frequencies of heads of this width, for
    `LLAMA3`."""
    numbers = []
    for exponent in range(0, width, 2):
        wavelength = 2 * math.pi * LLAMA3["rope_theta"] ** (exponent / width)
        turns = LLAMA3["original_max_position_embeddings"] / wavelength
        smooth = min(1.0, max(0.0, (turns - 1) / (4 - 1)))
        numbers.append(1 / ((1 - smooth) / LLAMA3["factor"] + smooth))
    return np.array(numbers, np.float32)


def write(
    path: Path,
    model: PreTrainedModel,
    rule: str,
    named: str = "",
    architecture: str = "",
    more: Callable[[gguf.GGUFWriter], Any] = lambda writer: None,
    without: str = "",
    template: str = TEMPLATE,
    padded: bool = False,
) -> Path:
    """Write a file with float32 weights and the tokenizer of a rule of `RULES`. It may call the
    rule otherwise, have another architecture than the model, hold `more`, and lack a tensor or a
    template; its token list may be filled up to the rows of the model's table."""
    config, tokenizer = model.config, byte_level(rule)
    family = config.model_type
    writer = gguf.GGUFWriter(path, architecture or family)
    writer.add_name("Tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    add_tokens(writer, tokenizer, config.vocab_size if padded else 0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(named or rule)
    if template:
        writer.add_chat_template(template)
    more(writer)
    names = gguf.get_tensor_name_map(FAMILIES[family], config.num_hidden_layers)
    for name, weights in model.named_parameters():
        gguf_name = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if family == "llama" and "attn_q" in gguf_name:
            weights = rotated(weights, config.num_attention_heads)
        elif family == "llama" and "attn_k" in gguf_name:
            weights = rotated(weights, config.num_key_value_heads)
        if gguf_name != without:
            writer.add_tensor(gguf_name, weights.detach().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_tokens(writer: gguf.GGUFWriter, tokenizer: Tokenizer, rows: int) -> None:
    """A tokenizer's tokens, filled up to so many."""
    kinds = gguf.TokenType
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    types = [kinds.CONTROL if token in SPECIAL else kinds.NORMAL for token in tokens]
    for number in range(len(tokens), rows):
        tokens.append(f"[PAD{number}]")
        types.append(kinds.UNUSED)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(0)


def rotated(weights: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows, or numbers of a bias, in the order in which llama.cpp turns neighbours; transformers
    turns halves."""
    return weights.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2).contiguous()
