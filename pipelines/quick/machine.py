"""This machine's latency profile, from as few steps as `quick` has time for."""

from __future__ import annotations

import time
from dataclasses import replace

from data_gen import timing
from data_gen.models.pair import ModelPair
from pipelines.config import Config
from pipelines.latency.profile import decision_seconds
from pipelines.latency.stage import contexts, different
from pipelines.run import ticking
from selector.actions import COPY, Action
from selector.latency import LatencyProfile
from selector.schema import EARLY, LIGHT

SHARE = 0.3  # of the time
SHAPES = ((1, 0, 0), (1, 1, 0), (1, 2, 0), (1, 8, 0), (1, 8, 8), (2, 2, 4), (4, 0, 4), (4, 8, 8), (1, 4, 0, COPY))
ACTIONS = [*map(Action.of, SHAPES)]  # whose steps are timed
STEPS, CONTEXT = 400, 32  # most steps; tokens of the shortest context, at most
LEVELS = EARLY, LIGHT  # what the decisions of a selector see
DECISIONS = 12  # tokens of the text on which they are timed


def profile_in_time(config: Config, pair: ModelPair, prompts: list[list[int]], seconds: float) -> LatencyProfile:
    """The profile, from measurements that take about a third of the seconds, or as long as one of each takes."""
    verifier, until = config.train.verifier, time.perf_counter() + SHARE * seconds
    length = sum(map(len, prompts)) // len(prompts) + config.data.tokens // 2
    lengths = sorted({min(CONTEXT, length), length})
    device = timing.device_name(config.pair.device, config.pair.dtype, config.pair.threads)
    cases = [(verifier, action) for action in ACTIONS]
    with ticking("timing decoding steps", STEPS) as tick:
        samples = timing.real_steps(pair, cases, contexts(prompts, lengths), length, STEPS, tick, until)
    profile = timing.fitted(pair, samples, lengths, device)
    profile = replace(  # the times hardly depend on the verifier
        profile, verify=dict.fromkeys(config.verifiers, profile.verify[verifier]), decide=dict.fromkeys(LEVELS, 0.0)
    )
    asked = config, pair, profile
    decide = {level: decision_seconds(*asked, level, prompts[0], DECISIONS, texts=1, drafted=1) for level in LEVELS}
    return replace(profile, decide=decide, different=different(config, pair, prompts[:1]))
