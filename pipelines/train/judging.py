"""What a selector is judged by: replay of whole texts against the best static tree, case by case.

A case is a sampling setting, or for a log a batch size. `train` and `texts` hold one entry for
each; `bases` are the settings of the best static trees.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from pipelines.config import Config
from pipelines.data.recorded import samplings_of, timed
from pipelines.terminal import watched
from selector.actions import EMPTY, Action, ActionSpace
from selector.decision import NETWORK, Setting
from selector.latency import LatencyProfile
from selector.train import tuning
from selector.train.data import Texts, Timed
from selector.train.mixed import MixedBatches
from selector.train.module import SelectorModule
from selector.train.replay import Ratio, Replayed, ratio_of_speeds
from selector.train.tuning import (
    Judged,
    StaticTable,
    actions_that_pay,
    best_static,
    decide,
    replay_setting,
    tune_lengths,
    tune_lookup_rule,
)

FEWEST_SOURCES = 8  # of validation texts, on which a network is judged


def timed_cases(config: Config, texts: Texts, profile: LatencyProfile) -> list[Timed]:
    """The texts with the trained verifier's labels, for each of the run's settings and the
    profile's batch sizes."""
    cases = []
    for sampling in samplings_of(config):
        whole = Timed(texts.of_sampling(sampling), config.train.verifier, profile)
        sizes = [1]
        if profile.batches:
            sizes = profile.batches.sizes
        cases += [whole.on(profile.at_batch(batch), batch) for batch in sizes]
    return cases


def space_that_pays(
    config: Config, texts: Texts, profiles: Sequence[LatencyProfile]
) -> ActionSpace:
    """The actions of a network: those that pay in some case with the step times of some profile. A
    log's are all that it has labels of, since it has no trees, and its drafter's ranks are not
    known."""
    if texts.rank_RD.shape[1] == 0:
        return texts.space
    actions: dict[Action, None] = {}
    cases = [case for profile in profiles for case in timed_cases(config, texts, profile)]
    for case in watched(cases, "choosing actions"):
        actions |= dict.fromkeys(actions_that_pay(case))
    ranked = tuple(action for action in actions if action.ranks)
    return replace(texts.space, ranked=ranked).restricted_to(actions)


def statics(train: list[Timed]) -> list[Setting]:
    """The best static tree in each case, by its training texts."""
    return [best_static(case, StaticTable.of(case)) for case in train]


def step_times(
    module: SelectorModule,
    texts: Texts,
    bases: list[Setting],
    verifier: str,
    profile: LatencyProfile,
) -> tuple[Tensor, Tensor]:
    """What the policy objective is trained with: step times of all roots [R, A], and at each root
    [R] the tokens per second of its setting's static tree, by the labels."""
    seconds_RA = torch.zeros(len(texts.length_R), len(module.space))
    speed_R = torch.zeros(len(texts.length_R))
    sampling_R = texts.sampling_X[texts.text_R]
    for base in bases:
        in_sampling_R = sampling_R == texts.samplings.index(base.sampling)
        case = timed(texts, base.sampling, verifier, profile)
        static = module.space.index(base.action)
        seconds_RA[in_sampling_R] = case.seconds((module.level,))
        survivals_RS = case.texts.labels(verifier, slice(None), module.space)
        efficiency_RA = module.space.efficiencies(survivals_RS)
        static_R = torch.full((len(efficiency_RA),), static)
        speed_R[in_sampling_R] = efficiency_RA[:, static] / case.seconds_of(static_R)
    return seconds_RA, speed_R


def judge(module: SelectorModule, texts: Timed, base: Setting) -> list[Judged]:
    """A module's best setting, by each of its `ways` of asking, and its speed over the best static
    tree."""
    judged = []
    for levels, level in module.ways:
        predicted = {name: module.scores(texts.texts, name) for name in levels}
        setting = replace(base, level=level)
        judged.append(tuning.tune_setting(texts, predicted, setting, not module.is_regressor))
    return judged


def judge_jointly(
    timed: Timed,
    predicted_RA: Tensor,
    alone: Judged,
    rule: Judged,
    base: Setting,
    profile: LatencyProfile,
) -> tuple[Judged, float]:
    """A log's network that decides for several requests of a step at once, and the price of time
    where one length serves them all, in tokens per second. `profile` is that of all batch sizes."""
    batches = MixedBatches(timed, profile, timed.batch)
    asked = alone.setting.asked
    begin = batches.replay(decide(timed, {}, rule.setting).action_R, rule.setting.asked).speed
    price = batches.speed_of(predicted_RA, begin, common=False, asked=asked)
    common = batches.speed_of(predicted_RA, begin, common=True, asked=asked)
    setting = replace(alone.setting, joint=price, allowed=())
    replayed = batches.select(predicted_RA, price, asked=asked)
    return _among(batches, setting, replayed, base), common


def _among(batches: MixedBatches, setting: Setting, replayed: Replayed, base: Setting) -> Judged:
    """A setting as it is judged by the replay of requests with different texts."""
    static = batches.replay(decide(batches.timed, {}, base).action_R)
    ratio = ratio_of_speeds(replayed, static)
    return Judged(setting, ratio, replayed, torch.arange(len(replayed.tokens_X)))


def judge_rules(
    train: list[Timed],
    others: list[Timed],
    bases: list[Setting],
    profile: LatencyProfile,
    drafts: bool = True,
) -> list[Judged]:
    """Lookup rules in every case, tuned on the training texts and judged on these and others: only
    three numbers are tuned, and a few validation texts alone cannot tell a rule from the static
    tree. Without `drafts` they draft nothing where they do not copy, as engines' own n-grams."""
    rules = []
    cases = list(zip(train, others, bases, strict=True))
    words = "tuning lookup rules" if drafts else "tuning copies alone"
    for case, judged, base in watched(cases, words):
        clocks = [replays(case, draw) for draw in profile.drawn]
        setting = tune_lookup_rule(case, base, drafts, clocks)
        rules.append(judge_by_replay(setting, base, [case, judged], profile))
    return rules


def by_match(
    rules: Sequence[Judged],
    train: list[Timed],
    others: list[Timed],
    bases: list[Setting],
    profile: LatencyProfile,
) -> list[Judged]:
    """The rules, which copy more after longer matches where that is one standard error ahead on
    others than the training texts, on which the lengths are tuned."""
    chosen = []
    cases = list(zip(rules, train, others, bases, strict=True))
    for rule, case, judged, base in watched(cases, "tuning lengths by match"):
        clocks = [replays(case, draw) for draw in profile.drawn]
        setting = tune_lengths(rule.setting, case.space.lookups, clocks)
        finer = judge_by_replay(setting, base, [case, judged], profile)
        assert finer.replayed is not None and rule.replayed is not None
        gain = ratio_of_speeds(finer.replayed, rule.replayed, finer.source_X)
        chosen.append(finer if gain.is_ahead(tuning.TIE) else rule)
    return chosen


def judge_by_replay(
    setting: Setting, base: Setting, cases: Sequence[Timed], profile: LatencyProfile
) -> Judged:
    """A setting in which no network decides, and its speed over the static tree's on the texts of
    all `cases`, which have no source in common; with the replay of the last one's. Several requests
    have different texts."""
    decided, source_X = _replayed(setting, cases, profile)
    static, _ = _replayed(base, cases, profile)
    ratio = ratio_of_speeds(Replayed.joined(decided), Replayed.joined(static), source_X)
    return Judged(setting, ratio, decided[-1], source_X[-len(decided[-1].tokens_X) :])


def _replayed(
    setting: Setting, cases: Sequence[Timed], profile: LatencyProfile
) -> tuple[list[Replayed], Tensor]:
    """The replay of each case, and the numbers of all their texts' sources, int64 [X]."""
    replayed: list[Replayed] = []
    sources: list[Tensor] = []
    begin = 0  # of the numbers of a case's sources
    for case in cases:
        replayed.append(replays(case, profile)(setting))
        source_X = torch.arange(len(replayed[-1].tokens_X))
        if case.batch == 1:
            source_X = case.texts.source_number_X
        sources.append(source_X + begin)
        begin += len(source_X)
    return replayed, torch.cat(sources)


def replays(case: Timed, profile: LatencyProfile) -> Callable[[Setting], Replayed]:
    """Replay with the step times of a profile of settings in which no network decides; several
    requests have different texts."""
    timed = case.on(profile.at_batch(case.batch), case.batch)
    if case.batch == 1:
        return partial(replay_setting, timed, {})
    batches = MixedBatches(timed, profile, case.batch)
    return lambda setting: batches.replay(decide(timed, {}, setting).action_R, setting.asked)


def that_pay(
    settings: Sequence[Setting], cases: Sequence[Timed], base: Setting, profile: LatencyProfile
) -> list[Setting]:
    """Those in which no network decides and that are surely faster than a server without a drafter
    on the texts of all `cases`, also for what is unsure of the step times."""
    paying = []
    for setting in settings:
        ratios = []
        for draw in profile.drawn:
            decided, source_X = _replayed(setting, cases, draw)
            without = _without_drafter(cases, base, draw)
            ratios.append(ratio_of_speeds(Replayed.joined(decided), without, source_X))
        gains = [ratio.value for ratio in ratios]
        error = statistics.fmean(ratio.error for ratio in ratios)
        gain = Ratio(statistics.fmean(gains), math.hypot(error, statistics.pstdev(gains)))
        if gain.is_ahead(tuning.SURE):
            paying.append(setting)
    return paying


def _without_drafter(cases: Sequence[Timed], base: Setting, profile: LatencyProfile) -> Replayed:
    """The plain decoding of a server that has no drafter."""
    plain, _ = _replayed(replace(base, action=EMPTY), cases, profile)
    presence = profile.at_batch(cases[0].batch).presence
    return Replayed.joined(plain).charged(-presence)


def unless_plain(
    best: Judged, paying: Sequence[Setting], case: Timed, base: Setting, profile: LatencyProfile
) -> Judged:
    """What decides, where it is surely faster than a server without a drafter: a network by these
    validation texts, and anything else if it is among those `that_pay`. Otherwise nothing is
    drafted."""
    if best.setting.decider == NETWORK:
        assert best.replayed is not None
        without = _without_drafter([case], base, profile)
        surely = ratio_of_speeds(best.replayed, without, best.source_X).is_ahead(tuning.SURE)
    else:
        surely = best.setting in paying
    if surely:
        return best
    return judge_by_replay(replace(base, action=EMPTY), base, [case], profile)


def drafting_where_ahead(rules: list[Judged], copies: list[Judged], times: float) -> list[Judged]:
    """The rules, of which one drafts with a model only where that is surely so many `times` as fast
    as copies alone."""
    chosen = []
    for rule, alone in zip(rules, copies, strict=True):
        drafts = rule.setting.action.drafts
        chosen.append(alone if drafts and not rule.is_ahead_of(alone, times) else rule)
    return chosen


def too_few(texts: Texts) -> str:
    """Why a network cannot be judged on some validation texts, empty where it can: the error over
    few sources is itself unknown."""
    sources = len(set(texts.source_X))
    if sources >= FEWEST_SOURCES:
        return ""
    return (
        f"{sources} sources of validation texts are too few to tell whether a network pays "
        f"({FEWEST_SOURCES} are needed), so none decides"
    )


def keep_if_ahead(
    judged: Judged,
    rule: Judged,
    static: Setting,
    longest: int = 0,
    times: float = 1.0,
    is_judged: bool = True,
) -> Judged:
    """The network where it is two standard errors ahead of the better one of the lookup rule, or so
    many `times` its speed, and the static tree: less may be luck, since it was tuned on these
    texts. Else the rule where it is one ahead of the tree, as it has few parameters, or where
    `times` lets it only copy; else the tree. Beyond the `longest` text of the network's training,
    unless that is 0, the rule decides. No network is kept unless it `is_judged` (`too_few`)."""
    unsure = times > 1 and static.action.drafts  # the tree is not that far ahead of copies alone
    if unsure or rule.ratio.value > 1:
        is_ahead = judged.is_ahead_of(rule, times)
    else:
        is_ahead = judged.ratio.is_ahead(tuning.SURE, times)
    if is_ahead and is_judged:
        setting = replace(
            judged.setting, rule=rule.setting.rule, action=rule.setting.action, longest=longest
        )
        return replace(judged, setting=setting)
    if unsure or rule.ratio.is_ahead(tuning.TIE):
        return rule
    return Judged(static, Ratio(1.0, 0.0))
