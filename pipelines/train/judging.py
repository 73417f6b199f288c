"""What a selector is judged by: replay of whole texts against the best static tree, setting by setting."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipelines.data.recorded import timed
from selector.actions import ActionSpace
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

SPACE = ActionSpace.with_lookups()


@dataclass(frozen=True)
class Statics:
    """The best static tree of the trained verifier under one sampling setting, by the training texts.

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
    """How decisions are made while training goes on: in turn, each place at its own best ratio."""
    return replace(mode, feature_levels=feature_levels, rho=1.0)


def step_times(
    texts: Texts, bases: list[Statics], verifier: str, profile: LatencyProfile, level: str
) -> tuple[Tensor, Tensor]:
    """What a policy is trained with: step times of all roots [R, A], the speed of their setting's static tree [R]."""
    seconds_RA = torch.zeros(len(texts.length_R), len(SPACE))
    speed_R = torch.zeros(len(texts.length_R))
    setting_R = texts.setting_X[texts.text_R]
    for base in bases:
        mine = setting_R == texts.settings.index(setting_of(base.mode))
        seconds_RA[mine] = timed(texts, setting_of(base.mode), verifier, profile).seconds((level,))
        speed_R[mine] = base.mode.speed
    return seconds_RA, speed_R


def judge(
    module: SelectorModule, texts: Texts, bases: list[Statics], verifier: str, profile: LatencyProfile
) -> list[Judged]:
    """The best price of time under every setting, and what decisions are worth there, by replay of whole texts."""
    result = []
    for base in bases:
        mine = timed(texts, setting_of(base.mode), verifier, profile)
        predictions = {level: module.scores(mine.texts, level) for level in module.asked}
        result.append(tune_mode(mine, predictions, base.mode, policy=not module.is_regressor))
    return result


def judge_rules(splits: dict[str, Texts], bases: list[Statics], verifier: str, profile: LatencyProfile) -> list[Judged]:
    """The rule for lookups, tuned on the training texts, on the validation texts under every setting."""
    result = []
    for base in bases:
        setting = setting_of(base.mode)
        mode = tune_lookup_rule(timed(splits["train"], setting, verifier, profile), base.mode)
        mine = timed(splits["validation"], setting, verifier, profile)
        static = static_replay(mine, base.mode.action)
        result.append(judge_mode(mine, mode, replay_mode(mine, {}, mode), static))
    return result
