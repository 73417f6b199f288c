"""What a selector is judged by: replay of whole texts against the best static tree, setting by setting.

The first table says before any training whether a selector pays. `train` and `texts` hold one entry for each sampling
setting; `bases` are the modes of the best static trees.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from pipelines.config import Config
from pipelines.data.recorded import settings_of, timed
from selector.decision import NETWORK, Mode
from selector.latency import LatencyProfile
from selector.train import tuning
from selector.train.data import Texts, Timed
from selector.train.mixed import MixedBatches
from selector.train.module import SelectorModule
from selector.train.replay import Ratio
from selector.train.tuning import Judged, Predictions, StaticTable, best_static, decide, judge_mode, tune_lookup_rule


def by_setting(config: Config, texts: Texts, profile: LatencyProfile) -> list[Timed]:
    """The texts of each of the run's sampling settings, with the trained verifier's labels."""
    return [timed(texts, setting, config.train.verifier, profile) for setting in settings_of(config)]


def statics(train: list[Timed]) -> list[Mode]:
    """The best static tree for each of the run's sampling settings, by its training texts."""
    return [best_static(own, StaticTable.of(own)) for own in train]


def monitored(mode: Mode, feature_levels: tuple[str, ...]) -> Mode:
    """How decisions are made during training: by one feature level after another, each root at its own best ratio."""
    return replace(mode, feature_levels=feature_levels, rho=1.0)


def step_times(
    module: SelectorModule, texts: Texts, bases: list[Mode], verifier: str, profile: LatencyProfile
) -> tuple[Tensor, Tensor]:
    """What a policy is trained with: step times of all roots [R, A], and at each root [R] the tokens per second of its
    setting's static tree, by the labels."""
    seconds_RA = torch.zeros(len(texts.length_R), len(module.space))
    speed_R = torch.zeros(len(texts.length_R))
    setting_R = texts.setting_X[texts.text_R]
    for base in bases:
        mine = setting_R == texts.settings.index(base.sampling)
        own, at = timed(texts, base.sampling, verifier, profile), module.space.index(base.action)
        seconds_RA[mine] = own.seconds((module.level,))
        efficiency_RA = module.space.efficiencies(own.texts.labels(verifier, slice(None), module.space))
        speed_R[mine] = efficiency_RA[:, at] / own.seconds_of(torch.full((len(efficiency_RA),), at))
    return seconds_RA, speed_R


def judge(module: SelectorModule, texts: list[Timed], bases: list[Mode]) -> list[Judged]:
    """A module's best mode under every setting, and its speed over the best static tree."""
    found = []
    for own, base in zip(texts, bases, strict=True):
        predicted = {level: module.scores(own.texts, level) for level in module.asked}
        found.append(tuning.tune_mode(own, predicted, base, not module.is_regressor))
    return found


def judge_rules(train: list[Timed], validation: list[Timed], bases: list[Mode]) -> list[Judged]:
    """Lookup rules, tuned on the training texts and judged on the validation texts, under every setting."""
    each = zip(train, validation, bases, strict=True)
    return [judge_mode(judged, {}, tune_lookup_rule(own, base), base.action) for own, judged, base in each]


def keep_if_ahead(judged: Judged, rule: Judged, static: Mode, longest: int = 0) -> Judged:
    """The network where it is two standard errors ahead of the better one of the lookup rule and the static tree: less
    may be luck, since it was tuned on these texts. Else the rule where it is one ahead of the tree, as it has few
    parameters; else the tree. Beyond the `longest` text of the network's training, unless that is 0, the rule decides.
    """
    if judged.is_ahead_of(rule) if rule.ratio.value > 1 else judged.pays:
        return replace(judged, mode=replace(judged.mode, rule=rule.mode.rule, action=rule.mode.action, longest=longest))
    return rule if rule.ratio.is_ahead(tuning.TIE) else Judged(static, Ratio(1.0, 0.0))


class BatchModes(NamedTuple):
    """What is compared for one batch size: the best fixed length, the lookup rule, and by level what is exported and
    the price of time, in tokens per second, where one length serves all requests of a step."""

    fixed: Mode
    rule: Mode
    selector: dict[str, Mode]
    common: dict[str, float]


def tune_batch(
    train: Timed, validation: Timed, predicted: Predictions, profile: LatencyProfile, batch: int
) -> BatchModes:
    """The fixed length and the rule by the training texts; whether the network decides by the validation texts, with
    its predictions there by level. The texts have the times of the batch size, and `profile` those of all sizes."""
    fixed = replace(best_static(train, StaticTable.of(train)), batch=batch)
    rule = tune_lookup_rule(train, fixed)
    by_rule, selector, common = judge_mode(validation, {}, rule, fixed.action), dict[str, Mode](), dict[str, float]()
    batches = MixedBatches(validation, profile, batch)
    mixed_rule = batches.replay(decide(validation, {}, rule).action_R)
    for level, own in predicted.items():
        kept = keep_if_ahead(tuning.tune_mode(validation, {level: own}, fixed), by_rule, fixed).mode
        price = batches.speed_of(own, mixed_rule.speed)
        ahead = batch > 1 and batches.select(own, price).over(mixed_rule).is_ahead(tuning.SURE)
        selector[level] = replace(kept, level=level, joint=price if ahead and kept.decider == NETWORK else 0.0)
        common[level] = batches.speed_of(own, mixed_rule.speed, common=True)
    return BatchModes(fixed, rule, selector, common)


def untuned(module: SelectorModule, timed: Timed, batch: int) -> list[Mode]:
    """By level, the mode for a batch size and a log on which nothing can be replayed: the price of time at each root is
    its own best ratio (`rho` = 1), and the static tree is the best one by the network's predictions."""
    trees = timed.space.trees
    efficiency_A = module.scores(timed.texts).mean(0)[: len(trees)]
    speed_A = efficiency_A / timed.seconds().mean(0)[: len(trees)]
    best, efficiencies = int(speed_A.argmax()), tuple(efficiency_A.tolist())
    fixed = Mode(timed.sampling, trees[best], speed=float(speed_A[best]), batch=batch, mean_efficiency=efficiencies)
    return [replace(fixed, feature_levels=(level,), level=level) for level in module.schema.levels]
