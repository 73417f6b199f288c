"""Stage `pair`: check that the pair loads, and write the prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from data_gen.models.heads import require_library
from data_gen.texts.prompt_sets import SETS, read_set
from data_gen.texts.prompts import Prompt, split_of, take_evenly, write_prompts
from pipelines.config import Config
from pipelines.pair.loading import all_prompts, depends, load_pair, no_prompts, prompts_path, tokenizer_of
from pipelines.run import Stage
from selector.files import atomically
from selector.schema import InputError, sha256
from selector.train.data import SPLITS

SECTIONS = ("pair", "prompts", "data")


def plan(config: Config) -> list[str]:
    """What local data sets give; or where prompts are read from, if that is the hub or there is no tokenizer yet."""
    models = f"load {config.pair.target} and {config.pair.drafting} and compare their vocabularies"
    sets = config.prompts.sets
    if not sets:
        return [models, f"prompts of {prompts_path(config)}"]
    if all(own.file is not None for own in sets):
        with suppress(InputError):
            return [models, *(said for _, said in _chosen(config, tokenizer_of(config)))]
    return [
        models,
        *(f"{own.name}: {own.prompts or 'all'} prompts from {own.file or SETS[own.name].hub}" for own in sets),
    ]


def run(config: Config) -> None:
    if config.pair.head:
        require_library()
    pair = load_pair(config, shapes=True)
    stage = Stage("pair", config, {**depends(config), "fingerprint": pair.fingerprint}, ())
    random = "; without weights, which are random: only times can be measured" if pair.has_random_weights else ""
    stage.say(f"{config.pair.target} and {config.pair.drafting} load and share their vocabulary{random}")
    stage.finish()
    kept = prepared_prompts(config, tokenizer_of(config))
    filled = {split_of(prompt, config.prompts.validation, config.prompts.test) for prompt in kept}
    for split in SPLITS:
        if split not in filled:
            raise no_prompts(config, prompts_path(config), kept, split)


def prepared_prompts(config: Config, tokenizer: Any) -> list[Prompt]:
    """The prompts of all splits that are kept; those of data sets are written first. Says how many are cut or left out.

    Raises:
        InputError: a data set cannot be read or has too few prompts, or the file cannot be read.
    """
    if config.prompts.sets:
        _write_prompts_of_sets(config, tokenizer)
    kept, said = config.prompts.form.fit(tokenizer, all_prompts(config))
    Stage("prompts", config, {}, ()).say(said)
    return kept


def _write_prompts_of_sets(config: Config, tokenizer: Any) -> None:
    path = config.folder / "pair" / "prompts.jsonl"
    files = [own.file for own in config.prompts.sets if own.file is not None and own.file.is_file()]
    inputs = {
        "pair": config.pair.target,
        "template": tokenizer.chat_template if config.prompts.chat else None,
        "files": {str(file): sha256(file) for file in files},
        "prompts": config.prompts.model_dump(mode="json", include={"sets", "tokens", "longer", "chat", "system"}),
    }
    stage = Stage("prompts", config, inputs, (path,))
    if not stage.begin():
        return
    prompts: dict[str, Prompt] = {}
    for taken, said in _chosen(config, tokenizer):
        stage.say(said)
        prompts |= {prompt.id: prompt for prompt in taken}
    stage.replace()
    with atomically(path) as partial:
        write_prompts(partial, prompts.values())
    stage.finish()


def _chosen(config: Config, tokenizer: Any) -> Iterator[tuple[list[Prompt], str]]:
    """The prompts that are taken from each data set, and a sentence on its records."""
    for own in config.prompts.sets:
        prompts, records = read_set(own.name, own.file)
        kept, said = config.prompts.form.fit(tokenizer, prompts)
        if len(kept) < (own.prompts or 1):
            raise InputError(f"prompts.sets: {own.name} gives {len(kept)} prompts, not {own.prompts or 1}: {said}")
        taken = take_evenly(kept, own.prompts)
        kinds = Counter(prompt.kind for prompt in taken)
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        yield taken, f"{own.name}: {records} records, {said}; taken: {counts}"
