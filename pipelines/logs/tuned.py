"""Tunes, by replay, what is compared for one batch size: the best fixed length, the lookup rule and the selector."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pipelines.logs.labelling import VERIFIER
from selector.decision import Mode
from selector.latency import LatencyProfile
from selector.schema import LOG
from selector.train.data import Texts, Timed
from selector.train.mixed import MixedBatches
from selector.train.module import SelectorModule
from selector.train.tuning import (
    TIE,
    Predictions,
    StaticTable,
    best_static,
    decide,
    judge_mode,
    tune_lookup_rule,
    tune_mode,
)


@dataclass(frozen=True)
class Tuning:
    """What was tuned for one batch size.

    Attributes:
        joint: by level, the price of time in tokens per second of the whole batch, for joint decisions of different
            requests; 0 where the rule is as fast.
    """

    batch: int
    fixed: Mode  # the best fixed length
    rule: Mode  # the best rule "copy where the match has m tokens or more, else draft k tokens"
    selector: dict[str, Mode]  # by level, what is exported: the network's decisions, the rule or the fixed length
    joint: dict[str, float]


def tune(train: Timed, validation: Timed, predicted: Predictions, profile: LatencyProfile, batch: int) -> Tuning:
    """Tune the fixed length and the rule on the training texts, and the price of time on the validation texts.

    Args:
        predicted: at the roots of the validation texts.
        profile: with all batch sizes.
    """
    times = profile.at_batch(batch)
    train, validation = train.on(times), validation.on(times)
    fixed = replace(best_static(train, StaticTable.of(train)), batch=batch)
    rule = tune_lookup_rule(train, fixed)
    by_rule = judge_mode(validation, {}, rule, fixed.action)
    selector = {}
    for level, own in predicted.items():
        found = tune_mode(validation, {level: own}, fixed)
        # the ratio to the rule on the same texts is more certain than the two speeds
        chosen = found.mode if found.is_ahead_of(by_rule) else rule if by_rule.ratio.value > 1 else fixed
        selector[level] = replace(chosen, level=level)
    deciding = {level: own for level, own in predicted.items() if batch > 1 and selector[level].decides}
    joint = dict.fromkeys(predicted, 0.0) | _joint_prices(validation, deciding, profile, rule)
    return Tuning(batch, fixed, rule, selector, joint)


def _joint_prices(validation: Timed, predicted: Predictions, profile: LatencyProfile, rule: Mode) -> dict[str, float]:
    """The prices of time for joint decisions of different requests, 0 where these are no faster than the rule."""
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
    """The tuning for a log on which nothing can be replayed: the price of time at each root is its own best ratio
    (`rho` = 1), and the fixed length is the best one by the network's predictions."""
    times = profile.at_batch(batch)
    context = float(texts.length_R.float().mean())
    efficiency_A = module.scores(texts, LOG.levels[-1]).mean(0)[: len(module.space.trees)]
    seconds = [times.action_seconds(action, context, VERIFIER) for action in module.space.trees]
    speeds = efficiency_A / torch.tensor(seconds)
    best = int(speeds.argmax())
    tree, efficiencies = module.space.trees[best], tuple(efficiency_A.tolist())
    fixed = Mode(*texts.settings[0], tree, speed=float(speeds[best]), batch=batch, mean_efficiency=efficiencies)
    own = {level: replace(fixed, feature_levels=(level,), level=level) for level in LOG.levels}
    return Tuning(batch, fixed, fixed, own, dict.fromkeys(LOG.levels, 0.0))


def monitored(validation: Timed, profile: LatencyProfile) -> list[tuple[Timed, Mode]]:
    """What every training epoch is evaluated by: both levels, for the smallest and the middle batch size, `rho` = 1."""
    assert profile.batches is not None
    sizes, found = profile.batches.sizes, []
    for batch in dict.fromkeys((sizes[0], sizes[len(sizes) // 2])):
        timed = validation.on(profile.at_batch(batch))
        fixed = best_static(timed, StaticTable.of(timed))
        found += [(timed, replace(fixed, feature_levels=(level,), rho=1.0)) for level in LOG.levels]
    return found
