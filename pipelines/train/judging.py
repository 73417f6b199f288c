"""What a selector is judged by: replay of whole texts against the best static tree, setting by setting."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pipelines.data.traces import timed
from selector.actions import ActionSpace
from selector.data import Setting, Texts
from selector.decision import Mode
from selector.module import SelectorModule
from selector.replay import ratio_of_speeds, replay, savings
from selector.runtime import LatencyProfile
from selector.schema import EARLY
from selector.tuning import (
    Judged,
    StaticTable,
    best_static,
    decided,
    replay_mode,
    sources,
    static_replay,
    tuned,
    tuned_rule,
)

SPACE = ActionSpace.with_lookups()
SELDOM = 0.1  # visits
BRANCHING = 8  # trees


@dataclass(frozen=True)
class Statics:
    """The best static tree of the trained verifier under one sampling setting, by the training texts.

    Attributes:
        mean_efficiency: tokens per step of every tree.
        speed: tokens per second of every tree.
    """

    mode: Mode
    mean_efficiency: list[float]
    speed: Tensor


def statics(splits: dict[str, Texts], settings: list[Setting], verifier: str, profile: LatencyProfile) -> list[Statics]:
    """For each sampling setting."""
    result = []
    for setting in settings:
        train = timed(splits["train"], setting, verifier, profile)
        table = StaticTable.of(train)
        result.append(Statics(best_static(train, table, setting), table.efficiencies().tolist(), table.speeds()))
    return result


def setting_of(mode: Mode) -> Setting:
    return mode.temperature, mode.top_p


def asked_with(module: SelectorModule) -> tuple[str, ...]:
    """At which times a module may be asked."""
    early = () if module.hparams["objective"] == "policy" else (EARLY,)
    late = () if module.hparams["objective"] == "advantage" else (module.sees,)
    return (*early, *late)


def monitored(mode: Mode, sees: tuple[str, ...]) -> Mode:
    """How decisions are made while training goes on: in turn, each place at its own best ratio."""
    return replace(mode, sees=sees, rho=1.0)


def step_times(
    texts: Texts, bases: list[Statics], verifier: str, profile: LatencyProfile, sees: str
) -> tuple[Tensor, Tensor]:
    """What a policy is trained with: step times of all roots [R, A], the speed of their setting's static tree [R]."""
    seconds_RA = torch.zeros(len(texts.length_R), len(SPACE))
    speed_R = torch.zeros(len(texts.length_R))
    setting_R = texts.setting_X[texts.text_R]
    for base in bases:
        mine = setting_R == texts.settings.index(setting_of(base.mode))
        seconds_RA[mine] = timed(texts, setting_of(base.mode), verifier, profile).seconds((sees,))
        speed_R[mine] = base.mode.speed
    return seconds_RA, speed_R


def saved(
    texts: Texts, bases: list[Statics], rules: list[Judged], verifier: str, profile: LatencyProfile
) -> tuple[Tensor, Tensor]:
    """What an advantage is trained with: how many tokens' time each action saves at each root [R, A] over the rule for
    lookups, or the static tree where the rule does not pay; how often it is decided there [R].

    Roots that this simpler policy hardly ever comes to count a little: another one may.
    """
    saved_RA = torch.zeros(len(texts.length_R), len(SPACE))
    weight_R = torch.zeros(len(texts.length_R))
    setting_R = texts.setting_X[texts.text_R]
    for base, rule in zip(bases, rules, strict=True):
        mine = setting_R == texts.settings.index(setting_of(base.mode))
        data = timed(texts, setting_of(base.mode), verifier, profile)
        seconds_RA, action_R = data.seconds((EARLY,)), decided(data, {}, simpler(rule, base)).action_R
        arguments = data.survivals_RS, action_R, seconds_RA, data.texts.layout, SPACE
        own = replay(*arguments[:2], seconds_RA.gather(-1, action_R.unsqueeze(-1))[:, 0], *arguments[3:])
        saved_RA[mine] = savings(*arguments) * own.speed
        weight_R[mine] = own.visits_R.float() + SELDOM
    return saved_RA, weight_R


def candidates(bases: list[Statics]) -> list[int]:
    """Actions whose advantage is worth learning: lookups, chains, and the branching trees that are the fastest as
    static ones, mean over the sampling settings. The more actions there are to choose from, the more often one is taken
    whose prediction errs upwards."""
    speed_A = torch.stack([base.speed / base.speed.max() for base in bases]).mean(0)
    branching = [a for a, tree in enumerate(SPACE.trees) if tree.K > 1]
    fastest = sorted(branching, key=speed_A.__getitem__)[-BRANCHING:]
    chains = [a for a, tree in enumerate(SPACE.trees) if tree.K == 1]
    return sorted([*chains, *fastest, *range(len(SPACE.trees), len(SPACE))])


def simpler(rule: Judged, base: Statics) -> Mode:
    """What is done without a network: the rule for lookups where it pays, else the static tree."""
    return rule.mode if rule.pays else base.mode


def judge(
    module: SelectorModule, texts: Texts, bases: list[Statics], verifier: str, profile: LatencyProfile
) -> list[Judged]:
    """The best price of time under every setting, and what decisions are worth there, by replay of whole texts."""
    result = []
    for base in bases:
        mine = timed(texts, setting_of(base.mode), verifier, profile)
        opinions = {sees: module.scores(mine.texts, sees) for sees in asked_with(module)}
        result.append(tuned(mine, opinions, base.mode, policy=not module.is_regressor))
    return result


def judge_rules(splits: dict[str, Texts], bases: list[Statics], verifier: str, profile: LatencyProfile) -> list[Judged]:
    """The rule for lookups, tuned on the training texts, on the validation texts under every setting."""
    result = []
    for base in bases:
        setting = setting_of(base.mode)
        mode = tuned_rule(timed(splits["train"], setting, verifier, profile), base.mode)
        mine = timed(splits["validation"], setting, verifier, profile)
        static = static_replay(mine, base.mode.action)
        result.append(Judged(mode, ratio_of_speeds(replay_mode(mine, {}, mode), static, sources(mine.texts))))
    return result
