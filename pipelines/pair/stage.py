"""Stage `pair`: checks that the pair loads, and writes the prompts. Every stage loads both from
here."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from data_gen.models.checkpoints import load_tokenizer, text_config
from data_gen.models.gguf import resolved
from data_gen.models.pair import ModelPair
from data_gen.models.self_check import check_once
from data_gen.texts.prompt_sets import SETS, read_set
from data_gen.texts.prompts import (
    Form,
    Prompt,
    read_prompts,
    split_of,
    take_evenly,
    write_prompts,
)
from data_gen.texts.written import (
    BEHAVIOUR,
    BEYOND,
    CERTAIN_BEHAVIOUR,
    DEPTH,
    WIDE_BEHAVIOUR,
    Recipe,
)
from pipelines.config import DISTILLED, DISTILLED_FOLDER, SHIPPED, SMOLLM2, Config
from pipelines.run import Stage, day_of, read_record, verify
from selector.files import atomically
from selector.schema import FULL, InputError, sha256
from selector.train.data import SPLITS

PROMPTS = Path(__file__).with_name("prompts.jsonl")  # those that come with Espalier


def target_name(config: Config) -> str:
    """The target's directory or hub id; a GGUF file is converted to a directory first. InputError
    where it cannot be, or lacks the chat template of the run's prompts."""
    return resolved(config.pair.target, "target", config.prompts.chat)


def pair_names(config: Config) -> tuple[str, str]:
    """Directories or hub ids of the target and its draft. InputError where a GGUF file cannot be
    converted, or a draft is not distilled yet."""
    draft = config.pair.draft
    if draft == SMOLLM2:
        draft = str(SHIPPED)
    elif draft == DISTILLED:
        draft = str(config.folder / DISTILLED_FOLDER)
    if Path(draft).match(f"runs/*/{DISTILLED_FOLDER}") and not Path(draft).is_dir():
        raise InputError(f"{draft} does not exist: run the distil stage first, as by `make distil`")
    return target_name(config), resolved(draft, "draft")


def in_small(config: Config) -> Config:
    """The run of `espalier quick`, with a name of its own; a draft that the run has trained stays
    where it is."""
    pair = config.pair
    if pair.draft == DISTILLED:
        pair = pair.model_copy(update={"draft": str(config.folder / DISTILLED_FOLDER)})
    return config.model_copy(update={"name": f"{config.name}-quick", "pair": pair})


def load_pair(config: Config) -> ModelPair:
    """The run's pair on the configured device. InputError where it is missing, does not load, has
    too short a context, or computes token trees wrongly."""
    settings = config.pair
    pair = ModelPair.load(*pair_names(config), settings.device, settings.dtype, settings.device_map)
    needed = config.prompts.tokens + config.data.tokens + BEYOND + DEPTH
    available = pair.max_positions
    if needed > available:
        most_tokens = available - needed + config.prompts.tokens
        advice = f": set prompts.tokens={most_tokens}" if most_tokens >= 2 else ""
        raise InputError(
            f"prompts.tokens={config.prompts.tokens} and data.tokens={config.data.tokens} ask "
            f"for up to {needed} positions; the pair has {available}{advice}"
        )
    check_models(pair, needed)
    return pair


def known_fingerprint(config: Config) -> str:
    """The pair's fingerprint as the latency or the pair stage recorded it; InputError where neither
    has been run."""
    for stage, key in (("latency", "pair"), ("pair", "fingerprint")):
        with suppress(InputError):
            fingerprint = read_record(config, stage)["depends"].get(key)
            if isinstance(fingerprint, str):
                return fingerprint
    raise InputError(f"{config.folder}: run the latency stage first")


def check_models(pair: ModelPair, longest: int) -> None:
    """InputError where a model of the pair computes token trees wrongly in a text of up to
    `longest` tokens."""
    for model, name in zip((pair.target, pair.draft), pair.names, strict=True):
        check_once(model, name, longest)


def tokenizer_of(config: Config) -> Any:
    """The target's tokenizer; InputError where it cannot be read."""
    return load_tokenizer(target_name(config), "target")


def hidden_widths(config: Config) -> list[int]:
    """Widths of the hidden-state features, the target's and twice the draft's, from the models'
    configs alone."""
    target, draft = pair_names(config)
    target_width = int(text_config(target, "target").hidden_size)
    draft_width = int(text_config(draft, "draft").hidden_size)
    return [target_width, draft_width, draft_width]


def recipe(config: Config) -> Recipe:
    data = config.data
    return Recipe(
        config.verifiers,
        form_of(config),
        data.tokens,
        data.siblings,
        data.stride,
        data.features == FULL,
        config.seed,
        replace(data.space, ranked=CERTAIN_BEHAVIOUR),
        WIDE_BEHAVIOUR if data.is_wide else BEHAVIOUR,
    )


def form_of(config: Config) -> Form:
    """How the run's prompts become tokens."""
    prompts = config.prompts
    return Form(prompts.tokens, prompts.longer, prompts.chat, prompts.system, day_of(config))


def prompts_path(config: Config) -> Path:
    if config.prompts.file is not None:
        return config.prompts.file
    if config.prompts.sets:
        return config.folder / "pair" / "prompts.jsonl"
    return PROMPTS


def all_prompts(config: Config) -> list[Prompt]:
    """The prompts of all splits; InputError if they are missing or have changed since the pair
    stage."""
    path = prompts_path(config)
    if config.prompts.sets:
        if not path.exists():
            raise InputError(f"{path} does not exist: run the pair stage first")
        verify(config, "prompts")
    return read_prompts(path)


def by_split(config: Config, prompts: Iterable[Prompt]) -> dict[str, list[Prompt]]:
    """The prompts of each split; InputError where one has none."""
    validation, test = config.prompts.validation, config.prompts.test
    prompts_by_split: dict[str, list[Prompt]] = {split: [] for split in SPLITS}
    for prompt in prompts:
        prompts_by_split[split_of(prompt, validation, test)].append(prompt)
    for split, of_split in prompts_by_split.items():
        if not of_split:
            raise InputError(
                f"{prompts_path(config)}: prompts.validation={validation:g}, "
                f"prompts.test={test:g}: none of the sources falls to {split}: add some, or change "
                "a share"
            )
    return prompts_by_split


def prompts_of(
    config: Config, pair: ModelPair, split: str, count: int | None = None
) -> list[Prompt]:
    """`count` prompts of a split, kinds in turn; all if None. Longer ones may be left out, as
    `prompts.longer` says. InputError where there are fewer."""
    prompts = kept_prompts(config, pair.tokenizer, split)
    if count is not None and count > len(prompts):
        raise InputError(
            f"{prompts_path(config)} holds {len(prompts)} prompts for {split}; {count} are asked "
            "for"
        )
    return take_evenly(prompts, count)


def kept_prompts(config: Config, tokenizer: Any, split: str) -> list[Prompt]:
    """The prompts of a split that are not left out."""
    kept, _ = form_of(config).fit(tokenizer, all_prompts(config))
    return by_split(config, kept)[split]


def encode(config: Config, pair: ModelPair, prompt: Prompt) -> list[int]:
    return form_of(config).encode(pair.tokenizer, prompt)


def prompts_depend(config: Config, *splits: str) -> dict[str, Any]:
    """What determines the prompt tokens of some splits, except the pair: the prompts' form and a
    hash of all texts, as they come out of the chat template."""
    prompts_by_split = by_split(config, sorted(all_prompts(config), key=lambda prompt: prompt.id))
    tokenizer = tokenizer_of(config) if config.prompts.chat else None
    fields: list[str] = []
    for split in splits:
        prompts = prompts_by_split[split]
        texts = form_of(config).texts(tokenizer, prompts)
        for prompt, text in zip(prompts, texts, strict=True):
            fields += [prompt.id, prompt.kind, prompt.source, text]
    digest = hashlib.sha256("\0".join(fields).encode()).hexdigest()
    form = config.prompts.model_dump(include={"tokens", "longer", "chat", "system"})
    return {**form, "texts": digest[:16]}


def plan(config: Config) -> list[str]:
    """What the stage would do; data sets are not read."""
    lines = [f"load {config.pair.target} and {config.pair.draft} and compare their vocabularies"]
    for dataset in config.prompts.sets:
        origin = dataset.file or SETS[dataset.name].hub
        lines.append(f"{dataset.name}: {dataset.prompts or 'all'} prompts from {origin}")
    if not config.prompts.sets:
        lines.append(f"{len(all_prompts(config))} prompts of {prompts_path(config)}")
    return lines


def run(config: Config) -> None:
    pair = load_pair(config)
    names = {"target": config.pair.target, "draft": config.pair.draft}
    stage = Stage("pair", config, {"pair": names, "fingerprint": pair.fingerprint}, ())
    stage.say(f"{config.pair.target} and {config.pair.draft} load and share their vocabulary")
    stage.finish()
    by_split(config, prepared_prompts(config, tokenizer_of(config)))  # none is empty


def prepared_prompts(config: Config, tokenizer: Any) -> list[Prompt]:
    """The kept prompts of all splits; those of data sets are written first. Prints how many are cut
    or left out. InputError where a data set cannot be read or has too few prompts, or the file
    cannot be read."""
    if config.prompts.sets:
        _write_prompts(config, tokenizer, prompts_path(config))
    kept, remark = form_of(config).fit(tokenizer, all_prompts(config))
    Stage("prompts", config, {}, ()).say(remark)
    return kept


def _write_prompts(config: Config, tokenizer: Any, path: Path) -> None:
    checksums = {}
    for dataset in config.prompts.sets:
        if dataset.file is not None and dataset.file.is_file():
            checksums[str(dataset.file)] = sha256(dataset.file)
    inputs = {
        "pair": config.pair.target,
        "template": tokenizer.chat_template if config.prompts.chat else None,
        "files": checksums,
        "prompts": config.prompts.model_dump(
            mode="json", include={"sets", "tokens", "longer", "chat", "system"}
        ),
    }
    stage = Stage("prompts", config, inputs, (path,))
    if not stage.begin():
        return
    prompts: dict[str, Prompt] = {}
    for taken, remark in _taken_from_sets(config, tokenizer):
        stage.say(remark)
        prompts |= {prompt.id: prompt for prompt in taken}
    stage.replace()
    with atomically(path) as partial:
        write_prompts(partial, prompts.values())
    stage.finish()


def _taken_from_sets(config: Config, tokenizer: Any) -> Iterator[tuple[list[Prompt], str]]:
    for dataset in config.prompts.sets:
        prompts, records = read_set(dataset.name, dataset.file, dataset.kind)
        kept, remark = form_of(config).fit(tokenizer, prompts)
        least = 1 if dataset.prompts is None else dataset.prompts
        if len(kept) < least:
            raise InputError(
                f"prompts.sets: {dataset.name} gives {len(kept)} prompts, not {least}: {remark}"
            )
        taken = take_evenly(kept, dataset.prompts)
        kinds = Counter(prompt.kind for prompt in taken)
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        yield taken, f"{dataset.name}: {records} records, {remark}; taken: {counts}"
