"""The texts of a run's draft: what is written for training, and the answers to held-out prompts.

Legend: X sequences, T tokens of a sequence.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from data_gen.texts.prompts import Prompt, split_of
from data_gen.texts.written import seed_of
from pipelines.config import Config
from pipelines.distil.conversations import Start, Template, starts, write
from pipelines.distil.texts import Sequences, is_whole, save
from pipelines.pair.loading import all_prompts
from pipelines.run import ticking
from selector.schema import InputError

HELD_OUT = "held_out.safetensors"


def folder_of(config: Config) -> Path:
    return config.folder / "distil"


def batches(config: Config) -> int:
    """Files of texts, each of which the target writes at once."""
    own = config.distil
    return max(1, round(own.tokens / (own.batch * own.context)))


def prompts_by_split(config: Config) -> dict[str, list[Prompt]]:
    found: dict[str, list[Prompt]] = {"train": [], "validation": [], "test": []}
    for prompt in all_prompts(config):
        found[split_of(prompt, config.prompts.validation, config.prompts.test)].append(prompt)
    return found


def write_texts(config: Config, target: PreTrainedModel, tokenizer: Any) -> None:
    """Write the texts that are not there yet."""
    own, folder, template = config.distil, folder_of(config) / "texts", Template.of(tokenizer, config.prompts.system)
    prompts = [ids for ids, _ in _fitting(config, tokenizer, "train")]
    paths = [folder / f"{number:05}.safetensors" for number in range(batches(config))]
    missing = [path for path in paths if not is_whole(path)]
    with ticking("writing texts", len(paths) * own.context, (len(paths) - len(missing)) * own.context) as tick:
        for path in missing:
            seed = seed_of(config.seed, "distil", int(path.stem))
            further = starts(template, prompts, random.Random(seed))
            begun = [next(further) for _ in range(own.batch)]
            save(write(target, template, begun, further, own.context, seed, tick), path)


def write_held_out(config: Config, target: PreTrainedModel, tokenizer: Any) -> None:
    """Write the answers to validation prompts at temperature 1."""
    if is_whole(folder_of(config) / HELD_OUT):
        return
    template = Template.of(tokenizer, config.prompts.system)
    prompts = [ids for ids, _ in _fitting(config, tokenizer, "validation")]
    begun = [_asked(template, ids) for ids in prompts]
    further, seed = starts(template, prompts, random.Random(0)), seed_of(config.seed, "distil", "held out")
    save(write(target, template, begun, further, config.distil.context, seed), folder_of(config) / HELD_OUT)


def held_out(config: Config, tokenizer: Any, ends: frozenset[int]) -> tuple[Sequences, Tensor, list[str]]:
    """The answers, the places whose next token belongs to one, bool [X, T], and the prompts' kinds.

    Args:
        ends: the tokens that end a text.
    """
    data, template = Sequences([folder_of(config) / HELD_OUT]), Template.of(tokenizer, config.prompts.system)
    prompts = _fitting(config, tokenizer, "validation")
    answers_XT = torch.zeros_like(data.drawn_BT)
    for number, (ids, _) in enumerate(prompts):
        begin = len(_asked(template, ids).given)
        drawn = data.tokens_BT[number, begin:].tolist()
        length = next((n for n, token in enumerate(drawn, 1) if token in ends), len(drawn))
        answers_XT[number, begin - 1 : begin - 1 + length] = True
    return data, answers_XT, [kind for _, kind in prompts]


def _asked(template: Template | None, ids: Sequence[int]) -> Start:
    given = list(ids) if template is None else [*template.opening, *ids, *template.to_answer]
    return Start(given, True, 1.0)


def _fitting(config: Config, tokenizer: Any, split: str) -> list[tuple[list[int], str]]:
    """The tokens and kinds of the prompts that leave room for an answer; InputError where there are none."""
    prompts = prompts_by_split(config)[split]
    ids = tokenizer([prompt.text for prompt in prompts], add_special_tokens=False)["input_ids"] if prompts else []
    longest = config.distil.context - config.distil.context // 4
    found = [(own, prompt.kind) for own, prompt in zip(ids, prompts, strict=True) if 0 < len(own) <= longest]
    if not found:
        raise InputError(f"distil.context={config.distil.context}: no {split} prompt leaves room for an answer")
    return found
