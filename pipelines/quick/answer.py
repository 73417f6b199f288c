"""What is fastest along the texts of one sampling setting: the best tree of each verifier, or the lookup rule.

They are chosen on the texts of every other source and compared with plain decoding on those between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from data_gen.models.sampling import Sampling
from pipelines.statistics import with_interval
from selector.actions import EMPTY
from selector.decision import Mode
from selector.latency import LatencyProfile
from selector.train.data import Texts, Timed
from selector.train.potential import Potential, potential
from selector.train.tuning import StaticTable, best_static, judge_mode, replay_mode, static_replay, tune_lookup_rule

NOTICEABLE = 1.02  # times plain decoding: the few steps that are timed do not tell less apart


def way_of(timed: Timed, mode: Mode) -> dict[str, Any]:
    """A static tree or a lookup rule with its verifier, and its speed over plain decoding's: from `low` to `high` with
    95% over sources."""
    mine, plain = replay_mode(timed, {}, mode), static_replay(timed, EMPTY)
    sums_X4 = torch.stack([mine.tokens_X, mine.seconds_X, plain.tokens_X, plain.seconds_X], dim=-1)
    speed, (low, high) = with_interval(sums_X4, timed.texts.source_number_X)
    choice = "no draft" if mode.action == EMPTY else str(mode.action)
    if mode.rule is not None:
        choice = f"copy {mode.rule.length} after a match of {mode.rule.least}, else {choice}"
    figures = {"block_efficiency": mine.block_efficiency, "speed": speed, "low": low, "high": high}
    return {"verifier": timed.verifier, "choice": choice, **figures}


@dataclass(frozen=True)
class Answer:
    """What was found under one sampling setting: the ways to decode, as `way_of` returns them, and the best of them."""

    sampling: Sampling
    texts: int
    ways: list[dict[str, Any]]
    best: dict[str, Any]
    potential: Potential

    @classmethod
    def of(cls, sampling: Sampling, texts: Texts, profile: LatencyProfile, verifiers: Sequence[str]) -> Answer:
        """From texts of at least four sources."""
        halves = [texts.take((texts.source_number_X % 2 == parity).nonzero()[:, 0]) for parity in (0, 1)]
        parts = {name: [Timed(half, name, profile) for half in halves] for name in verifiers}
        trees = {name: best_static(timed, StaticTable.of(timed)) for name, (timed, _) in parts.items()}
        order = sorted(trees, key=lambda name: trees[name].speed, reverse=True)
        (chosen, judged), tree = parts[order[0]], trees[order[0]]
        rule = tune_lookup_rule(chosen, tree)
        ways = [*(way_of(parts[name][1], trees[name]) for name in order), way_of(judged, rule)]
        copies, drafts = (judge_mode(chosen, {}, mode, EMPTY) for mode in (rule, tree))
        best = ways[-1] if copies.is_ahead_of(drafts) else ways[0]
        best = next((way for way in (best, ways[0]) if way["low"] > 1), best)  # a tree that surely pays is an answer
        return cls(sampling, len(texts), ways, best, potential(chosen, judged))

    @property
    def pays(self) -> bool:
        return bool(self.best["speed"] > NOTICEABLE)

    def verdict(self) -> str:
        if self.best["speed"] > 1.01 * self.best["block_efficiency"]:  # every step has the target's pass
            return f"{self.sampling}: steps seem quicker with a draft than without: the machine is busy; repeat later"
        if not self.pays:
            return f"{self.sampling}: speculation does not pay here: decode without a draft"
        sure = "may pay; more quick.minutes tell" if self.best["low"] <= 1 else "pays"
        factor = "{speed:.2f} [{low:.2f}, {high:.2f}] times plain decoding with {verifier}, {choice}"
        return f"{self.sampling}: speculation {sure}: {factor.format(**self.best)}"
