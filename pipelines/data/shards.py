"""The work of the `data` stage, in shards that depend on nothing but the config, the pair and the prompts.

What a shard holds follows from its own texts and seeds, so that any worker can make it, in any order.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import torch

from data_gen import traces
from data_gen.decoding.decoder import Decoder, Random
from data_gen.features.root import TextKnowledge
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.text_labels.labels import TextLabeller
from data_gen.texts.halving import halving
from data_gen.texts.prompts import Prompt, split_of
from data_gen.texts.written import (
    ImpossibleToken,
    LoggedText,
    Plausibility,
    Text,
    finished,
    next_tokens,
    read_log,
    rows_along,
    seed_of,
    written_by_target,
)
from data_gen.verification import get_verifier
from pipelines.config import Config
from pipelines.pair.encoding import encode, prompts_of, prompts_path
from selector.actions import ActionSpace
from selector.schema import FULL, HIDDEN_STATES, LOOKUP_COLUMN, InputError, survival_column
from selector.train.data import SPLITS

DEPTH = ActionSpace.default().depth
BEYOND = DEPTH - 1  # tokens that follow the labelled ones: the last prompt token is a root, too
PARTS = ("written", "decoded", "labelled", "writing")  # of the time that a run takes


@dataclass(frozen=True)
class Work:
    """A shard to make: texts of one split under one sampling setting.

    Attributes:
        prompts: with the number of each one's text, where a prompt is continued several times.
        decoded: whether speculative decoding writes the texts.
        logged: the texts, where they are there already: an engine wrote them.
    """

    split: str
    sampling: Sampling
    prompts: tuple[tuple[Prompt, int], ...]
    decoded: bool = False
    logged: tuple[LoggedText, ...] = ()


@dataclass
class Shard:
    """The rows of a shard, the seconds that they took by part, and what was seen of the texts."""

    table: pa.Table
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    plausibility: Plausibility = field(default_factory=Plausibility)


def split_counts(config: Config) -> dict[str, int]:
    """Texts of each split under every sampling setting."""
    test, validation = config.prompts.test, config.prompts.validation
    shares = {"train": 1 - test - validation, "validation": validation, "test": test}
    return {split: max(2, round(config.data.texts * share)) for split, share in shares.items()}


def shards(config: Config, pair: ModelPair) -> dict[str, Work]:
    """Shard names (without folder) and what belongs into each."""
    return _of_log(config, pair) if config.data.log else _of_prompts(config, pair)


def _of_prompts(config: Config, pair: ModelPair) -> dict[str, Work]:
    result: dict[str, Work] = {}
    for split, count in split_counts(config).items():
        prompts = prompts_of(config, pair, split)
        if not prompts:
            raise InputError(f"{prompts_path(config)}: no prompts for {split}; splits go by `source`")
        number = 0
        for setting in config.sampling:
            sampling = setting.build()
            # greedy texts of one prompt are all alike
            texts = [(prompts[n % len(prompts)], n // len(prompts)) for n in range(count)]
            texts = texts[: len(prompts)] if sampling.temperature == 0 else texts
            decoded = round(config.data.decoded * len(texts)) if split == "train" else 0
            for part, how in ((texts[:decoded], True), (texts[decoded:], False)):
                for begin in range(0, len(part), config.data.texts_per_shard):
                    chosen = tuple(part[begin : begin + config.data.texts_per_shard])
                    result[_name(split, number)] = Work(split, sampling, chosen, decoded=how)
                    number += 1
    return result


def _name(split: str, number: int) -> str:
    return f"{split}/part-{number:05d}.parquet"


def _of_log(config: Config, pair: ModelPair) -> dict[str, Work]:
    """InputError where a line is of a setting that the run does not have, a text is longer than the pair's context, or
    a split would be empty."""
    path = config.data.log
    assert path is not None
    settings = {setting.build().law: setting.build() for setting in config.sampling}
    texts: dict[tuple[str, Sampling], list[LoggedText]] = {}
    for text in read_log(path, pair):
        sampling = settings.get(text.sampling.law)
        if sampling is None:
            raise InputError(f"{path}:{text.line}: {text.sampling} is not among the run's sampling settings")
        if (count := len(text.prompt_tokens) + len(text.completion)) > pair.max_positions:
            raise InputError(f"{path}:{text.line}: {count} tokens; the pair has {pair.max_positions} positions")
        split = split_of(text.prompt, config.prompts.validation, config.prompts.test)
        texts.setdefault((split, sampling), []).append(text)
    for split in SPLITS:
        for sampling in settings.values():
            if (split, sampling) not in texts:
                raise InputError(f"{path}: no text for {split} under {sampling}; splits go by `source`")
    result: dict[str, Work] = {}
    for (split, sampling), part in texts.items():
        for begin in range(0, len(part), config.data.texts_per_shard):
            number = sum(name.startswith(f"{split}/") for name in result)
            chosen = tuple(part[begin : begin + config.data.texts_per_shard])
            result[_name(split, number)] = Work(split, sampling, (), logged=chosen)
    return result


def make_shard(config: Config, pair: ModelPair, work: Work) -> Shard:
    """The rows of a shard.

    Raises:
        InputError: a model gives something else than finite numbers, or a logged text cannot be the target's; names the
            prompt, or the log and its line.
    """
    shard = Shard(pa.table({}))
    start = time.perf_counter()
    texts = list(_texts(config, pair, work))
    shard.seconds["decoded" if work.decoded else "written"] += time.perf_counter() - start
    start = time.perf_counter()
    with threads(config.data.threads):
        rows = [_row(config, pair, work, shard.plausibility, *each) for each in texts]
    shard.seconds["labelled"] += time.perf_counter() - start
    shard.table = traces.to_table(rows, traces.text_schema(config.verifiers, config.data.features == FULL))
    return shard


def _texts(config: Config, pair: ModelPair, work: Work) -> Iterator[tuple[Prompt, Text, str | None, str]]:
    """Prompt, text, the verifier that decoded it if one did, and how an error names it."""
    new = config.data.tokens + BEYOND
    if work.logged:
        for logged in work.logged:
            text = finished(pair, logged.prompt_tokens, logged.completion)
            where = f"{config.data.log}:{logged.line}" if config.data.log else f"prompt {logged.prompt.id}"
            yield logged.prompt, text, None, where
        return
    prompts = [encode(config, pair, prompt) for prompt, _ in work.prompts]
    for (prompt, _), tokens in zip(work.prompts, prompts, strict=True):
        if not tokens:
            raise InputError(f"prompt {prompt.id}: the tokenizer gives no tokens")
    seed = seed_of(config.seed, work.split, work.sampling, *(f"{prompt.id}#{n}" for prompt, n in work.prompts))
    if not work.decoded:
        more = f" and {len(prompts) - 1} more" if len(prompts) > 1 else ""
        with _naming(f"prompt {work.prompts[0][0].id}{more}"):
            texts = written_by_target(pair, prompts, new, work.sampling, seed)
        for (prompt, _), text in zip(work.prompts, texts, strict=True):
            yield prompt, text, None, f"prompt {prompt.id}"
        return
    for number, ((prompt, _), tokens) in enumerate(zip(work.prompts, prompts, strict=True)):
        verifier = config.verifiers[number % len(config.verifiers)]
        own = seed_of(seed, number)
        chooser = Random(config.data.behaviour_actions, torch.Generator().manual_seed(own))
        decoder = Decoder(pair, work.sampling, get_verifier(verifier), chooser)
        with _naming(f"prompt {prompt.id}"):
            decoded = decoder.decode(tokens, new, torch.Generator(device=pair.device).manual_seed(own + 1))
        yield prompt, finished(pair, tokens, decoded.tokens, decoded.steps), verifier, f"prompt {prompt.id}"


def _row(
    config: Config,
    pair: ModelPair,
    work: Work,
    plausibility: Plausibility,
    prompt: Prompt,
    text: Text,
    verifier: str | None,
    where: str,
) -> dict[str, Any]:
    """The trace row of a text."""
    space = ActionSpace.default()
    with _naming(where):
        labelled = label(config, pair, text, work, plausibility)
    roots = max(0, len(text.tokens) - text.start - DEPTH)
    steps = [step for step in text.steps if step.length - 1 - text.start < roots]
    setting = work.sampling
    return {
        "prompt": prompt.id,
        "kind": prompt.kind,
        "source": prompt.source,
        "temperature": setting.temperature,
        "top_p": setting.top_p,
        "top_k": setting.top_k,
        "min_p": setting.min_p,
        "draft_temperature": setting.draft_temperature,
        "tokens": text.tokens,
        "start": text.start,
        "roots": roots,
        **labelled,
        "step_root": [step.length - 1 - text.start for step in steps],
        "step_action": [space.index(step.action) for step in steps],
        "step_accepted": [step.accepted for step in steps],
        "step_verifier": verifier,
    }


@contextmanager
def _naming(where: str) -> Iterator[None]:
    """Errors of the input begin with where they arose."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{where}: {error}") from error


def label(config: Config, pair: ModelPair, text: Text, work: Work, seen: Plausibility) -> dict[str, Any]:
    """Trace columns of a text's features and labels.

    A token that the target's own pass gives probability 0 ends the text where rounding explains it: two logits that
    tie.

    Raises:
        InputError: the text holds a token of probability 0 that no tie explains.
    """

    def attempt() -> tuple[dict[str, Any], Plausibility]:
        own = Plausibility()
        return _label(config, pair, text, work, own), own

    try:
        columns, own = halving(attempt)
    except ImpossibleToken as impossible:
        if not impossible.at_a_tie:
            raise InputError(f"{impossible}: the text is not the target's own under {work.sampling}") from impossible
        text.tokens = text.tokens[: impossible.position]
        return label(config, pair, text, work, seen)
    seen.join(own)
    return columns


@torch.inference_mode()
def _label(config: Config, pair: ModelPair, text: Text, work: Work, seen: Plausibility) -> dict[str, Any]:
    roots = len(text.tokens) - text.start - DEPTH
    columns = [survival_column(name) for name in config.verifiers]
    full = config.data.features == FULL
    stride = config.data.stride if work.split == "train" else 1
    if roots < 1:
        names = ("scalars", LOOKUP_COLUMN, *columns, *(HIDDEN_STATES if full else ()))
        return {**{name: [] for name in names}, "hidden_stride": stride}
    own = text.tokens[text.start :]
    generator = torch.Generator().manual_seed(seed_of(config.seed, "siblings", *own))
    tokens_T = torch.tensor(own, device=pair.device)
    labeller = TextLabeller(tokens_T, config.verifiers, config.data.siblings, generator)
    knowledge = TextKnowledge(text.tokens, text.start, work.sampling)
    hidden: list[tuple[torch.Tensor, torch.Tensor]] = []
    for block in rows_along(pair, text, work.sampling):
        following = next_tokens(text, knowledge.seen, len(block.target.probs_NV))
        seen.add(block.target, *following, work.sampling)
        knowledge.add(*block)
        labeller.add(block.target.probs_NV, block.draft.probs_NV)
        if full:
            hidden.append((block.target.hidden_ND.half().cpu(), block.draft.hidden_ND.half().cpu()))
    result: dict[str, Any] = {"scalars": knowledge.scalars(roots), "hidden_stride": stride}
    result[LOOKUP_COLUMN] = knowledge.foretold(roots, DEPTH)
    result |= dict(zip(columns, labeller.survivals().cpu(), strict=True))
    if full:
        target_ND, draft_ND = (torch.cat(parts) for parts in zip(*hidden, strict=True))
        at = torch.arange(1, roots, stride)
        result |= dict(zip(HIDDEN_STATES, (target_ND[at - 1], draft_ND[at - 1], draft_ND[at]), strict=True))
    return result


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """So many CPU threads in torch for a while; as before if None."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(count, os.cpu_count() or count) if count else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)
