"""The work of `quick`, which ends in time: whatever comes next must fit, by what has been timed so far."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from data_gen import timing
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.texts.labelled import Work, make_shard
from data_gen.texts.prompts import Prompt
from data_gen.texts.recorded import texts_of
from pipelines.config import Config
from pipelines.pair.loading import recipe
from pipelines.quick import machine
from pipelines.quick.answers import Answer
from pipelines.quick.candidates import SOURCES, best_of, candidates, halves
from pipelines.quick.sizes import ANSWER, LEAST, PASSES, REAL, Prices, Sizes, fitting
from pipelines.run import progress
from selector.latency import LatencyProfile
from selector.train.data import Timed
from selector.train.potential import potential

SPLIT = "validation"  # of which its texts are; prompts for `evaluate` are not touched


@dataclass(frozen=True)
class Found:
    """What `quick` leaves behind.

    Attributes:
        answers: for the sampling settings that there was time for, in the config's order.
        left_out: in words.
        disturbed: why the times cannot be trusted; empty if they can.
    """

    profile: LatencyProfile
    answers: list[Answer]
    sizes: Sizes
    left_out: list[str]
    disturbed: str

    def to_json(self) -> dict[str, Any]:
        return {
            "device": self.profile.device,
            "pair": self.profile.pair,
            "sizes": asdict(self.sizes),
            "left_out": self.left_out,
            "disturbed": self.disturbed,
            "settings": [answer.to_json() for answer in self.answers],
        }


@dataclass
class InTime:
    """Measures the machine, and then writes, labels and replays texts, one sampling setting after another, until `end`.

    A setting's first texts are few. With their time it is known how many more fit into the setting's share of what is
    left. A further setting begins only if its first texts and their replay fit.

    Args:
        prompts: in the order in which they are taken.
        lengths: of all prompts, in tokens.
        end: a moment of `time.perf_counter()`.
    """

    config: Config
    pair: ModelPair
    prices: Prices
    sizes: Sizes
    prompts: list[Prompt]
    lengths: list[int]
    end: float
    first: float = field(default=0.0, init=False)  # seconds of the last setting's first texts
    answer: float = field(default=ANSWER, init=False)  # and of its replay

    def found(self) -> Found:
        """Raises InputError where a sampling setting has too few texts that can be labelled."""
        start, config = time.perf_counter(), self.config
        answers: list[Answer] = []
        written: list[int] = []
        with progress() as bar:
            task = bar.add_task("", total=max(1, round(self.end - start)), note="")

            def tick(words: str, note: str = "") -> None:
                done = min(round(time.perf_counter() - start), round(self.end - start))
                bar.update(task, description=words, note=note, completed=done)

            profile, disturbed = self._machine(tick)
            self.sizes = fitting(config, self.prices, self.lengths, self._left, self.sizes)
            self.prompts = self._kept()
            for number, setting in enumerate(config.sampling):
                if number > 0 and self.first + self.answer > self._left:
                    break
                sampling = setting.build()
                until = time.perf_counter() + self._left / (len(config.sampling) - number) - self.answer
                table, count = self._labelled(sampling, until, partial(tick, "writing texts", str(sampling)))
                tick("replaying texts", str(sampling))
                begin = time.perf_counter()
                profile = self._different(sampling, table, profile)
                answers.append(self._answer(sampling, table, profile))
                written.append(count)
                self.answer = time.perf_counter() - begin
        left_out = self.sizes.left_out(config, self.lengths, written)
        return Found(profile, answers, self.sizes, left_out, disturbed)

    @property
    def _left(self) -> float:
        return self.end - time.perf_counter()

    def _machine(self, tick: Callable[[str], None]) -> tuple[LatencyProfile, str]:
        """This machine's profile, and why it cannot be trusted, if it cannot."""
        config, sizes, since = self.config, self.sizes, timing.clocks()
        form = replace(config.prompts.form, tokens=sizes.prompt)
        encoded = [form.encode(self.pair.tokenizer, prompt) for prompt in self._kept()[: sizes.texts]]
        length = sum(map(len, encoded)) // len(encoded) + sizes.tokens // 2
        left, words = self._left, "timing passes"
        tick(words)
        until = time.perf_counter() + PASSES * left
        profile = machine.passes(config, self.pair, sizes, length, lambda: tick(words), until)
        tick("timing decoding steps")
        until = time.perf_counter() + REAL * left
        profile = machine.with_steps(config, self.pair, profile, sizes, encoded, until)
        return profile, timing.disturbance(self.pair.device, since) or machine.contradiction(
            profile, config.train.verifier
        )

    def _kept(self) -> list[Prompt]:
        """The prompts without those that are too long and cannot be cut, as in a chat template."""
        form = replace(self.config.prompts.form, tokens=self.sizes.prompt)
        return form.fit(self.pair.tokenizer, self.prompts)[0]

    def _labelled(self, sampling: Sampling, until: float, tick: Callable[[], None]) -> tuple[pa.Table, int]:
        """Texts that can be labelled, and how many were written: a few, and then as many as fit."""
        form = replace(self.config.prompts.form, tokens=self.sizes.prompt)
        own = replace(recipe(self.config), verifiers=self.sizes.verifiers, form=form, tokens=self.sizes.tokens)
        wanted, begin, count = min(self.config.quick.texts, len(self.prompts)), 0, LEAST
        tables: list[pa.Table] = []
        start = time.perf_counter()
        while begin < wanted and count > 0:
            tick()
            part = tuple((prompt, 0) for prompt in self.prompts[begin : begin + count])
            table = make_shard(self.pair, replace(own, hidden=False), Work(SPLIT, sampling, part)).table
            tables.append(table.filter(pc.greater(table["roots"], 0)))
            begin += len(part)
            taken = time.perf_counter() - start
            self.first = self.first if len(tables) > 1 else taken
            fits = int(begin * (until - time.perf_counter()) / taken)
            count = min(self.config.data.texts_per_shard, wanted - begin, fits)
            if count < 1 and _sources(tables) < SOURCES and self.first < self._left:
                count = LEAST  # texts may have ended before a root
        return pa.concat_tables(tables), begin

    def _different(self, sampling: Sampling, table: pa.Table, profile: LatencyProfile) -> LatencyProfile:
        texts = list(zip(table["tokens"].to_pylist(), table["start"].to_pylist(), strict=True))
        return machine.with_different(self.pair, profile, sampling, texts, self.config.seed, self.sizes.compared)

    def _answer(self, sampling: Sampling, table: pa.Table, profile: LatencyProfile) -> Answer:
        """The candidates, and the gain of a selector with the verifier of the best one."""
        texts = texts_of(table, self.sizes.verifiers)
        found = candidates(texts, profile, self.sizes.verifiers)
        both = (Timed(half, best_of(found).verifier, profile) for half in halves(texts))
        return Answer(sampling, len(texts), found, potential(*both))


def _sources(tables: Sequence[pa.Table]) -> int:
    return len({source for table in tables for source in table["source"].to_pylist()})
