"""The texts of a draft's training: what the target writes for it, and its answers to held-out prompts. Each batch is a
safetensors file.

Legend: B, X sequences, T tokens of a sequence, V vocabulary, R tokens that the draft can say.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset
from transformers import PreTrainedModel

from data_gen.texts.prompts import Prompt, split_of
from data_gen.texts.written import seed_of
from pipelines.config import Config
from pipelines.distil.conversations import Start, Template, Written, starts, write
from pipelines.distil.objective import Places
from pipelines.pair.loading import all_prompts
from pipelines.run import ticking
from selector.files import atomically
from selector.schema import InputError

HELD_OUT = "held_out.safetensors"


def batches(config: Config) -> int:
    """How many the target writes, each at once."""
    own = config.distil
    return max(1, round(own.tokens / (own.batch * own.context)))


def prompts_by_split(config: Config) -> dict[str, list[Prompt]]:
    found: dict[str, list[Prompt]] = {"train": [], "validation": [], "test": []}
    for prompt in all_prompts(config):
        found[split_of(prompt, config.prompts.validation, config.prompts.test)].append(prompt)
    return found


def write_texts(config: Config, folder: Path, target: PreTrainedModel, tokenizer: Any) -> None:
    """Write the texts that are not there yet, and the answers to validation prompts at temperature 1."""
    own, template = config.distil, Template.of(tokenizer, config.prompts.system)
    prompts = [*_fitting(config, tokenizer, "train").values()]
    paths = [folder / f"{number:05}.safetensors" for number in range(batches(config))]
    missing = [path for path in paths if not is_whole(path)]
    with ticking("writing texts", len(paths) * own.context, (len(paths) - len(missing)) * own.context) as tick:
        for path in missing:
            seed = seed_of(config.seed, "distil", int(path.stem))
            further = starts(template, prompts, random.Random(seed))
            begun = [next(further) for _ in range(own.batch)]
            save(write(target, template, begun, further, own.context, seed, tick), path)
    if not is_whole(folder / HELD_OUT):
        prompts = [*_fitting(config, tokenizer, "validation").values()]
        begun = [_asked(template, ids) for ids in prompts]
        further, seed = starts(template, prompts, random.Random(0)), seed_of(config.seed, "distil", "held out")
        save(write(target, template, begun, further, own.context, seed), folder / HELD_OUT)


def held_out(config: Config, folder: Path, tokenizer: Any, ends: frozenset[int]) -> tuple[Sequences, Tensor, list[str]]:
    """The answers up to one of the tokens in `ends`, the places whose next token belongs to one, bool [X, T], and the
    kinds of their prompts."""
    data, template = Sequences([folder / HELD_OUT]), Template.of(tokenizer, config.prompts.system)
    answers_XT = torch.zeros_like(data.drawn_BT)
    prompts = _fitting(config, tokenizer, "validation")
    for number, ids in enumerate(prompts.values()):
        begin = len(_asked(template, ids).given)
        drawn = data.tokens_BT[number, begin:].tolist()
        length = next((n for n, token in enumerate(drawn, 1) if token in ends), len(drawn))
        answers_XT[number, begin - 1 : begin - 1 + length] = True
    return data, answers_XT, [prompt.kind for prompt in prompts]


def _asked(template: Template | None, ids: Sequence[int]) -> Start:
    given = list(ids) if template is None else [*template.opening, *ids, *template.to_answer]
    return Start(given, True, 1.0)


def _fitting(config: Config, tokenizer: Any, split: str) -> dict[Prompt, list[int]]:
    """The prompts that leave room for an answer, with their tokens; InputError where there are none."""
    prompts = prompts_by_split(config)[split]
    texts = [prompt.text for prompt in prompts]
    longest = config.distil.context - config.distil.context // 4
    encoded = tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []
    found = {prompt: ids for prompt, ids in zip(prompts, encoded, strict=True) if 0 < len(ids) <= longest}
    if not found:
        raise InputError(f"distil.context={config.distil.context}: no {split} prompt leaves room for an answer")
    return found


def save(written: Written, path: Path) -> None:
    with atomically(path) as partial:
        save_file(written._asdict(), partial)


def is_whole(path: Path) -> bool:
    """Whether a file of texts is there and readable."""
    try:
        with safe_open(path, "pt") as file:
            return set(file.keys()) == set(Written._fields)
    except (OSError, SafetensorError):
        return False


class Sequences(Dataset[Places]):
    """The sequences of some files. Hidden states are read when they are asked for, the rest is kept in memory."""

    def __init__(self, paths: Sequence[Path]) -> None:
        files: list[Any] = [safe_open(path, "pt") for path in paths]
        parts = [[file.get_tensor(name) for file in files] for name in ("tokens_BT", "drawn_BT", "log_total_BT")]
        self.tokens_BT, self.drawn_BT, self._log_total_BT = map(torch.cat, parts)
        self._places = [(file, row) for file, own in zip(files, parts[0], strict=True) for row in range(len(own))]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Places:
        """One sequence. A place counts if its next token was drawn by the target, which then is no part of a prompt."""
        file, row = self._places[index]
        counted_T = torch.cat([self.drawn_BT[index, 1:], torch.zeros(1, dtype=torch.bool)])
        hidden_TD = file.get_slice("hidden_BTD")[row]
        return Places(self.tokens_BT[index].long(), hidden_TD, self._log_total_BT[index], counted_T)

    def most_frequent(self, count: int, vocabulary: int, always: Sequence[int]) -> Tensor:
        """The `count` tokens that the target drew most often (0: all), int64 [R], ascending; of equals those with small
        numbers. Some are `always` among them."""
        if not 0 < count < vocabulary:
            return torch.arange(vocabulary)
        said_V = torch.bincount(self.tokens_BT[self.drawn_BT].long(), minlength=vocabulary)
        said_V[list(always)] = said_V.sum() + 1
        return said_V.argsort(descending=True, stable=True)[:count].sort().values
