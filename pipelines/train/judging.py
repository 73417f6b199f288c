"""What a selector is judged by: replay of whole texts against the best static tree, setting by setting."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipelines.data.recorded import timed
from selector.decision import Mode
from selector.latency import LatencyProfile
from selector.train.data import Setting, Texts
from selector.train.module import SelectorModule
from selector.train.tuning import (
    Judged,
    StaticTable,
    best_static,
    judge_mode,
    replay_mode,
    static_replay,
    tune_lookup_rule,
    tune_mode,
)


@dataclass(frozen=True)
class Statics:
    """The best static tree of one verifier under one sampling setting, by the training texts.

    Attributes:
        mean_efficiency: tokens per step of every tree.
    """

    mode: Mode
    mean_efficiency: list[float]


def statics(splits: dict[str, Texts], settings: list[Setting], verifier: str, profile: LatencyProfile) -> list[Statics]:
    """For each sampling setting."""
    result = []
    for setting in settings:
        train = timed(splits["train"], setting, verifier, profile)
        table = StaticTable.of(train)
        result.append(Statics(best_static(train, table, setting), table.efficiencies().tolist()))
    return result


def setting_of(mode: Mode) -> Setting:
    return mode.temperature, mode.top_p


def monitored(mode: Mode, feature_levels: tuple[str, ...]) -> Mode:
    """How decisions are made during training: with one feature level after another, each root at its own best ratio."""
    return replace(mode, feature_levels=feature_levels, rho=1.0)


def step_times(
    module: SelectorModule, texts: Texts, bases: list[Statics], verifier: str, profile: LatencyProfile
) -> tuple[Tensor, Tensor]:
    """What a policy is trained with: step times of all roots [R, A], and the speed of their setting's static tree [R],
    in tokens per second."""
    seconds_RA = torch.zeros(len(texts.length_R), len(module.space))
    speed_R = torch.zeros(len(texts.length_R))
    setting_R = texts.setting_X[texts.text_R]
    for base in bases:
        mine = setting_R == texts.settings.index(setting_of(base.mode))
        seconds_RA[mine] = timed(texts, setting_of(base.mode), verifier, profile).seconds((module.level,))
        speed_R[mine] = base.mode.speed
    return seconds_RA, speed_R


def judge(
    module: SelectorModule, texts: Texts, bases: list[Statics], verifier: str, profile: LatencyProfile
) -> list[Judged]:
    """A module's best mode under every setting, and its speed over the best static tree, by replay of whole texts."""
    result = []
    for base in bases:
        mine = timed(texts, setting_of(base.mode), verifier, profile)
        predictions = {level: module.scores(mine.texts, level) for level in module.asked}
        result.append(tune_mode(mine, predictions, base.mode, policy=not module.is_regressor))
    return result


def tune_rules(
    splits: dict[str, Texts], bases: dict[str, list[Statics]], verifier: str, profile: LatencyProfile
) -> list[dict[str, Mode]]:
    """The rules for lookups, tuned on the training texts; for each sampling setting, by verifier: with the trained
    verifier, and with that of the fastest static tree of all verifiers, which evaluation compares with.

    Args:
        bases: by verifier.
        verifier: the trained one.
    """
    result = []
    for each in zip(*bases.values(), strict=True):
        modes = {name: base.mode for name, base in zip(bases, each, strict=True)}
        fastest = max(modes, key=lambda name: modes[name].speed)
        own = {name: timed(splits["train"], setting_of(mode), name, profile) for name, mode in modes.items()}
        both = dict.fromkeys((verifier, fastest))
        result.append({name: tune_lookup_rule(own[name], modes[name]) for name in both})
    return result


def judge_rules(
    rules: list[dict[str, Mode]], texts: Texts, bases: list[Statics], verifier: str, profile: LatencyProfile
) -> list[Judged]:
    """The rules of the trained verifier, on other texts than they were tuned on, under every setting."""
    result = []
    for rule, base in zip(rules, bases, strict=True):
        mine, mode = timed(texts, setting_of(base.mode), verifier, profile), rule[verifier]
        result.append(judge_mode(mine, mode, replay_mode(mine, {}, mode), static_replay(mine, base.mode.action)))
    return result
