"""The shards of the data stage, and their texts, bytes and time (`--plan`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.texts.given import GivenText, apart, read_log
from data_gen.texts.labelled import BEYOND, Work
from data_gen.texts.prompts import split_of
from data_gen.traces import text_bytes
from pipelines.config import Config
from pipelines.pair.loading import check_models, hidden_widths, no_prompts, prompts_of
from pipelines.run import console
from selector.actions import ActionSpace
from selector.schema import FULL, InputError
from selector.train.data import SPLITS

DECODED = 0.1  # share of the training texts that speculative decoding writes, as a check of the labels


def split_counts(config: Config) -> dict[str, int]:
    """Texts of each split under every sampling setting."""
    test, validation = config.prompts.test, config.prompts.validation
    shares = {"train": 1 - test - validation, "validation": validation, "test": test}
    return {split: max(2, round(config.data.texts * share)) for split, share in shares.items()}


def shards(config: Config, pair: ModelPair) -> dict[str, Work]:
    """Shard names (within the folder of traces) and the work of each."""
    result: dict[str, Work] = {}
    numbers, size = Counter[str](), config.data.texts_per_shard
    for whole in _of_log(config, pair) if config.data.log else _of_prompts(config, pair):
        for begin in range(0, len(whole.prompts or whole.given), size):
            part = slice(begin, begin + size)
            name = f"{whole.split}/part-{numbers[whole.split]:05d}.parquet"
            result[name] = replace(whole, prompts=whole.prompts[part], given=whole.given[part])
            numbers[whole.split] += 1
    return result


def _of_prompts(config: Config, pair: ModelPair) -> Iterator[Work]:
    for split, count in split_counts(config).items():
        prompts = prompts_of(config, pair, split)
        for setting in config.sampling:
            sampling = setting.build()
            texts = tuple((prompts[n % len(prompts)], n // len(prompts)) for n in range(count))
            if sampling.temperature == 0:  # all greedy texts of one prompt are the same
                texts = texts[: len(prompts)]
            decoded = round(DECODED * len(texts)) if split == "train" else 0
            yield Work(split, sampling, texts[:decoded], decoded=True)
            # shorter prompts are padded to longer ones
            yield Work(split, sampling, tuple(sorted(texts[decoded:], key=lambda each: len(each[0].text))))


def _of_log(config: Config, pair: ModelPair) -> Iterator[Work]:
    """InputError where the run lacks a text's sampling setting, a text is too long, or a split is empty."""
    path = config.data.log
    assert path is not None
    settings, longest = {setting.build().law: setting.build() for setting in config.sampling}, 0
    texts: dict[tuple[str, Sampling], list[GivenText]] = {}
    given, said = apart(read_log(path, pair))
    if said:
        console.print(f"[bold]data[/]: {path}: {said}", soft_wrap=True)
    for text in given:
        sampling = settings.get(text.sampling.law)
        if sampling is None:
            raise InputError(f"{text.place}: {text.sampling} is not among the run's sampling settings")
        if (count := len(text.prompt_tokens) + len(text.completion)) > pair.max_positions:
            raise InputError(f"{text.place}: {count} tokens; the pair has {pair.max_positions} positions")
        longest = max(longest, count)
        split = split_of(text.prompt, config.prompts.validation, config.prompts.test)
        texts.setdefault((split, sampling), []).append(text)
    check_models(config, pair, longest)  # no trees are drafted behind these texts
    for split, sampling in product(SPLITS, settings.values()):
        if (split, sampling) not in texts:
            raise no_prompts(config, path, [text.prompt for text in given if text.sampling.law == sampling.law], split)
    for (split, sampling), part in texts.items():
        yield Work(split, sampling, (), given=tuple(part))


def size_line(config: Config) -> str:
    """The texts and bytes that will be written."""
    if config.data.log is not None:
        return f"the texts of {config.data.log}, one teacher-forced pass of each model over each"
    counts, settings, data = split_counts(config), len(config.sampling), config.data
    hidden = sum(hidden_widths(config)) * data.tokens if data.features == FULL else 0
    tokens = config.prompts.tokens + data.tokens + BEYOND
    trees = replace(ActionSpace.default(), max_K=1) if config.pair.head else ActionSpace.recorded()
    each = {
        split: text_bytes(tokens, data.tokens, len(config.verifiers), hidden // stride, trees)
        for split, stride in {**dict.fromkeys(counts, 1), "train": data.stride}.items()
    }
    total = settings * sum(count * each[split] for split, count in counts.items())
    texts = ", ".join(f"{count} for {split}" for split, count in counts.items())
    return (
        f"{settings} sampling settings x {sum(counts.values())} texts ({texts}) of {data.tokens} labelled tokens; "
        f"up to {max(each.values()) / 1e3:.0f} kB a text, {total / 1e6:.0f} MB in all before compression"
    )
