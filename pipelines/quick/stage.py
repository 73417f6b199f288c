"""Stage `quick`: whether speculation pays on this machine, with which verifier and tree, and whether a selector does.

It is the other stages in small: a latency profile, texts that are labelled until the time is over, and replay.
"""

from __future__ import annotations

import io
import math
import time
from collections import defaultdict
from dataclasses import asdict
from itertools import count
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console

from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.texts.labelled import Work, make_shard
from data_gen.texts.prompts import Prompt, split_of, take_evenly
from data_gen.traces import texts_of
from pipelines.config import Config
from pipelines.pair import prompt_writing
from pipelines.pair.loading import check_before_loading, encode, load_pair, prompts_path, recipe, tokenizer_of
from pipelines.quick.answer import Answer
from pipelines.quick.machine import profile_in_time
from pipelines.report.page import text_of
from pipelines.run import Stage, console, progress, table, write_json
from pipelines.tracking import describe, mlflow_run
from pipelines.train.judging import potential_table
from selector.files import atomically
from selector.latency import LatencyProfile
from selector.schema import InputError

SECTIONS = ("pair", "prompts", "sampling", "verifiers", "data", "train", "quick")

ELSEWHERE = 20.0  # seconds for the imports before, and for replay, tables and the record after
TOKENS = 48  # most labelled ones of a text: more sources tell more than longer texts
SOURCES = 4  # at least: two to choose on, and two to judge on
LEAST = 6  # in the times of one text: measurements and `SOURCES` texts
TREES = "A tree (K, L1, L2) has K branches of L2 tokens after a trunk of L1."


def plan(config: Config) -> list[str]:
    texts = (
        f"up to {config.quick.texts} texts of {TOKENS} tokens under each of {len(config.sampling)} sampling settings"
    )
    return [f"{texts}, in {config.quick.minutes:g} minutes; write {config.folder / 'quick.json'}"]


def run(config: Config) -> None:
    """Print the tables and the verdicts, and write them to `quick.json` and `quick.html`."""
    if config.pair.head:
        raise InputError("pair.head: quick compares trees of draft models; `espalier demo` runs all stages with a head")
    start = time.perf_counter()
    small = {"tokens": min(config.data.tokens, TOKENS), "features": "light"}
    config = config.model_copy(update={"data": config.data.model_copy(update=small)})
    check_before_loading(config)
    prompts = _prompts(config)
    pair = load_pair(config)
    figures, page = config.folder / "quick.json", config.folder / "quick.html"
    stage = Stage("quick", config, {"pair": pair.fingerprint}, (figures, page))
    with mlflow_run(config, "quick", SECTIONS) as mlflow:
        _refuse_to_be_late(config, pair, prompts, start)
        end = start + 60 * config.quick.minutes - ELSEWHERE
        profile, answers, warning = answers_in_time(config, pair, prompts, end)
        left_out = [str(setting.build()) for setting in config.sampling[len(answers) :]]
        stage.replace()
        found = {"device": profile.device, "pair": profile.pair, "warning": warning, "left_out": left_out}
        write_json(figures, {**found, "settings": [asdict(answer) for answer in answers]})
        lines = [f"{each}: left out, to stay within quick.minutes={config.quick.minutes:g}" for each in left_out]
        lines += [f"[bold yellow]warning[/]: {warning}"] if warning else []
        verdicts = [answer.verdict() for answer in answers]
        _print(stage, page, answers, [*lines, *verdicts, _next(answers)])
        for path in (figures, page):
            mlflow.log_artifact(str(path))
        describe(mlflow, "\n".join(verdicts))
    stage.say(f"{page.resolve()}")
    stage.finish()


def _prompts(config: Config) -> list[Prompt]:
    shares = config.prompts.validation, config.prompts.test
    kept = prompt_writing.write(config, tokenizer_of(config))
    prompts = [prompt for prompt in take_evenly(kept) if split_of(prompt, *shares) != "test"]
    earlier: defaultdict[str, count[int]] = defaultdict(count)
    ordered = sorted(prompts, key=lambda prompt: next(earlier[prompt.source]))
    if len(earlier) < SOURCES:
        few = f"prompts of {SOURCES} sources are needed that are not held out for evaluate; there are {len(earlier)}"
        raise InputError(f"{prompts_path(config)}: {few}")
    return ordered


def _refuse_to_be_late(config: Config, pair: ModelPair, prompts: list[Prompt], start: float) -> None:
    """Label one text; InputError where the least that can be done takes longer than there is time for."""
    begin = time.perf_counter()
    make_shard(pair, recipe(config), Work("validation", config.sampling[0].build(), ((prompts[0], 0),)))
    text = time.perf_counter() - begin
    needed = begin - start + LEAST * text + ELSEWHERE
    if needed > 60 * config.quick.minutes:
        raise InputError(
            f"quick: a text of {config.data.tokens} tokens takes {text:.1f} s here: even the least takes longer than "
            f"quick.minutes={config.quick.minutes:g}: set quick.minutes={math.ceil(10 * needed / 60) / 10:g}"
        )


def answers_in_time(
    config: Config, pair: ModelPair, prompts: list[Prompt], end: float
) -> tuple[LatencyProfile, list[Answer], str]:
    """This machine's profile; the answers for the first sampling setting, and for those after it that there is time for
    until the moment `end` of `time.perf_counter()`; and why not to trust them, else empty. InputError where texts of
    fewer than four sources can be labelled."""
    encoded = [encode(config, pair, prompt) for prompt in prompts]
    profile, warning = profile_in_time(config, pair, encoded, end - time.perf_counter())
    answers: list[Answer] = []
    text = 0.0  # seconds
    for remaining, setting in zip(range(len(config.sampling), 0, -1), config.sampling, strict=True):
        begin, sampling = time.perf_counter(), setting.build()
        if answers and begin + SOURCES * text > end:
            break
        rows = _labelled(config, pair, prompts, sampling, begin + (end - begin) / remaining)
        answers.append(Answer.of(sampling, texts_of(rows, config.verifiers), profile, config.verifiers))
        text = (time.perf_counter() - begin) / answers[-1].texts
    return profile, answers, warning


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


def _print(stage: Stage, path: Path, answers: list[Answer], lines: list[str]) -> None:
    parts = []
    for answer in answers:
        cells = [{name: text_of(value) for name, value in way.items()} for way in answer.ways]
        title = f"{answer.sampling}: speed over plain decoding and its 95% interval, replayed on {answer.texts} texts"
        parts.append(table(cells, title, TREES))
    gains = {(answer.sampling.temperature, answer.sampling.top_p): answer.potential for answer in answers}
    parts.append(potential_table(gains))
    console.print(*parts)
    for line in lines:
        stage.say(line)
    page = Console(record=True, file=io.StringIO(), width=120, highlight=False)
    page.print(*parts, *lines, sep="\n")
    with atomically(path) as partial:
        partial.write_text(page.export_html(), encoding="utf-8")


def _next(answers: list[Answer]) -> str:
    if any(answer.pays for answer in answers):
        return "next: `espalier demo` trains a selector, and decodes held-out prompts with every method"
    return "next: try a smaller draft, or let `espalier distil` train one for this target"
