"""The fastest lengths of chains by batch size, and the fastest lookup rule, by replay.

All requests of a batch draft chains of one length, and a step takes as long as the engine's timings say for that batch
and length. So with b requests and chains of L tokens, `tokens per second = b E[tokens | L] / T(b, L)`. An engine that
makes the passes of its longest chain for every batch (`Engine.masks`) pays `T(b, L)` and the draft passes beyond L.

Legend: R roots, A actions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch

from pipelines.export.engines import BestLength, Engine
from selector.actions import ActionSpace
from selector.decision import LookupRule
from selector.latency import LatencyProfile
from selector.tables import FREE
from selector.train.data import Texts, Timed
from selector.train.replay import Replayed, ratio_of_speeds, replay
from selector.train.tuning import StaticTable, best_static, replay_mode, static_replay, tune_lookup_rule


def best_lengths(engine: Engine, texts: Texts, verifiers: tuple[str, str], profile: LatencyProfile) -> list[BestLength]:
    """One for each batch size that was timed, ascending, among the lengths that were timed; for the smallest one alone
    where each request drafts for itself. The texts are of one sampling setting; verifiers as from `Engine.verifiers`.

    The longest chain is the one with which the mean logarithm of the speed over all batch sizes is largest.
    """
    assert profile.batches is not None
    batches = profile.batches.sizes[: 1 if engine.alone else None]
    most = [min(target.sizes[-1] - 1, ActionSpace.default().depth) for target in profile.batches.target]
    replays = [_chains(texts, verifiers[0], profile.at_batch(batch)) for batch in batches]

    def table(longest: int) -> list[tuple[int, Replayed]]:
        """The fastest length of each batch size; empty where the engine takes none of those that were timed."""
        found = []
        for number, replayed in enumerate(replays):
            fixed = engine.one_length or (engine.falling and number == 0)
            lengths = range(longest if fixed else min(engine.falling, longest), min(longest, most[number]) + 1)
            tried = [(length, replayed(length, longest if engine.masks else length)) for length in lengths]
            if not tried:
                return []
            found.append(max(tried, key=lambda own: own[1].speed))
        return found

    tables = list(filter(None, map(table, range(max(most) + 1))))
    best = max(tables, key=lambda rows: sum(math.log(replayed.speed) for _, replayed in rows))
    result = []
    for batch, timed, (length, own) in zip(batches, most, best, strict=False):
        gain = None
        if engine.default <= timed:
            usual = _chains(texts, verifiers[1], profile.at_batch(batch))(engine.default, engine.default)
            gain = ratio_of_speeds(own, usual, texts.source_number_X)
        result.append(BestLength(batch, length, own.block_efficiency, batch * own.speed, gain))
    if engine.copies:
        return [max(result[0], _best_rule(texts, verifiers[0], profile), key=lambda each: each.tokens_per_second)]
    return result


def _chains(texts: Texts, verifier: str, profile: LatencyProfile) -> Callable[[int, int], Replayed]:
    """The replay of chains of one length everywhere, by the length and the number of the draft's passes."""
    timed = Timed(texts, verifier, profile, replace(ActionSpace.default(), max_K=1))
    seconds_RA, drafting_RA = timed.seconds(), timed.on(replace(profile, target=FREE)).seconds()

    @cache
    def replayed(length: int, passes: int) -> Replayed:
        seconds_R = seconds_RA[:, length] + drafting_RA[:, passes] - drafting_RA[:, length]
        return replay(timed.survivals_RS, torch.full_like(texts.length_R, length), seconds_R, texts.size_X, timed.space)

    return replayed


def _best_rule(texts: Texts, verifier: str, profile: LatencyProfile) -> BestLength:
    """The fastest lookup rule whose lookup is at least as long as its match must be, for single requests, with the
    chain that is drafted elsewhere; the gain is that over plain decoding."""
    assert profile.batches is not None
    batch, lookups = profile.batches.sizes[0], ActionSpace.with_lookups().lookups
    space = replace(ActionSpace.default(), max_K=1, lookups=lookups)
    timed = Timed(texts, verifier, profile.at_batch(batch), space)
    mode = tune_lookup_rule(timed, best_static(timed, StaticTable.of(timed)))
    assert mode.rule is not None
    least = min(mode.rule.least, lookups[-1])
    rule = LookupRule(least, next(each for each in lookups if each >= max(least, mode.rule.length)))
    own, plain = replay_mode(timed, {}, replace(mode, rule=rule)), static_replay(timed, space.chain(0))
    gain = ratio_of_speeds(own, plain, texts.source_number_X)
    return BestLength(batch, mode.action.nodes, own.block_efficiency, batch * own.speed, gain, rule)
