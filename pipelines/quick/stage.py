"""Stage `quick`: whether speculation pays on this machine, with which verifier and tree, and whether a selector does.

It is the other stages in small: a latency profile, texts that are labelled until the time is over, and replay. Trees
and lookup rules are chosen on the texts of every other source, and compared with plain decoding on those between.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import count
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch

from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.texts.labelled import Work, make_shard
from data_gen.texts.prompts import Prompt, split_of, take_evenly
from data_gen.traces import texts_of
from pipelines.config import Config
from pipelines.pair.loading import encode, load_pair, prompts_path, recipe, tokenizer_of
from pipelines.pair.stage import prepared_prompts
from pipelines.quick.machine import profile_in_time
from pipelines.report.page import text_of
from pipelines.run import Stage, console, progress, table, write_json
from pipelines.statistics import with_interval
from pipelines.tracking import describe, mlflow_run
from pipelines.train.judging import potential_table
from selector.actions import EMPTY
from selector.decision import Mode
from selector.latency import LatencyProfile
from selector.schema import InputError
from selector.train.data import Texts, Timed
from selector.train.potential import Potential, potential
from selector.train.tuning import StaticTable, best_static, judge_mode, replay_mode, static_replay, tune_lookup_rule

SECTIONS = ("pair", "prompts", "sampling", "verifiers", "data", "train", "quick")

ELSEWHERE = 20.0  # seconds for the imports before, and for replay, tables and the record after
TOKENS = 48  # most labelled ones of a text: more sources tell more than longer texts
SOURCES = 4  # at least: two to choose on, and two to judge on
NOTICEABLE = 1.02  # times plain decoding: the few steps that are timed do not tell less apart
TREES = "A tree (K, L1, L2) has K branches of L2 tokens after a trunk of L1."


def plan(config: Config) -> list[str]:
    own, settings = config.quick, len(config.sampling)
    texts = f"up to {own.texts} texts of {TOKENS} tokens under each of {settings} sampling settings"
    return [f"{texts}, in {own.minutes:g} minutes; write {config.folder / 'quick.json'}"]


def run(config: Config) -> None:
    if config.pair.head:
        raise InputError("pair.head: quick compares trees of draft models; `espalier demo` runs all stages with a head")
    start = time.perf_counter()
    small = {"tokens": min(config.data.tokens, TOKENS), "features": "light"}
    config = config.model_copy(update={"data": config.data.model_copy(update=small)})
    prompts = _prompts(config)
    pair = load_pair(config)
    figures = config.folder / "quick.json"
    stage = Stage("quick", config, {"pair": pair.fingerprint}, (figures,))
    with mlflow_run(config, "quick", SECTIONS) as mlflow:
        end = start + 60 * config.quick.minutes - ELSEWHERE
        profile, answers = answers_in_time(config, pair, prompts, end)
        left_out = [str(setting.build()) for setting in config.sampling[len(answers) :]]
        stage.replace()
        found = {"device": profile.device, "pair": profile.pair, "left_out": left_out}
        write_json(figures, {**found, "settings": [asdict(answer) for answer in answers]})
        _print_tables(answers)
        for each in left_out:
            stage.say(f"{each}: left out, to stay within quick.minutes={config.quick.minutes:g}")
        verdicts = [answer.verdict() for answer in answers]
        for line in (*verdicts, _next(answers)):
            stage.say(line)
        mlflow.log_artifact(str(figures))
        describe(mlflow, "\n".join(verdicts))
    stage.finish()


def _prompts(config: Config) -> list[Prompt]:
    shares = config.prompts.validation, config.prompts.test
    kept = prepared_prompts(config, tokenizer_of(config))
    prompts = [prompt for prompt in take_evenly(kept) if split_of(prompt, *shares) != "test"]
    earlier: defaultdict[str, count[int]] = defaultdict(count)
    ordered = sorted(prompts, key=lambda prompt: next(earlier[prompt.source]))
    if len(earlier) < SOURCES:
        few = f"prompts of {SOURCES} sources are needed that are not held out for evaluate; there are {len(earlier)}"
        raise InputError(f"{prompts_path(config)}: {few}")
    return ordered


def answers_in_time(
    config: Config, pair: ModelPair, prompts: list[Prompt], end: float
) -> tuple[LatencyProfile, list[Answer]]:
    """This machine's profile; and the answers for the first sampling setting, and for those after it that there is time
    for until the moment `end` of `time.perf_counter()`."""
    encoded = [encode(config, pair, prompt) for prompt in prompts]
    profile = profile_in_time(config, pair, encoded, end - time.perf_counter())
    answers: list[Answer] = []
    text = 0.0  # seconds
    for remaining, setting in zip(range(len(config.sampling), 0, -1), config.sampling, strict=True):
        begin, sampling = time.perf_counter(), setting.build()
        if answers and begin + SOURCES * text > end:
            break
        rows = _labelled(config, pair, prompts, sampling, begin + (end - begin) / remaining)
        answers.append(Answer.of(sampling, texts_of(rows, config.verifiers), profile, config.verifiers))
        text = (time.perf_counter() - begin) / answers[-1].texts
    return profile, answers


def _labelled(config: Config, pair: ModelPair, prompts: list[Prompt], sampling: Sampling, until: float) -> pa.Table:
    prompts = prompts[: config.quick.texts]
    found: list[pa.Table] = []
    sources: set[str] = set()
    begin, size, start = 0, SOURCES, time.perf_counter()
    with progress() as bar:
        task = bar.add_task(f"labelling texts under {sampling}", total=len(prompts), note="")
        while size > 0:
            part = tuple((prompt, 0) for prompt in prompts[begin : begin + size])
            rows = make_shard(pair, recipe(config), Work("validation", sampling, part)).table
            found.append(rows.filter(pc.greater(rows["roots"], 0)))  # a text may end before its first look-ahead does
            sources.update(found[-1]["source"].to_pylist())
            begin += size
            bar.advance(task, size)
            fitting = int(begin * (until - time.perf_counter()) / (time.perf_counter() - start))
            size = min(config.data.texts_per_shard, len(prompts) - begin, max(SOURCES - len(sources), fitting))
    if len(sources) < SOURCES:
        raise InputError(f"quick: texts of {len(sources)} sources can be labelled: {SOURCES} are needed")
    return pa.concat_tables(found)


def _print_tables(answers: list[Answer]) -> None:
    for answer in answers:
        cells = [{name: text_of(value) for name, value in way.items()} for way in answer.ways]
        title = f"{answer.sampling}: speed over plain decoding and its 95% interval, replayed on {answer.texts} texts"
        console.print(table(cells, title, TREES))
    console.print(potential_table({answer.sampling: answer.potential for answer in answers}))


def _next(answers: list[Answer]) -> str:
    if any(answer.pays for answer in answers):
        return "next: `espalier demo` trains a selector, and decodes held-out prompts with every method"
    return "next: try a smaller draft, or let `espalier distil` train one for this target"


def way_of(timed: Timed, mode: Mode) -> dict[str, Any]:
    """A static tree or a lookup rule, and its speed over plain decoding's, with the bounds of its 95% interval."""
    mine, plain = replay_mode(timed, {}, mode), static_replay(timed, EMPTY)
    sums_X4 = torch.stack([mine.tokens_X, mine.seconds_X, plain.tokens_X, plain.seconds_X], dim=-1)
    speed, (low, high) = with_interval(sums_X4, timed.texts.source_number_X)
    choice = "no draft" if mode.action == EMPTY else str(mode.action)
    if mode.rule is not None:
        choice = f"copy {mode.rule.length} after a match of {mode.rule.least}, else {choice}"
    figures = {"block_efficiency": mine.block_efficiency, "speed": speed, "low": low, "high": high}
    return {"verifier": timed.verifier, "choice": choice, **figures}


@dataclass(frozen=True)
class Answer:
    """What was found under one sampling setting; `ways` are those of `way_of`."""

    sampling: Sampling
    texts: int
    ways: list[dict[str, Any]]
    best: dict[str, Any]
    potential: Potential

    @classmethod
    def of(cls, sampling: Sampling, texts: Texts, profile: LatencyProfile, verifiers: Sequence[str]) -> Answer:
        """From texts of at least four sources."""
        halves = [texts.take((texts.source_number_X % 2 == parity).nonzero()[:, 0]) for parity in (0, 1)]
        parts = {name: [Timed(half, name, profile) for half in halves] for name in verifiers}
        trees = {name: best_static(timed, StaticTable.of(timed)) for name, (timed, _) in parts.items()}
        order = sorted(trees, key=lambda name: trees[name].speed, reverse=True)
        (chosen, judged), tree = parts[order[0]], trees[order[0]]
        rule = tune_lookup_rule(chosen, tree)
        ways = [*(way_of(parts[name][1], trees[name]) for name in order), way_of(judged, rule)]
        copies, drafts = (judge_mode(chosen, {}, mode, EMPTY) for mode in (rule, tree))
        best = ways[-1] if copies.is_ahead_of(drafts) else ways[0]
        best = next((way for way in (best, ways[0]) if way["low"] > 1), best)  # a tree that surely pays is an answer
        return cls(sampling, len(texts), ways, best, potential(chosen, judged))

    @property
    def pays(self) -> bool:
        return bool(self.best["speed"] > NOTICEABLE)

    def verdict(self) -> str:
        if self.best["speed"] > 1.01 * self.best["block_efficiency"]:  # every step has the target's pass
            return f"{self.sampling}: steps seem quicker with a draft than without: the machine is busy; repeat later"
        if not self.pays:
            return f"{self.sampling}: speculation does not pay here: decode without a draft"
        sure = "may pay; more quick.minutes tell" if self.best["low"] <= 1 else "pays"
        factor = "{speed:.2f} [{low:.2f}, {high:.2f}] times plain decoding with {verifier}, {choice}"
        return f"{self.sampling}: speculation {sure}: {factor.format(**self.best)}"
