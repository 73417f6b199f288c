"""Tiny pairs with random weights, made from real configs and saved as ordinary Hugging Face
directories."""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from selector.files import atomically

VOCABULARY = 300
TEXT = "the quick brown fox jumps over the lazy dog and then some more text follows it\n" * 40
END = "<|end|>"
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def tokenizer_of(vocabulary: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE, whose first token begins a text and ends a turn, but no text."""
    byte_level = pre_tokenizers.ByteLevel
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = byte_level(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END],
        initial_alphabet=byte_level.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=END)
    fast.add_tokens([f"<{i}>" for i in range(vocabulary - len(fast))])
    return fast


def save_pair(
    folder: Path,
    vocabulary: int = VOCABULARY,
    positions: int = 512,
    peaked: float = 0.6,
    readable: bool = False,
) -> tuple[str, str]:
    """Random models with peaked distributions; the draft is the target's first layer, so that both
    overlap. In a `readable` pair tokens that are no printable text are improbable."""
    tokenizer = tokenizer_of(vocabulary)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=positions,
        initializer_range=0.3,
        bos_token_id=0,
        eos_token_id=None,
    )
    target = LlamaForCausalLM(config)
    target.lm_head.weight.data *= peaked
    if readable:
        texts = [tokenizer.decode([token]) for token in range(vocabulary)]
        others = [text == END or not (text.isascii() and text.isprintable()) for text in texts]
        # not 0, which would tie them at the edge of a top-k
        target.lm_head.weight.data[others] *= 0.05
    target.model.layers[1].mlp.down_proj.weight.data *= 0.1
    draft = LlamaForCausalLM(LlamaConfig(**{**config.to_dict(), "num_hidden_layers": 1}))
    shared = {name: value for name, value in target.state_dict().items() if "layers.1" not in name}
    draft.load_state_dict(shared)
    for role, model in (("target", target), ("draft", draft)):
        model.save_pretrained(folder / role)
        tokenizer.save_pretrained(folder / role)
    return str(folder / "target"), str(folder / "draft")


def made_once(what: str, make: Callable[[Path], object], made_by: str) -> Path:
    """The folder that `make` fills, once on a machine for all processes and later runs."""
    name = f"espalier-{what}-{os.getuid()}-{hashlib.sha256(made_by.encode()).hexdigest()[:16]}"
    folder = Path(tempfile.gettempdir()) / name
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with atomically(folder) as partial:
                partial.mkdir()
                make(partial)
    return folder


def small_pair() -> tuple[str, str]:
    """A pair with room for the prompts of any config."""

    def make(folder: Path) -> None:
        with torch.random.fork_rng():
            for name in save_pair(folder, positions=2048, peaked=2.0, readable=True):
                (Path(name) / "chat_template.jinja").write_text(TEMPLATE)

    made_by = f"{Path(__file__).read_text()} {torch.__version__} {transformers.__version__}"
    folder = made_once("pair", make, made_by)
    return str(folder / "target"), str(folder / "draft")
