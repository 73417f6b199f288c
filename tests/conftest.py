"""A tiny pair, made from a real config and saved as ordinary Hugging Face directories."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from data_gen.models.pair import ModelPair
from pipelines.pair.language_model import train_tokenizer

VOCABULARY = 300
TEXT = "the quick brown fox jumps over the lazy dog and then some more text follows it\n" * 40


def save_pair(folder: Path, vocabulary: int = VOCABULARY, seed: int = 0, eos: int | None = None) -> tuple[str, str]:
    """Random models with peaked distributions; the draft is the target's first layer, so that both overlap."""
    tokenizer: PreTrainedTokenizerFast = train_tokenizer([TEXT], vocabulary)
    tokenizer.add_tokens([f"<{i}>" for i in range(vocabulary - len(tokenizer))])
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=eos,
    )
    target = LlamaForCausalLM(config)
    target.lm_head.weight.data *= 0.6
    target.model.layers[1].mlp.down_proj.weight.data *= 0.1
    draft = LlamaForCausalLM(LlamaConfig(**{**config.to_dict(), "num_hidden_layers": 1}))
    shared = {name: value for name, value in target.state_dict().items() if "layers.1" not in name}
    draft.load_state_dict(shared)
    for role, model in (("target", target), ("draft", draft)):
        model.save_pretrained(folder / role)
        tokenizer.save_pretrained(folder / role)
    return str(folder / "target"), str(folder / "draft")


@pytest.fixture(scope="session")
def pair_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def pair(pair_folders: tuple[str, str]) -> ModelPair:
    return ModelPair.load(*pair_folders, device="cpu")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
