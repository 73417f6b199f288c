"""Decisions that traces promise to pay, tried in decoding before they are kept.

Traces hold the roots that other trees' steps came to; what a selector would come to itself, only decoding tells. So
wherever the judge (`selector.modes`) is sure that deciding pays, validation prompts are decoded that way and with the
static tree, in the time that the latency profile predicts, and the decision is kept if it is ahead by a standard error.

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
from data_gen.trajectories import seed_of
from pipelines.config import Config, SamplingSetting
from pipelines.methods import Task, speculative
from pipelines.pair import load_pair
from pipelines.prompts import encode, prompts_of
from selector.data import TracesModule
from selector.export import write_artefact
from selector.modes import Decoded, Judged, jackknife_error, ratio_of_times
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

    @cached_property
    def pair(self) -> ModelPair:
        return self._given or load_pair(self.config)

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
        setting = next(s for s in self.config.sampling if (s.temperature, s.top_p) == way.setting)
        prompts = prompts_of(self.config, "validation")
        prompts = take_evenly(prompts, min(len(prompts), self.config.train.confirm))
        tasks = [
            Task(
                encode(self.pair, prompt, self.config.prompts.tokens),
                prompt.kind,
                self.config.data.tokens,
                seed_of(self.config.seed, prompt.id, setting.build(), "confirm"),
            )
            for prompt in prompts
        ]
        times_2P = torch.tensor(
            [self._seconds_per_token(selector, profile, each.mode, setting, tasks) for each in (base, way)]
        )
        sources = sorted({prompt.source for prompt in prompts})  # whose prompts are not independent
        source_P = torch.tensor([sources.index(prompt.source) for prompt in prompts])
        ratio, without = ratio_of_times(times_2P, source_P)
        return replace(way, decoded=Decoded(ratio, jackknife_error(ratio, without), len(prompts)))

    def _seconds_per_token(
        self, selector: Selector, profile: LatencyProfile, mode: Mode, setting: SamplingSetting, tasks: list[Task]
    ) -> list[float]:
        method = speculative("trial", selector, Tuned(selector, mode), setting.build(), profile.device, profile)
        decoded = [method.decode(self.pair, setting.build(), task) for task in tasks]
        return [each.seconds / each.tokens for each in decoded]


@contextmanager
def _threads(wanted: int | None) -> Iterator[None]:
    """Decodes with the pair's number of threads; training has its own."""
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(wanted or threads)
        yield
    finally:
        torch.set_num_threads(threads)
