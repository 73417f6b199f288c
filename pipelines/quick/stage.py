"""Stage `quick`: whether speculation pays on this machine, with which verifier and tree, and whether a selector does.

It measures a coarser latency profile than the latency stage, and labels some texts that the target writes, under each
sampling setting. Replay gives the speeds of trees and of copies of earlier text, and the gain of a quick model over the
best of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from rich.table import Column, Table

from data_gen import timing
from data_gen.models.checkpoints import is_shape
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.texts.labelled import Work, make_shard
from data_gen.texts.prompts import Prompt, split_of, take_evenly
from data_gen.texts.recorded import texts_of
from data_gen.verification import VERIFIERS
from pipelines.config import Config
from pipelines.latency.profile import NODES, WIDTHS, decision_seconds
from pipelines.latency.stage import FITTED, REAL_STEPS
from pipelines.pair.loading import (
    all_prompts,
    depends,
    encode,
    load_pair,
    pair_names,
    prompts_path,
    recipe,
    tokenizer_of,
)
from pipelines.quick.candidates import Candidate, best_of, candidates, halves
from pipelines.run import Stage, console, progress, require, write_json
from pipelines.tracking import describe, mlflow_run
from pipelines.train.judging import potential_table
from selector.actions import EMPTY, Action, ActionSpace, choice_of
from selector.latency import LatencyProfile
from selector.schema import EARLY, LIGHT, InputError
from selector.train.data import Setting, Timed
from selector.train.potential import Potential, potential

SECTIONS = ("pair", "prompts", "sampling", "verifiers", "data", "train", "quick")

SPLIT = "validation"
REPEATS = 4
STEP_PROMPTS = 2  # on which real decoding steps are timed
SELECTOR_TEXTS = 3  # times as many texts as for the trees, for a model is fitted on half of them
ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)  # assumed where the pair has no weights
LEVELS = EARLY, LIGHT
PLAIN_NAMES = str.maketrans({"=": " ", ",": ""})
UNLABELLED, SLOW = ("khisti", "greedy_block"), ("priority", "lifted_priority")  # their labels take most of the time
LABELLED = tuple(name for name in VERIFIERS if name not in (*UNLABELLED, *SLOW))


def plan(config: Config) -> list[str]:
    return [
        f"{SELECTOR_TEXTS * config.quick.texts} texts of {config.data.tokens} tokens under each of "
        f"{len(config.sampling)} sampling settings, {len(LABELLED)} verifiers; write {config.folder / 'quick.json'}"
    ]


def run(config: Config) -> None:
    """Print the candidates and the verdict, and write them to `quick.json`; for a pair without weights, print the table
    of `assumed`."""
    output, shapes = config.folder / "quick.json", any(map(is_shape, pair_names(config)))
    prompts = [] if shapes else _prompts(config)
    pair = load_pair(config, shapes=True)
    with mlflow_run(config, "quick", SECTIONS) as mlflow, progress() as bar:
        texts = min(len(prompts), SELECTOR_TEXTS * config.quick.texts)
        total = REPEATS + (0 if shapes else len(config.sampling) * texts)
        task = bar.add_task("timing" if shapes else "timing and labelling", total=total, note="")
        profile = _profile(config, pair, lambda: bar.advance(task))
        if shapes:
            console.print(assumed(profile, LABELLED[0]))
            return
        stage = Stage("quick", config, {"pair": pair.fingerprint}, (output,))
        profile = _with_steps(
            config, pair, profile, [encode(config, pair, prompt) for prompt in prompts[:STEP_PROMPTS]]
        )
        found = []
        for setting in config.sampling:
            label = _Labeller(config, pair, setting.build(), lambda count: bar.advance(task, count))
            found.append(_answer(config, label, prompts, profile))
            for each in found[-1].candidates:
                name = f"speed over plain decoding/{setting.build()}/{each.verifier}"
                mlflow.log_metric(name.translate(PLAIN_NAMES), each.judged.ratio.value)
        stage.replace()
        rows = [answer.row(setting.build()) for answer, setting in zip(found, config.sampling, strict=True)]
        write_json(output, {"device": profile.device, "pair": pair.fingerprint, "settings": rows})
        mlflow.log_artifact(str(output))
        describe(mlflow, "\n".join(answer.verdict() for answer in found))
    for answer in found:
        console.print(answer.table(profile.device))
    console.print(potential_table({answer.setting: answer.potential for answer in found}))
    for answer in found:
        stage.say(answer.verdict())
    stage.finish()


def _prompts(config: Config) -> list[Prompt]:
    """The prompts of the split, read and checked before anything is loaded or timed; says how many are cut."""
    if config.pair.target == "embedded":
        require(config, "pair", depends(config))
    shares = config.prompts.validation, config.prompts.test
    prompts = [prompt for prompt in all_prompts(config) if split_of(prompt, *shares) == SPLIT]
    if len({prompt.source for prompt in prompts}) < 4:
        raise InputError(f"{prompts_path(config)}: fewer than four sources for {SPLIT}; splits go by `source`")
    kept, said = config.prompts.form.fit(tokenizer_of(config), prompts)
    console.print(f"[bold]quick[/]: {said} (prompts.tokens)", soft_wrap=True)
    if len({prompt.source for prompt in kept}) < 4:
        raise InputError(f"prompts.tokens: fewer than four sources of {SPLIT} prompts are left")
    return take_evenly(kept)


@dataclass(frozen=True)
class Answer:
    """What was found under one sampling setting."""

    texts: int
    candidates: list[Candidate]
    potential: Potential

    @property
    def setting(self) -> Setting:
        return self.candidates[0].mode.setting

    @property
    def best(self) -> Candidate:
        return best_of(self.candidates)

    def verdict(self) -> str:
        best, ratio = self.best, self.best.judged.ratio
        said = f"{Sampling(*self.setting)}: speculation"
        if best.is_plain or ratio.value <= 1:
            return f"{said} does not pay here: decode without a draft"
        how = f"{ratio.value:.2f} ±{ratio.error:.2f} times plain decoding with {best.verifier}, {best}"
        return f"{said} {'pays' if best.judged.pays else 'may pay'}: {how}"

    def table(self, device: str) -> Table:
        numbers = (Column(name, justify="right") for name in ("block eff.", "predicted x autoregressive"))
        title = f"{Sampling(*self.setting)}, {device}; {self.texts} texts"
        table = Table("verifier", "tree or copy", *numbers, title=title, title_justify="left")
        for each in self.candidates:
            ratio = each.judged.ratio
            table.add_row(each.verifier, str(each), f"{each.efficiency:.2f}", f"{ratio.value:.2f} ±{ratio.error:.2f}")
        return table

    def row(self, sampling: Sampling) -> dict[str, Any]:
        """For `quick.json`; ratios are to plain decoding, but the gain of a selector is to the best tree or rule."""
        rows = [
            {
                "verifier": each.verifier,
                "choice": str(each),
                "copies": each.mode.rule is not None,
                "block_efficiency": each.efficiency,
                **asdict(each.judged.ratio),
            }
            for each in self.candidates
        ]
        promise = rows[self.candidates.index(self.best)]
        selector = asdict(self.potential.gain)
        return {**asdict(sampling), "texts": self.texts, "promise": promise, "selector": selector, "candidates": rows}


@dataclass(frozen=True)
class _Labeller:
    """Writes and labels texts under one sampling setting; `tick` gets the number of texts that are done."""

    config: Config
    pair: ModelPair
    sampling: Sampling
    tick: Callable[[int], None]

    def table(self, prompts: Sequence[Prompt], verifiers: tuple[str, ...]) -> pa.Table:
        own = replace(recipe(self.config), verifiers=verifiers, hidden=False)
        tables, size = [], self.config.data.texts_per_shard
        for begin in range(0, len(prompts), size):
            part = tuple((prompt, 0) for prompt in prompts[begin : begin + size])
            tables.append(make_shard(self.pair, own, Work(SPLIT, self.sampling, part)).table)
            self.tick(len(part))
        table = pa.concat_tables(tables)
        return table.filter(pc.greater(table["roots"], 0))


def _answer(config: Config, label: _Labeller, prompts: Sequence[Prompt], profile: LatencyProfile) -> Answer:
    """The candidates on the first texts; the selector's gain on these and more, with the best candidate's verifier."""
    count = config.quick.texts
    table = label.table(prompts[:count], LABELLED)
    found = candidates(texts_of(table, LABELLED), profile, LABELLED)
    verifier = best_of(found).verifier
    if more := prompts[count : SELECTOR_TEXTS * count]:
        others = label.table(more, (verifier,))
        table = pa.concat_tables([table.select(others.column_names), others])
    both = (Timed(half, verifier, profile) for half in halves(texts_of(table, (verifier,))))
    return Answer(min(count, len(prompts)), found, potential(*both))


def _profile(config: Config, pair: ModelPair, tick: Callable[[], None]) -> LatencyProfile:
    """A coarse profile at a single context length, half-way through the texts."""
    name = timing.device_name(config.pair.device, config.pair.dtype, config.pair.threads)
    grid = timing.Grid((config.prompts.tokens + config.data.tokens // 2,), WIDTHS, NODES, REPEATS)
    return timing.measure(pair, grid, LABELLED, name, tick)


def _with_steps(config: Config, pair: ModelPair, profile: LatencyProfile, prompts: list[list[int]]) -> LatencyProfile:
    """The profile with the time of decisions, and corrected by real decoding steps with one verifier; the corrections
    hardly depend on it."""
    verifier, actions = LABELLED[-1], list(map(choice_of, FITTED))
    steps = timing.real_steps(pair, (verifier,), actions, prompts, REAL_STEPS, config.data.tokens)
    if any((verifier, action) not in steps for action in actions if isinstance(action, Action)):
        raise InputError("prompts: their continuations end before a second decoding step, which could be timed")
    profile = timing.fitted(profile, steps)
    profile = replace(profile, corrections=dict.fromkeys(LABELLED, profile.corrections[verifier]))
    profile = replace(profile, decide=dict.fromkeys(LEVELS, 0.0))
    times = {each: decision_seconds(config, pair, profile, verifier, each, prompts[0]) for each in LEVELS}
    return replace(profile, decide=times)


def assumed(profile: LatencyProfile, verifier: str) -> Table:
    """For some acceptance probabilities the chain with the most tokens per second, and its speed over plain decoding.

    A chain of L tokens, each accepted with probability a if those before it are, yields `1 + a + .. + a^L` tokens.
    """
    length, space = profile.target.lengths[-1], ActionSpace.default()
    plain = 1 / profile.action_seconds(EMPTY, length, verifier)
    title = f"{profile.device}, random weights: times are real, acceptance is assumed"
    columns = [Column(name, justify="right") for name in ("block eff.", "predicted x autoregressive")]
    table = Table("acceptance", "best chain", *columns, title=title, title_justify="left")
    for acceptance in ACCEPTANCES:
        chains = [(plain, 1.0, 0)]
        for drafted in range(1, space.depth + 1):
            tokens = chains[-1][1] + acceptance**drafted
            seconds = profile.action_seconds(space.chain(drafted), length, verifier)
            chains.append((tokens / seconds, tokens, drafted))
        speed, tokens, drafted = max(chains)
        table.add_row(f"{acceptance:g}", str(drafted), f"{tokens:.2f}", f"{speed / plain:.2f}")
    return table
