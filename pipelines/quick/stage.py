"""Stage `quick`: whether speculation pays on this machine, with which verifier and tree, and whether a selector does.

It needs no other stage. It measures a coarser latency profile than the latency stage, and labels some texts that the
target writes, under each sampling setting. Replay gives the speeds of trees and of copies of earlier text, and the gain
of a quick model over the best of them. It does as much as there is time for, and says what it leaves out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from math import ceil

from data_gen import timing
from data_gen.models.checkpoints import is_shape
from data_gen.models.pair import ModelPair
from data_gen.texts.prompts import Prompt, split_of, take_evenly
from pipelines.config import Config
from pipelines.pair import prompt_writing
from pipelines.pair.loading import (
    all_prompts,
    check_before_loading,
    load_pair,
    pair_names,
    prompts_path,
    tokenizer_of,
)
from pipelines.quick import machine
from pipelines.quick.candidates import SOURCES
from pipelines.quick.in_time import Found, InTime
from pipelines.quick.page import TREES, page
from pipelines.quick.sizes import SLOW, UNLABELLED, Prices, Sizes, fitting
from pipelines.run import Stage, console, progress, write_json
from pipelines.tracking import describe, mlflow_run
from pipelines.train.judging import potential_table
from selector.files import atomically
from selector.schema import InputError

SECTIONS = ("pair", "prompts", "sampling", "verifiers", "data", "train", "quick")

ELSEWHERE = 18.0  # seconds for the imports before, and the tables and the record after
PLAIN_NAMES = str.maketrans({"=": " ", ",": ""})


def plan(config: Config) -> list[str]:
    return [
        f"up to {config.quick.texts} texts of up to {config.data.tokens} tokens under each of {len(config.sampling)} "
        f"sampling settings, in {config.quick.minutes:g} minutes; write {config.folder / 'quick.json'}"
    ]


def run(config: Config) -> None:
    """Print the candidates and the verdict, and write them to `quick.json` and `quick.html`; for a pair without
    weights, print the table of `assumed`."""
    if config.pair.head:
        raise InputError("pair.head: quick compares trees of draft models; `espalier demo` runs all stages with a head")
    end = time.perf_counter() + 60 * config.quick.minutes - ELSEWHERE
    shapes = any(map(is_shape, pair_names(config)))
    prompts = [] if shapes else _prompts(config)
    pair = load_pair(config, shapes=True)
    with mlflow_run(config, "quick", SECTIONS) as mlflow:
        if shapes:
            console.print(_without_weights(config, pair))
            return
        lengths = [len(ids) for ids in config.prompts.form.whole(pair.tokenizer, prompts)]
        lengths = [min(length, config.prompts.tokens) for length in lengths]
        since = timing.clocks()
        with console.status("measuring a few passes and labels"):
            prices, sizes = _sizes(config, pair, lengths, end)
        outputs = config.folder / "quick.json", config.folder / "quick.html"
        stage = Stage("quick", config, {"pair": pair.fingerprint}, outputs)
        if busy := timing.disturbance(pair.device, since):
            stage.say(f"[bold yellow]warning[/]: {busy}")
        _refuse_to_be_late(config, prices, sizes, end - time.perf_counter())
        _say(stage, config, prices, sizes)
        found = InTime(config, pair, prices, sizes, _in_turns(prompts), lengths, end).found()
        stage.replace()
        for answer in found.answers:
            for each in answer.candidates:
                name = f"speed over plain decoding/{answer.sampling}/{each.verifier}"
                mlflow.log_metric(name.translate(PLAIN_NAMES), each.judged.ratio.value)
        write_json(outputs[0], found.to_json())
        with atomically(outputs[1]) as partial:
            partial.write_text(page(config.name, found), encoding="utf-8")
        for path in outputs:
            mlflow.log_artifact(str(path))
        describe(mlflow, "\n".join(answer.verdict() for answer in found.answers))
    _print(stage, config, found)
    stage.say(f"{outputs[1].resolve()}")
    stage.finish()


def _print(stage: Stage, config: Config, found: Found) -> None:
    """The tables, what was left out, and last the verdicts."""
    for answer in found.answers:
        console.print(answer.table())
    console.print(TREES)
    console.print(potential_table({answer.candidates[0].mode.setting: answer.potential for answer in found.answers}))
    stage.say(f"{' and '.join(UNLABELLED)} have no labels along a text, and are not compared")
    if found.left_out:
        reason = f"[bold]left out[/], to stay within quick.minutes={config.quick.minutes:g}:"
        stage.say("\n  - ".join([reason, *found.left_out]))
    for answer in found.answers:
        stage.say(answer.verdict())
    if found.disturbed:
        stage.say(f"[bold yellow]warning[/]: {found.disturbed}")


def _sizes(config: Config, pair: ModelPair, lengths: Sequence[int], end: float) -> tuple[Prices, Sizes]:
    """What its parts cost, and what fits. Costly verifiers are priced only where there may be time for them."""
    prices, new = Prices.measured(pair, config.data.tokens), config.data.tokens
    sizes = fitting(config, prices, lengths, end - time.perf_counter())
    wanted = min(config.quick.texts, len(lengths))
    if config.train.verifier in SLOW or (sizes.texts, sizes.tokens, sizes.prompt) == (wanted, new, max(lengths)):
        prices = prices.with_slow(pair, new)
        sizes = fitting(config, prices, lengths, end - time.perf_counter())
    return prices, sizes


def _refuse_to_be_late(config: Config, prices: Prices, sizes: Sizes, left: float) -> None:
    """InputError where the least that can be done takes longer than there is time for."""
    if sizes.least > left:
        minutes = ceil(10 * (config.quick.minutes + 1.1 * (sizes.least - left) / 60)) / 10
        raise InputError(
            f"quick: a pass of the target takes {1e3 * prices.target:.0f} ms here, of the draft "
            f"{1e3 * prices.draft:.0f} ms: even the least takes longer than quick.minutes={config.quick.minutes:g}: "
            f"set quick.minutes={minutes:g}"
        )


def _prompts(config: Config) -> list[Prompt]:
    """The prompts, made if need be, and all that can be checked before weights are loaded."""
    if not config.prompts.sets:
        _usable(config, all_prompts(config))
    check_before_loading(config)
    return _usable(config, prompt_writing.write(config, tokenizer_of(config)))


def _usable(config: Config, prompts: list[Prompt]) -> list[Prompt]:
    """The prompts that are not held out for `evaluate`; InputError where they have too few sources."""
    shares = config.prompts.validation, config.prompts.test
    prompts = [prompt for prompt in prompts if split_of(prompt, *shares) != "test"]
    sources = len({prompt.source for prompt in prompts})
    if sources < SOURCES:
        few = f"prompts of {SOURCES} sources are needed that are not held out for evaluate; there are {sources}"
        raise InputError(f"{prompts_path(config)}: {few}")
    return prompts


def _in_turns(prompts: list[Prompt]) -> list[Prompt]:
    """All prompts, evenly by kind, and one of each source before a second one of any."""
    seen: Counter[str] = Counter()
    turns: list[tuple[int, Prompt]] = []
    for prompt in take_evenly(prompts):
        turns.append((seen[prompt.source], prompt))
        seen[prompt.source] += 1
    return [prompt for _, prompt in sorted(turns, key=lambda turn: turn[0])]


def _say(stage: Stage, config: Config, prices: Prices, sizes: Sizes) -> None:
    settings = f" under each of {len(config.sampling)} sampling settings" if len(config.sampling) > 1 else ""
    stage.say(
        f"a pass of the target takes {1e3 * prices.target:.1f} ms, of the draft {1e3 * prices.draft:.1f} ms; "
        f"{sizes.texts} texts of {sizes.tokens} tokens{settings} and {len(sizes.verifiers)} verifiers take about "
        f"{sizes.seconds:.0f} s more"
    )


def _without_weights(config: Config, pair: ModelPair) -> object:
    sizes, length = Sizes(0, config.data.tokens, 0), config.prompts.tokens + config.data.tokens // 2
    with progress() as bar:
        task = bar.add_task("timing passes", total=sizes.repeats, note="")
        return machine.assumed(machine.passes(config, pair, sizes, length, lambda: bar.advance(task)))
