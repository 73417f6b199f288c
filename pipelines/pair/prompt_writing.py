"""Reads a run's prompts, and writes those of data sets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from data_gen.texts.prompt_sets import SETS, read_set
from data_gen.texts.prompts import Prompt, split_of, take_evenly, write_prompts
from pipelines.config import Config
from pipelines.pair.loading import all_prompts, no_prompts, prompts_path, tokenizer_of
from pipelines.run import Stage
from selector.files import atomically
from selector.schema import InputError, sha256
from selector.train.data import SPLITS


def write(config: Config, tokenizer: Any) -> list[Prompt]:
    """Write the run's prompts, unless a file holds them, and say how many are cut or left out.

    Returns:
        those that are kept, of all splits.

    Raises:
        InputError: a data set cannot be read or has too few prompts, or the file cannot be read.
    """
    path, told = config.folder / "pair" / "prompts.jsonl", False
    if config.prompts.sets:
        told = _write_prompts_of_sets(config, tokenizer, path) and len(config.prompts.sets) == 1
    kept, said = config.prompts.form.fit(tokenizer, all_prompts(config))
    if not told:
        Stage("prompts", config, {}, ()).say(said)
    return kept


def check_splits(config: Config, kept: list[Prompt]) -> None:
    """InputError if a split has no prompts."""
    splits = {split_of(prompt, config.prompts.validation, config.prompts.test) for prompt in kept}
    for split in SPLITS:
        if split not in splits:
            raise no_prompts(config, prompts_path(config), kept, split)


def chosen(config: Config, tokenizer: Any) -> Iterator[tuple[list[Prompt], str]]:
    """The prompts that are taken from each data set, and a sentence on its records."""
    for own in config.prompts.sets:
        prompts, records = read_set(own.name, own.file)
        kept, said = config.prompts.form.fit(tokenizer, prompts)
        if len(kept) < (own.prompts or 1):
            raise InputError(f"prompts.sets: {own.name} gives {len(kept)} prompts, not {own.prompts or 1}: {said}")
        taken = take_evenly(kept, own.prompts)
        yield taken, f"{own.name}: {records} records, {said}; taken: {_kinds(taken)}"


def _kinds(prompts: list[Prompt]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(prompt.kind for prompt in prompts).items()))


def plan(config: Config) -> list[str]:
    """What the data sets or the file give; or where they are read from, if they are on the hub or there is no tokenizer
    yet."""
    tokenizer = None
    if all(own.file is not None for own in config.prompts.sets):
        with suppress(InputError):  # the target may not be there yet
            tokenizer = tokenizer_of(config)
    if not config.prompts.sets:
        prompts, said = all_prompts(config), ""
        if tokenizer is not None:
            prompts, said = config.prompts.form.fit(tokenizer, prompts)
        return [f"{prompts_path(config)}: {said or f'{len(prompts)} texts'}; taken: {_kinds(prompts)}"]
    if tokenizer is not None:
        return [said for _, said in chosen(config, tokenizer)]
    counts = {own: own.prompts or "all" for own in config.prompts.sets}
    return [f"{own.name}: {count} prompts from {own.file or SETS[own.name].hub}" for own, count in counts.items()]


def _write_prompts_of_sets(config: Config, tokenizer: Any, path: Path) -> bool:
    """Write the prompts of the data sets, and say how many are cut or left out of each; False where neither the sets,
    their files nor the tokenizer have changed."""
    paths = [own.file for own in config.prompts.sets if own.file is not None and own.file.is_file()]
    inputs = {
        "pair": config.pair.target,
        "template": tokenizer.chat_template if config.prompts.chat else None,
        "files": {str(path): sha256(path) for path in paths},
        "prompts": config.prompts.model_dump(mode="json", include={"sets", "tokens", "longer", "chat", "system"}),
    }
    stage = Stage("prompts", config, inputs, (path,))
    if not stage.begin():
        return False
    prompts: dict[str, Prompt] = {}
    for taken, said in chosen(config, tokenizer):
        stage.say(said)
        prompts |= {prompt.id: prompt for prompt in taken}
    stage.replace()
    with atomically(path) as partial:
        write_prompts(partial, prompts.values())
    stage.say(f"{len(prompts)} prompts are written: {_kinds(list(prompts.values()))}")
    stage.finish()
    return True
