"""Stage `quick`: whether speculation pays on this machine, with which verifier and tree, and whether a selector does.

It needs no other stage. It measures a coarser latency profile than the latency stage, and labels some texts that the
target writes, under each sampling setting. Replay gives the speeds of trees and of copies of earlier text, and the gain
of a quick model over the best of them. It does as much as there is time for, and says what it leaves out.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace

import pyarrow as pa
import pyarrow.compute as pc

from data_gen import timing
from data_gen.models.checkpoints import is_shape
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.texts.labelled import Work, make_shard
from data_gen.texts.prompt_sets import read_set
from data_gen.texts.prompts import Prompt, read_prompts, split_of, take_evenly
from data_gen.texts.recorded import texts_of
from pipelines.config import Config
from pipelines.pair import prompt_writing
from pipelines.pair.loading import check_before_loading, load_pair, pair_names, prompts_path, recipe, tokenizer_of
from pipelines.pair.stage import make_ready
from pipelines.quick import machine
from pipelines.quick.answers import Answer
from pipelines.quick.candidates import best_of, candidates, halves
from pipelines.quick.page import TREES, page
from pipelines.quick.sizes import ANSWER, UNLABELLED, Prices, Sizes, fitting
from pipelines.run import Stage, console, progress, record_path, write_json
from pipelines.tracking import describe, mlflow_run
from pipelines.train.judging import potential_table
from selector.files import atomically
from selector.latency import LatencyProfile
from selector.schema import InputError
from selector.train.data import Timed
from selector.train.potential import potential

SECTIONS = ("pair", "prompts", "sampling", "verifiers", "data", "train", "quick")

SPLIT = "validation"  # of which its texts are; prompts for `evaluate` are not touched
SOURCES = 4  # two to choose on, and two to judge on
ELSEWHERE = 12.0  # seconds for the imports before, and the tables and the record after
PLAIN_NAMES = str.maketrans({"=": " ", ",": ""})


def plan(config: Config) -> list[str]:
    return [
        f"up to {config.quick.texts} texts of up to {config.data.tokens} tokens under each of {len(config.sampling)} "
        f"sampling settings, in {config.quick.minutes:g} minutes; write {config.folder / 'quick.json'}"
    ]


def run(config: Config) -> None:
    """Print the candidates and the verdict, and write them to `quick.json` and `quick.html`; for a pair without
    weights, print the table of `assumed`."""
    shapes = any(map(is_shape, pair_names(config)))
    prompts = [] if shapes else _prompts(config)
    start = time.perf_counter()
    pair = load_pair(config, shapes=True)
    with mlflow_run(config, "quick", SECTIONS) as mlflow:
        if shapes:
            console.print(_without_weights(config, pair))
            return
        since = timing.clocks()
        with console.status("measuring a few passes and labels"):
            prices = Prices.measured(pair, config.data.tokens)
        busy = timing.disturbance(pair.device, since)
        outputs = config.folder / "quick.json", config.folder / "quick.html"
        stage = Stage("quick", config, {"pair": pair.fingerprint}, outputs)
        lengths = [len(ids) for ids in config.prompts.form.whole(pair.tokenizer, prompts)]
        lengths = [min(length, config.prompts.tokens) for length in lengths]
        left = 60 * config.quick.minutes - (time.perf_counter() - start) - ELSEWHERE
        sizes = fitting(config, prices, lengths, left)
        left_out = sizes.left_out(config, prices, lengths)
        if busy:
            stage.say(f"[bold yellow]warning[/]: {busy}")
        _say(stage, config, prices, sizes, left_out, sizes.seconds <= left)
        work = _Work(config, pair, prices, sizes, _order(config, pair, sizes, prompts), lengths)
        profile, answers, disturbed = work.done()
        stage.replace()
        for answer in answers:
            for each in answer.candidates:
                name = f"speed over plain decoding/{answer.sampling}/{each.verifier}"
                mlflow.log_metric(name.translate(PLAIN_NAMES), each.judged.ratio.value)
        found = {"device": profile.device, "pair": pair.fingerprint, "sizes": asdict(sizes), "left_out": left_out}
        found["disturbed"] = disturbed
        write_json(outputs[0], {**found, "settings": [answer.to_json() for answer in answers]})
        with atomically(outputs[1]) as partial:
            partial.write_text(page(config.name, profile.device, answers, left_out, disturbed), encoding="utf-8")
        for path in outputs:
            mlflow.log_artifact(str(path))
        describe(mlflow, "\n".join(answer.verdict() for answer in answers))
    for answer in answers:
        console.print(answer.table())
    console.print(TREES)
    console.print(potential_table({answer.candidates[0].mode.setting: answer.potential for answer in answers}))
    for answer in answers:
        stage.say(answer.verdict())
    if disturbed:
        stage.say(f"[bold yellow]warning[/]: {disturbed}")
    stage.say(f"{outputs[1].resolve()}")
    stage.finish()


def _prompts(config: Config) -> list[Prompt]:
    """The prompts, made if need be, and all that can be checked before weights are loaded. A pair that the
    run trains is trained first, for there is no tokenizer without it."""
    if config.prompts.file is not None:
        _usable(config, read_prompts(config.prompts.file))
    if config.pair.trained is not None:
        if not record_path(config, "pair").exists():
            for own in config.prompts.sets:
                read_set(own.name, own.file)
            Stage("quick", config, {}, ()).say("the pair is not trained yet, which is done first")
        make_ready(config)
    else:
        check_before_loading(config)
    return _in_turns(_usable(config, prompt_writing.write(config, tokenizer_of(config))))


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


def _order(config: Config, pair: ModelPair, sizes: Sizes, prompts: list[Prompt]) -> list[Prompt]:
    """The prompts of the texts: in a chat template long ones are left out."""
    kept, _ = replace(config.prompts.form, tokens=sizes.prompt).fit(pair.tokenizer, prompts)
    return _in_turns(kept)[: sizes.texts]


def _say(stage: Stage, config: Config, prices: Prices, sizes: Sizes, left_out: Sequence[str], is_in_time: bool) -> None:
    settings = f" under each of {len(config.sampling)} sampling settings" if len(config.sampling) > 1 else ""
    stage.say(
        f"a pass of the target takes {1e3 * prices.target:.1f} ms, of the draft {1e3 * prices.draft:.1f} ms; "
        f"{sizes.texts} texts of {sizes.tokens} tokens{settings} and {len(sizes.verifiers)} verifiers take about "
        f"{sizes.seconds:.0f} s more"
    )
    if left_out:
        purpose = "to stay within" if is_in_time else "and still it takes longer than"
        reason = f"[bold]left out[/], {purpose} quick.minutes={config.quick.minutes:g}:"
        stage.say("\n  - ".join([reason, *left_out]))
    stage.say(f"{' and '.join(UNLABELLED)} have no labels along a text, and are not compared")


def _without_weights(config: Config, pair: ModelPair) -> object:
    sizes, length = Sizes(0, config.data.tokens, 0), config.prompts.tokens + config.data.tokens // 2
    with progress() as bar:
        task = bar.add_task("timing passes", total=sizes.repeats, note="")
        return machine.assumed(machine.passes(config, pair, sizes, length, lambda: bar.advance(task)))


@dataclass(frozen=True)
class _Work:
    """What takes long. The progress bar counts the seconds that it is expected to take."""

    config: Config
    pair: ModelPair
    prices: Prices
    sizes: Sizes
    prompts: list[Prompt]
    lengths: list[int]

    def done(self) -> tuple[LatencyProfile, list[Answer], str]:
        """This machine's profile, the answers for all sampling settings, and why the times cannot be trusted, if they
        cannot."""
        config, sizes, prices, answers = self.config, self.sizes, self.prices, []
        form = replace(config.prompts.form, tokens=sizes.prompt)
        encoded = [form.encode(self.pair.tokenizer, prompt) for prompt in self.prompts]
        length = sum(map(len, encoded)) // len(encoded) + sizes.tokens // 2
        with progress() as bar:
            task = bar.add_task("timing passes", total=round(sizes.seconds), note="")
            a_round, since = prices.passes(len(sizes.verifiers)), timing.clocks()
            profile = machine.passes(config, self.pair, sizes, length, lambda: bar.advance(task, a_round))
            bar.update(task, description="timing decoding steps")
            profile = machine.with_steps(config, self.pair, profile, sizes, encoded)
            disturbed = timing.disturbance(self.pair.device, since) or machine.contradiction(
                profile, config.train.verifier
            )
            bar.advance(task, prices.steps(sizes.count, sizes.prompt) + prices.decisions(sizes.prompt))
            a_text = prices.texts(sizes, self.lengths, config.data.texts_per_shard) / sizes.texts
            for setting in config.sampling:
                sampling = setting.build()
                bar.update(task, description="writing and labelling texts", note=str(sampling))
                table = self._labelled(sampling, lambda count: bar.advance(task, a_text * count))
                own = list(zip(table["tokens"].to_pylist(), table["start"].to_pylist(), strict=True))
                profile = machine.with_different(self.pair, profile, sampling, own, config.seed)
                bar.update(task, description="replaying texts")
                answers.append(self._answer(sampling, table, profile))
                bar.advance(task, ANSWER)
            bar.update(task, completed=round(sizes.seconds), note="")
        return profile, answers, disturbed

    def _labelled(self, sampling: Sampling, tick: Callable[[int], None]) -> pa.Table:
        """Texts that can be labelled; `tick` gets the number of texts that are done."""
        form = replace(self.config.prompts.form, tokens=self.sizes.prompt)
        own = replace(recipe(self.config), verifiers=self.sizes.verifiers, form=form, tokens=self.sizes.tokens)
        tables, size = [], self.config.data.texts_per_shard
        for begin in range(0, len(self.prompts), size):
            part = tuple((prompt, 0) for prompt in self.prompts[begin : begin + size])
            work = Work(SPLIT, sampling, part)
            tables.append(make_shard(self.pair, replace(own, hidden=False), work).table)
            tick(len(part))
        table = pa.concat_tables(tables)
        return table.filter(pc.greater(table["roots"], 0))

    def _answer(self, sampling: Sampling, table: pa.Table, profile: LatencyProfile) -> Answer:
        """The candidates, and the gain of a selector with the verifier of the best one."""
        texts = texts_of(table, self.sizes.verifiers)
        found = candidates(texts, profile, self.sizes.verifiers)
        both = (Timed(half, best_of(found).verifier, profile) for half in halves(texts))
        return Answer(sampling, len(texts), found, potential(*both))
