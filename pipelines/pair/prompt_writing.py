"""Writes a run's prompts, from data sets or from held-out files of the standard library."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from data_gen.texts.prompt_sets import SETS, read_set
from data_gen.texts.prompts import Prompt, split_of, take_evenly, write_prompts
from pipelines.config import Config
from pipelines.pair import corpus, tasks
from pipelines.pair.loading import all_prompts, no_prompts, prompts_path, tokenizer_of
from pipelines.run import Stage
from selector.files import atomically
from selector.schema import InputError, sha256
from selector.train.data import SPLITS

PROMPT_CHARACTERS = 1200  # more than `prompts.tokens` usually need


def write(config: Config, tokenizer: Any) -> list[Prompt]:
    """Write the run's prompts, unless the user's file holds them, and say how many are cut or left out.

    Returns:
        those that are kept, of all splits.

    Raises:
        InputError: a data set cannot be read or has too few prompts, or the file cannot be read.
    """
    path, told = config.folder / "pair" / "prompts.jsonl", False
    if config.prompts.sets:
        told = _write_prompts_of_sets(config, tokenizer, path) and len(config.prompts.sets) == 1
    elif config.prompts.file is None:
        _write_held_out_prompts(config, tokenizer, path)
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
        with suppress(InputError):  # an embedded pair has no tokenizer before the stage has run
            tokenizer = tokenizer_of(config)
    if config.prompts.file is not None:
        prompts, said = all_prompts(config), ""
        if tokenizer is not None:
            prompts, said = config.prompts.form.fit(tokenizer, prompts)
        return [f"{config.prompts.file}: {said or f'{len(prompts)} texts'}; taken: {_kinds(prompts)}"]
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
    _replace(stage, path, list(prompts.values()))
    return True


def _write_held_out_prompts(config: Config, tokenizer: Any, path: Path) -> None:
    """Write prompts of all kinds from the library; or of its code and prose, and tasks made from its files."""
    own, files = config.prompts, corpus.stdlib_files()
    inputs: dict[str, Any] = {
        "corpus": corpus.described(files),
        "per_source": own.per_source,
        "held_out": corpus.HELD_OUT,
    }
    if own.tasks:
        tokens = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode()).hexdigest()
        inputs |= {"tasks": own.tasks, "tokens": own.tokens, "tokenizer": tokens}
    stage = Stage("prompts", config, inputs, (path,))
    if not stage.begin():
        return
    prompts, possible = held_out_prompts(files, own.per_source), set(corpus.KINDS)
    if own.tasks:
        possible = {"code", "prose", *tasks.WORKLOADS}
        prompts = [prompt for prompt in prompts if prompt.kind in possible]
        prompts += task_prompts(files, own.tasks, tasks.counter(tokenizer), own.tokens)
    for kind in sorted(possible - {prompt.kind for prompt in prompts}):
        stage.say(f"this Python has no {kind} in its library: no prompts of that kind")
    _replace(stage, path, prompts)


def _replace(stage: Stage, path: Path, prompts: list[Prompt]) -> None:
    stage.replace()
    with atomically(path) as partial:
        write_prompts(partial, prompts)
    stage.say(f"{len(prompts)} prompts are written: {_kinds(prompts)}")
    stage.finish()


def held_out_prompts(files: list[corpus.SourceFile], per_source: int) -> list[Prompt]:
    """Prompts at evenly spaced lines of held-out files, at most `per_source` of each file and kind."""
    prompts = []
    for file in (file for file in files if file.held_out):
        texts = {file.kind: file.text}
        if file.kind == "code":
            texts["prose"] = corpus.prose_of(file.text)
        for kind, text in texts.items():
            starts = [0, *(i + 1 for i, char in enumerate(text) if char == "\n")]
            starts = [start for start in starts if start + PROMPT_CHARACTERS <= len(text)]
            prompts += [
                Prompt(f"{kind}:{file.path}:{start}", text[start : start + PROMPT_CHARACTERS], kind, file.path)
                for start in starts[:: max(1, -(-len(starts) // per_source))]
            ]
    return prompts


def task_prompts(files: list[corpus.SourceFile], number: int, count: tasks.Count, tokens: int) -> list[Prompt]:
    """Tasks from held-out files, at most `number` of each kind from one file, of at most `tokens` tokens. Text that is
    only to be continued is left out: `held_out_prompts` has it."""
    return [
        Prompt(f"{document.workload}:{file.path}:{n}", document.prompt, document.workload, file.path)
        for file in files
        if file.held_out
        for n, document in enumerate(tasks.documents(file, number, count, tokens))
        if document.workload not in ("code", "prose")
    ]
