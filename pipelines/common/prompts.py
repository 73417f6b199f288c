"""The prompts of a run: read, split, encoded."""

from __future__ import annotations

import hashlib
from pathlib import Path

from data_gen.models import ModelPair
from data_gen.prompts import Prompt, read_prompts, split_of, take_evenly
from pipelines.common.stage import verify
from pipelines.config import Config
from selector.schema import InputError


def prompts_path(config: Config) -> Path:
    """The user's file, or the one that the pair stage wrote."""
    return config.prompts.file or config.folder / "pair" / "prompts.jsonl"


def prompts_of(config: Config, split: str, count: int | None = None) -> list[Prompt]:
    """Prompts of a split, kinds in turn; all of them if `count` is None."""
    path = prompts_path(config)
    if config.prompts.file is None and not path.exists():
        raise InputError(f"{path} does not exist: run the pair stage first")
    if config.prompts.file is None:
        verify(config, "prompts", made_by="pair")
    shares = config.prompts.validation, config.prompts.test
    prompts = [prompt for prompt in read_prompts(path) if split_of(prompt, *shares) == split]
    if count is not None and count > len(prompts):
        raise InputError(f"{path} holds {len(prompts)} prompts for {split}; {count} are asked for")
    return take_evenly(prompts, len(prompts) if count is None else count)


def encode(pair: ModelPair, prompt: Prompt, tokens: int) -> list[int]:
    """The first `tokens` token ids of a prompt."""
    return pair.tokenizer(prompt.text)["input_ids"][:tokens]


def prompts_digest(config: Config, *splits: str) -> str:
    """A hash of the prompts of some splits."""
    prompts = [prompt for split in splits for prompt in prompts_of(config, split)]
    lines = "\0".join(f"{p.id}\0{p.kind}\0{p.source}\0{p.text}" for p in prompts)
    return hashlib.sha256(lines.encode()).hexdigest()[:16]
