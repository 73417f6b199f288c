"""This machine's times, as coarse as `quick` has time for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from rich.table import Column, Table

from data_gen import order_times, timing
from data_gen.decoding import EAGER
from data_gen.drafting.sampled import EVERY, different_nodes
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from pipelines.config import Config
from pipelines.latency.profile import NODES, WIDTHS, decision_seconds
from pipelines.quick.sizes import BRANCHES, DEPTHS, STEPS, Sizes
from selector.actions import EMPTY, Action, ActionSpace
from selector.latency import LatencyProfile, setting_key
from selector.schema import EARLY, LIGHT, InputError

ACCEPTANCES = (0.5, 0.6, 0.7, 0.8, 0.9)  # assumed where the pair has no weights
LEVELS = EARLY, LIGHT


def passes(
    config: Config, pair: ModelPair, sizes: Sizes, length: int, tick: Callable[[], None], until: float = math.inf
) -> LatencyProfile:
    """A profile at a single context length; `until` as in `timing.measure`."""
    name = timing.device_name(config.pair.device, config.pair.dtype, config.pair.threads)
    grid = timing.Grid((length,), WIDTHS, NODES, sizes.repeats, DEPTHS, BRANCHES)
    return timing.measure(pair, grid, sizes.verifiers, name, tick, until)


def with_steps(
    config: Config, pair: ModelPair, profile: LatencyProfile, sizes: Sizes, prompts: list[list[int]], until: float
) -> LatencyProfile:
    """The profile corrected by real decoding steps with one verifier, on which the corrections hardly depend, and with
    the time of decisions; `until` as in `timing.real_steps`."""
    verifier, names, actions = config.train.verifier, list(profile.verify), STEPS[: sizes.actions]
    prompts = [prompt[-sizes.context :] for prompt in prompts[: sizes.prompts]]
    cases = [(verifier, action) for action in actions]
    steps = timing.real_steps(pair, cases, prompts, sizes.count, config.data.tokens, until=until)
    if any((verifier, action) not in steps for action in actions if isinstance(action, Action)):
        raise InputError("prompts: their continuations end before a second decoding step, which could be timed")
    profile = timing.fitted(profile, steps)
    profile = replace(profile, corrections=dict.fromkeys(names, profile.corrections[verifier]))
    plain = order_times.plain_alone(pair, verifier, prompts, sizes.count, config.data.tokens)
    # a plain step finds the caches as the last one left them, so it is not slower than between other steps
    profile = replace(profile, plain=min(0.0, plain), decide=dict.fromkeys(LEVELS, 0.0))
    times = {
        level: decision_seconds(config, pair, profile, verifier, level, prompts[0], sizes.decision, texts=1, drafted=1)
        for level in LEVELS
    }
    return replace(profile, decide=times)


def with_different(
    pair: ModelPair,
    profile: LatencyProfile,
    sampling: Sampling,
    texts: list[tuple[list[int], int]],
    seed: int,
    compared: tuple[int, int],
) -> LatencyProfile:
    """The profile with the number of different nodes that branches have under a sampling setting, from a few roots.

    Args:
        texts: token ids, and the position of the first root.
        compared: of how many texts, and at how many roots of each.
    """
    if pair.decoder != EAGER:  # others pass fixed slots
        return profile
    count, roots = compared
    few = [(tokens[: start + roots * EVERY], start) for tokens, start in texts[:count]]
    found = different_nodes(pair.draft, few, sampling.draft, seed)
    key = setting_key((sampling.temperature, sampling.top_p))
    return replace(profile, different={**profile.different, key: found})


def contradiction(profile: LatencyProfile, verifier: str) -> str:
    """In words, that some tree seems to take less time than plain decoding, although the target passes in both; empty
    where none does."""
    length, space = profile.target.lengths[-1], ActionSpace.default()
    plain = profile.action_seconds(EMPTY, length, verifier)
    if all(profile.action_seconds(tree, length, verifier) >= plain for tree in space.trees):
        return ""
    return "a tree seems quicker than plain decoding: the machine is busy; repeat it later"


def assumed(profile: LatencyProfile) -> Table:
    """For some acceptance probabilities the chain with the most tokens per second, and its speed over plain decoding.

    A chain of L tokens, each accepted with probability a if those before it are, yields `1 + a + .. + a^L` tokens.
    """
    verifier, length, space = next(iter(profile.verify)), profile.target.lengths[-1], ActionSpace.default()
    plain = 1 / profile.action_seconds(EMPTY, length, verifier)
    title = f"{profile.device}, random weights: times are real, acceptance is assumed"
    columns = [Column(name, justify="right") for name in ("tokens a step", "speed over plain decoding")]
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
