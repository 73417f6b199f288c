"""Decisions that traces promise to pay, tried in decoding before they are kept.

Traces hold the roots that other trees' steps came to; what a selector would come to itself, only decoding tells. So
wherever the judge (`selector.modes`) is sure that deciding pays, validation prompts are decoded that way and with the
static tree, in the time that the latency profile predicts, and the decision is kept if it is ahead there as surely.

Legend: P prompts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from data_gen.models import ModelPair
from data_gen.prompts import take_evenly
from data_gen.sampling import Sampling
from data_gen.trajectories import seed_of
from pipelines.config import Config
from pipelines.latency import load_profile
from pipelines.methods import Decoding, Task, speculative
from pipelines.pair import load_pair
from pipelines.prompts import encode, prompts_of
from pipelines.stage import progress
from selector.data import TracesModule, setting_number
from selector.export import write_artefact
from selector.modes import Decoded, Judged, jackknife_error, judge, ratio_of_sums
from selector.module import SelectorModule
from selector.runtime import LatencyProfile, Mode, Selector
from selector.tuned import Tuned


class Trial:
    """Tries decisions of one run's selectors.

    Args:
        pair: loaded when first needed if None.
    """

    def __init__(self, config: Config, pair: ModelPair | None = None) -> None:
        self.config, self._given = config, pair
        self._tasks: dict[int, list[Task]] = {}
        if config.train.confirm:
            prompts = prompts_of(config, "validation")
            self.prompts = take_evenly(prompts, min(len(prompts), config.train.confirm))

    @cached_property
    def pair(self) -> ModelPair:
        if self._given is not None:
            return self._given
        pair = load_pair(self.config)
        load_profile(self.config, pair)  # says so where it is another pair than the profile's
        return pair

    def judged(self, module: SelectorModule, traces: TracesModule) -> list[list[Judged]]:
        """Every way to decide, for every sampling setting, by traces and in decoding; the one to keep first."""
        return self.confirmed(module, traces, judge(module, traces))

    def confirmed(self, module: SelectorModule, traces: TracesModule, judged: list[list[Judged]]) -> list[list[Judged]]:
        """The same ways to decide, those that promise to pay with what they were worth in decoding; the best first."""
        if not self.config.train.confirm or all(ways[0].static for ways in judged):
            return judged
        with tempfile.TemporaryDirectory() as temporary, _threads(self.config.pair.threads):
            selector = self._exported(Path(temporary) / "selector", module, traces, judged)
            return [self._tried(selector, traces.profile, ways) for ways in judged]

    def _exported(
        self, folder: Path, module: SelectorModule, traces: TracesModule, judged: list[list[Judged]]
    ) -> Selector:
        """As an engine would load it."""
        facts = {"pair": {"fingerprint": traces.profile.pair, "target": "", "draft": ""}, "metrics": {}, "run_id": ""}
        modes = [{**ways[0].row(), "mean_efficiency": []} for ways in judged]
        fallback = judged[0][0].mode.action
        return write_artefact(folder, module, traces.train, traces.profile, traces.verifiers, fallback, modes, facts)

    def _tried(self, selector: Selector, profile: LatencyProfile, ways: list[Judged]) -> list[Judged]:
        base = next(way for way in ways if way.static)
        tried = [way if way.static or way.assured <= 1 else self._decoded(selector, profile, way, base) for way in ways]
        return sorted(tried, key=lambda way: way.assured, reverse=True)

    def _decoded(self, selector: Selector, profile: LatencyProfile, way: Judged, base: Judged) -> Judged:
        number = setting_number(*way.setting)
        setting = next(s for s in self.config.sampling if setting_number(s.temperature, s.top_p) == number)
        sampling = setting.build()
        if number not in self._tasks:
            self._tasks[number] = self._tasks_under(sampling)
        tasks = self._tasks[number]
        decoded_2P = [self.decode(selector, profile, each.mode, sampling, tasks) for each in (base, way)]
        tokens_P2, seconds_P2 = (
            torch.tensor(
                [[getattr(each, key) for each in decoded_P] for decoded_P in decoded_2P], dtype=torch.float64
            ).T
            for key in ("tokens", "seconds")
        )
        sources = sorted({prompt.source for prompt in self.prompts})  # whose prompts are not independent
        source_P = torch.tensor([sources.index(prompt.source) for prompt in self.prompts])
        ratio, without = ratio_of_sums(tokens_P2, seconds_P2, source_P)
        return replace(way, decoded=Decoded(ratio, jackknife_error(ratio, without), len(tasks)))

    def _tasks_under(self, sampling: Sampling) -> list[Task]:
        """One for each prompt; they keep what static trees decoded, whichever way or clock these are compared on."""
        return [
            Task(
                encode(self.pair, prompt, self.config.prompts.tokens),
                prompt.kind,
                self.config.data.tokens,
                seed_of(self.config.seed, prompt.id, sampling, "confirm"),
            )
            for prompt in self.prompts
        ]

    def decode(
        self, selector: Selector, profile: LatencyProfile, mode: Mode, sampling: Sampling, tasks: list[Task]
    ) -> list[Decoding]:
        """All prompts, in the time that the profile predicts."""
        method = speculative("trial", selector, Tuned(selector, mode), sampling, profile.device, profile)
        with progress() as bar:
            note = f"{selector.verifier}, {sampling}"
            shown = bar.add_task("trying decisions in decoding", total=len(tasks), note=note)
            decoded = []
            for task in tasks:
                decoded.append(method.decode(self.pair, sampling, task))
                bar.advance(shown)
        return decoded


@contextmanager
def _threads(wanted: int | None) -> Iterator[None]:
    """Decodes with the pair's number of threads; training has its own."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(wanted or threads)
        yield
    finally:
        torch.set_num_threads(threads)
