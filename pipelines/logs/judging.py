"""How a log's selector decides for every batch size and level, tuned by replay; and what may be compared with it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipelines.logs.texts import VERIFIER
from selector.decision import Mode
from selector.latency import LatencyProfile
from selector.schema import LOG
from selector.train.data import Texts, Timed
from selector.train.mixed import MixedBatches
from selector.train.module import SelectorModule
from selector.train.tuning import (
    TIE,
    StaticTable,
    best_static,
    decide,
    judge_mode,
    replay_mode,
    static_replay,
    tune_lookup_rule,
    tune_mode,
)

Predictions = dict[str, Tensor]  # block efficiencies of all actions at every root, [R, A], by level


@dataclass(frozen=True)
class Tuning:
    """What was tuned for one batch size.

    Attributes:
        fixed: the best fixed length, a mode in which nothing is decided.
        rule: the best rule "copy from a match of m on, else draft k".
        selector: by level, what is exported: the network's decisions where they are ahead of the rule, else the rule.
        mean_efficiency: tokens per step of every chain.
        joint: by level, the speed of the whole batch at which joint decisions charge time; 0 where the rule is as fast,
            or decides for a whole batch.
    """

    batch: int
    fixed: Mode
    rule: Mode
    selector: dict[str, Mode]
    mean_efficiency: list[float]
    joint: dict[str, float]

    def rows(self) -> Iterator[dict[str, object]]:
        """The modes as an artefact has them."""
        for level, mode in self.selector.items():
            yield {**replace(mode, joint=self.joint[level]).row(), "mean_efficiency": self.mean_efficiency}


def predictions(module: SelectorModule, texts: Texts) -> Predictions:
    """At every level."""
    return {level: module.scores(texts, level) for level in LOG.levels}


def tune(train: Timed, validation: Timed, predicted: Predictions, profile: LatencyProfile, batch: int) -> Tuning:
    """Fixed length and rule on the training texts, prices of time on the validation texts.

    Args:
        predicted: at the validation texts' roots.
    """
    times = profile.at_batch(batch)
    train, validation = train.on(times), validation.on(times)
    table = StaticTable.of(train)
    fixed = replace(best_static(train, table, train.setting), batch=batch)
    rule = tune_lookup_rule(train, fixed)
    base = static_replay(validation, fixed.action)
    by_rule = judge_mode(validation, rule, replay_mode(validation, {}, rule), base)
    selector = {}
    for level, own in predicted.items():
        found = tune_mode(validation, {level: own}, fixed)
        # a few long texts make speeds uncertain, yet hardly their quotient on the same texts
        ahead = found.is_ahead_of(by_rule)
        chosen = found.mode if ahead else rule if by_rule.ratio.value > 1 else fixed
        selector[level] = replace(chosen, level=level)
    deciding = {level: own for level, own in predicted.items() if batch > 1 and selector[level].decides}
    joint = dict.fromkeys(predicted, 0.0) | _joint(validation, deciding, profile, rule)
    return Tuning(batch, fixed, rule, selector, table.efficiencies().tolist(), joint)


def _joint(validation: Timed, predicted: Predictions, profile: LatencyProfile, rule: Mode) -> dict[str, float]:
    """The speeds at which joint decisions of different requests charge time, where they are ahead of the rule."""
    if not predicted:
        return {}
    batches = MixedBatches(validation, profile, rule.batch)
    by_rule = batches.replay(decide(validation, {}, rule).action_R)
    found = {}
    for level, tokens_RA in predicted.items():
        speed = batches.speed_of(tokens_RA, by_rule.speed)
        ratio = batches.select(tokens_RA, speed).over(by_rule)
        found[level] = speed if ratio.value - TIE * ratio.error > 1 else 0.0
    return found


def untuned(module: SelectorModule, texts: Texts, profile: LatencyProfile, batch: int) -> Tuning:
    """Where no policy can be replayed: each root at its own best ratio, and the fixed length that is the best by the
    network's own predictions."""
    times = profile.at_batch(batch)
    length = float(texts.length_R.float().mean())
    predicted = predictions(module, texts)
    efficiency_A = predicted[LOG.levels[-1]].mean(0)[: len(module.space.trees)]
    seconds = [times.action_seconds(action, length, VERIFIER) for action in module.space.trees]
    speeds = efficiency_A / torch.tensor(seconds)
    best = int(speeds.argmax())
    fixed = Mode(*texts.settings[0], module.space.trees[best], speed=float(speeds[best]), batch=batch)
    own = {level: replace(fixed, feature_levels=(level,), level=level) for level in predicted}
    return Tuning(batch, fixed, fixed, own, efficiency_A.tolist(), dict.fromkeys(predicted, 0.0))


def monitored(validation: Timed, profile: LatencyProfile) -> list[tuple[Timed, Mode]]:
    """What an epoch is judged by: both levels, alone and in a larger batch, each root at its own best ratio."""
    assert profile.batches is not None
    sizes = profile.batches.sizes
    found = []
    for batch in dict.fromkeys((sizes[0], sizes[len(sizes) // 2])):
        timed = validation.on(profile.at_batch(batch))
        fixed = best_static(timed, StaticTable.of(timed), timed.setting)
        found += [(timed, replace(fixed, feature_levels=(level,), rho=1.0)) for level in LOG.levels]
    return found
