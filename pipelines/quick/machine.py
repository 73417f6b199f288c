"""This machine's latency profile, from as few passes and steps as `quick` has time for."""

from __future__ import annotations

import time
from dataclasses import replace

from data_gen import timing
from data_gen.models.pair import ModelPair
from pipelines.config import Config
from pipelines.latency.profile import ENDED, NODES, WIDTHS, decision_seconds
from pipelines.latency.stage import check, different, unsteady
from pipelines.run import ticking
from selector.actions import COPY, Action
from selector.latency import LatencyProfile
from selector.schema import EARLY, LIGHT, InputError

PASSES, STEPS = 0.2, 0.15  # shares of the time
REPEATS, COUNT = 12, 16  # most measurements of a pass, and of a step with each action
DEPTHS, BRANCHES = (1, 16), (1, 4)  # of the trees whose verification is timed: it is nearly linear in between
SHAPES = ((1, 0, 0), (1, 2, 0), (1, 8, 0), (1, 8, 8), (2, 2, 4), (4, 0, 4), (4, 8, 8), (1, 4, 0, COPY))
ACTIONS = [*map(Action.of, SHAPES)]  # whose steps are timed
TRIED, CONTEXT = 8, 32  # most prompts after which they are, until all actions have steps, and most tokens of each
LEVELS = EARLY, LIGHT  # what the decisions of a selector see
DECISIONS = 12  # tokens of the text on which they are timed


def profile_in_time(
    config: Config, pair: ModelPair, prompts: list[list[int]], seconds: float
) -> tuple[LatencyProfile, str]:
    """The profile, from measurements that take about a third of the seconds, or as long as one of each takes; and why
    not to trust it, else empty."""
    start = time.perf_counter()
    length = sum(map(len, prompts)) // len(prompts) + config.data.tokens // 2
    grid = timing.Grid(sorted({min(CONTEXT, length), length}), WIDTHS, NODES, REPEATS, DEPTHS, BRANCHES)
    device = timing.device_name(config.pair.device, config.pair.dtype, config.pair.threads)
    with ticking("timing passes", REPEATS) as tick:
        profile = timing.measure(pair, grid, config.verifiers, device, tick, start + PASSES * seconds)
    verifier, until = config.train.verifier, time.perf_counter() + STEPS * seconds
    cases = [(verifier, action) for action in ACTIONS]
    for prompt in (prompt[-CONTEXT:] for prompt in prompts[:TRIED]):
        steps = timing.real_steps(pair, cases, [prompt], COUNT, config.data.tokens, until=until)
        if all(case in steps for case in cases if not case[1].copies):
            break
    else:
        raise InputError(ENDED)
    profile = timing.fitted(profile, steps)
    # corrections hardly depend on the verifier
    profile = replace(profile, corrections=dict.fromkeys(config.verifiers, profile.corrections[verifier]))
    warning = unsteady(check(profile, verifier, steps))
    # a plain step finds the caches as the last one left them, so it is not slower than between other steps
    plain = min(0.0, timing.plain_alone(pair, verifier, [prompt], COUNT, config.data.tokens))
    profile = replace(profile, plain=plain, decide=dict.fromkeys(LEVELS, 0.0))
    asked = config, pair, profile
    decide = {level: decision_seconds(*asked, level, prompt, DECISIONS, texts=1, drafted=1) for level in LEVELS}
    return replace(profile, decide=decide, different=different(config, pair, prompts[:1])), warning
