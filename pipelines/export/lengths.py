"""The fastest lengths of chains by batch size, by replay.

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
from selector.latency import LatencyProfile
from selector.tables import FREE
from selector.train.data import Texts, Timed
from selector.train.replay import Replayed, ratio_of_speeds, replay


def best_lengths(engine: Engine, texts: Texts, verifiers: tuple[str, str], profile: LatencyProfile) -> list[BestLength]:
    """One for each batch size that was timed, ascending, among the lengths that were timed. The texts are of one
    sampling setting; verifiers as from `Engine.verifiers`.

    The longest chain is the one with which the mean logarithm of the speed over all batch sizes is largest.
    """
    assert profile.batches is not None
    batches = profile.batches.sizes
    most = [min(target.sizes[-1] - 1, ActionSpace.default().depth) for target in profile.batches.target]
    replays = [_chains(texts, verifiers[0], profile.at_batch(batch)) for batch in batches]

    def table(longest: int) -> list[tuple[int, Replayed]]:
        """The fastest length of each batch size; empty where the engine takes none of those that were timed."""
        found = []
        for number, replayed in enumerate(replays):
            lengths = range(longest if engine.one_length else 0, min(longest, most[number]) + 1)
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
