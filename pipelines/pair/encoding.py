"""The prompts of a run: read, split, encoded."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from pathlib import Path
from typing import Any

from data_gen.models.pair import ModelPair
from data_gen.texts.prompts import Prompt, read_prompts, split_of, take_evenly
from pipelines.config import Config
from pipelines.run import verify
from selector.schema import InputError


def prompts_path(config: Config) -> Path:
    """The user's file, or the one that the pair stage wrote."""
    return config.prompts.file or config.folder / "pair" / "prompts.jsonl"


def all_prompts(config: Config) -> list[Prompt]:
    """Of all splits; InputError where they are missing, or are not those that the pair stage wrote."""
    path = prompts_path(config)
    if config.prompts.file is None and not path.exists():
        raise InputError(f"{path} does not exist: run the pair stage first")
    if config.prompts.file is None:
        verify(config, "prompts", made_by="pair")
    return read_prompts(path)


def prompts_of(config: Config, pair: ModelPair, split: str, count: int | None = None) -> list[Prompt]:
    """Prompts of a split that are not too long, kinds in turn; all of them if `count` is None."""
    prompts, form = _of_split(config, split), config.prompts.form
    if form.longer == "drop":
        encoded = zip(prompts, form.whole(pair.tokenizer, prompts), strict=True)
        prompts = [prompt for prompt, ids in encoded if form.keeps(len(ids))]
    if count is not None and count > len(prompts):
        raise InputError(f"{prompts_path(config)} holds {len(prompts)} prompts for {split}; {count} are asked for")
    return take_evenly(prompts, len(prompts) if count is None else count)


def _of_split(config: Config, split: str) -> list[Prompt]:
    shares = config.prompts.validation, config.prompts.test
    return [prompt for prompt in all_prompts(config) if split_of(prompt, *shares) == split]


def encode(config: Config, pair: ModelPair, prompt: Prompt) -> list[int]:
    """The token ids of a prompt, at most `prompts.tokens`."""
    (ids,) = config.prompts.form.whole(pair.tokenizer, [prompt])
    return config.prompts.form.cut(pair.tokenizer, ids)


def prompts_depend(config: Config, *splits: str) -> dict[str, Any]:
    """What the prompts' tokens of some splits follow from, the pair apart: how they are encoded, and a hash of all."""
    prompts = [prompt for split in splits for prompt in sorted(_of_split(config, split), key=lambda p: p.id)]
    lines = "\0".join(f"{p.id}\0{p.kind}\0{p.source}\0{p.text}" for p in prompts)
    return {**asdict(config.prompts.form), "texts": hashlib.sha256(lines.encode()).hexdigest()[:16]}
