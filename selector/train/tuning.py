"""What is tuned by replay: the best static tree, the lookup rule, the price of time, and which
actions are kept.

Legend: X texts, R roots, A actions.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selector.actions import EMPTY, Action
from selector.decision import NETWORK, RHOS, LookupRule, Setting, choices
from selector.schema import EARLY, FULL, LIGHT
from selector.train.data import Timed
from selector.train.ranked import candidates, united
from selector.train.replay import Lag, Ratio, Replayed, ratio_of_speeds, replay

# prices of time that are tried, as multiples of the speed at rho = 1
SPEEDS = (0.85, 1.0, 1.15, 1.3)
SURE = 2.0  # standard errors over sources by which a network must be ahead
TIE = 1.0  # standard errors over sources by which a more complex way must be ahead of a simpler one
RARE = 0.002  # share of the steps that actions which are dropped may take
# least matches that are tried for the lookup rule
LEASTS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24)

MOST = 16  # branching trees and shapes that a selector may choose under a sampling setting
LEAST_GAIN = 0.003  # tokens per root that each of these adds
LEAST_SPEED = 0.0005  # over plain decoding, that another length of a lookup rule adds

# by feature level: predicted block efficiencies, or the policy objective's logits, [R, A]
Predictions = dict[str, Tensor]


class StaticTable(NamedTuple):
    """Actions as static ones on some texts: expected tokens, seconds and steps, float64 [X, A]
    each."""

    tokens_XA: Tensor
    seconds_XA: Tensor
    steps_XA: Tensor

    @classmethod
    def of(cls, timed: Timed) -> StaticTable:
        columns = []
        survivals_RS = timed.survivals_RS
        seconds_RA = timed.seconds()
        for a in range(len(timed.space.trees)):
            action_R = torch.full((len(survivals_RS),), a)
            replayed = replay(
                survivals_RS, action_R, seconds_RA[:, a], timed.texts.size_X, timed.space
            )
            columns.append(torch.stack([replayed.tokens_X, replayed.seconds_X, replayed.steps_X]))
        tokens_XA, seconds_XA, steps_XA = torch.stack(columns, dim=-1)
        return cls(tokens_XA, seconds_XA, steps_XA)

    def speeds(self) -> Tensor:
        """Tokens per second over all texts, [A]."""
        return self.tokens_XA.sum(0) / self.seconds_XA.sum(0)

    def efficiencies(self) -> Tensor:
        """Tokens per step over all texts, [A]."""
        return self.tokens_XA.sum(0) / self.steps_XA.sum(0)

    def best(self, allowed_A: Tensor | None = None) -> int:
        speed_A = self.speeds()
        if allowed_A is not None:
            speed_A = speed_A.where(allowed_A, 0.0)
        return int(speed_A.argmax())


def best_static(timed: Timed, table: StaticTable, allowed_A: Tensor | None = None) -> Setting:
    """The setting in which the best static tree, of those that are allowed, is drafted everywhere,
    with the tokens per step of every tree."""
    best = table.best(allowed_A)
    return Setting(
        timed.sampling,
        timed.space.trees[best],
        speed=float(table.speeds()[best]),
        batch=timed.batch,
        mean_efficiency=tuple(table.efficiencies().tolist()),
    )


class Decided(NamedTuple):
    """What a setting does at every root: the action, int64; the seconds of a step, decisions
    included; and whether the draft has a forward pass, bool."""

    action_R: Tensor
    seconds_R: Tensor
    passes_R: Tensor

    def replayed(self, timed: Timed) -> Replayed:
        lag = Lag(self.passes_R, timed.lag_M)
        return replay(
            timed.survivals_RS, self.action_R, self.seconds_R, timed.texts.size_X, timed.space, lag
        )


def decide(
    timed: Timed, predictions: Predictions, setting: Setting, are_logits: bool = False
) -> Decided:
    """What a setting does at every root. It is the static tree at roots without features, and where
    nothing is decided. Elsewhere a lookup rule chooses, or a network that is asked with one feature
    level after another; on texts that are longer than the network's training texts its rule chooses
    (`Setting`)."""
    if setting.decider != NETWORK:
        return _decide_without_network(timed, setting)
    decided = _decide_by_network(timed, predictions, setting, are_logits)
    if not setting.longest:
        return decided
    by_rule = _decide_without_network(timed, setting.without_network())
    beyond_R = timed.texts.length_R > setting.longest
    return Decided(
        torch.where(beyond_R, by_rule.action_R, decided.action_R),
        torch.where(beyond_R, by_rule.seconds_R, decided.seconds_R),
        torch.where(beyond_R, by_rule.passes_R, decided.passes_R),
    )


def _decide_without_network(timed: Timed, setting: Setting) -> Decided:
    space = timed.space
    unknown_R = timed.texts.unknown_R
    action_R = torch.full((len(unknown_R),), space.index(setting.action))
    if setting.rule is not None:
        for least, lookup in setting.rule.lookups.items():
            copies_R = (timed.texts.scalar("match") >= least) & ~unknown_R
            action_R[copies_R] = space.index(lookup)
    return Decided(
        action_R, timed.seconds_of(action_R, setting.asked), space.needs_draft_A[action_R]
    )


def _decide_by_network(
    timed: Timed, predictions: Predictions, setting: Setting, are_logits: bool
) -> Decided:
    space = timed.space
    unknown_R = timed.texts.unknown_R
    static_R = torch.full((len(unknown_R),), space.index(setting.action))
    action_R = static_R
    seconds_R = torch.zeros(len(unknown_R))
    open_R = torch.ones_like(unknown_R)  # where it is asked with the next level
    passes_R = torch.zeros_like(unknown_R)
    positions_K = setting.positions(space)
    for number, level in enumerate(setting.feature_levels, 1):
        seconds_RA = timed.seconds(setting.feature_levels[:number])
        predicted_RK = predictions[level].numpy().take(positions_K, -1)
        seconds_RK = seconds_RA.numpy().take(positions_K, -1)
        chosen = choices(predicted_RK, seconds_RK, positions_K, setting, are_logits)
        chosen_R = torch.from_numpy(chosen)
        level_action_R = torch.where(unknown_R, static_R, chosen_R)
        time_R = seconds_RA.gather(-1, level_action_R.unsqueeze(-1))[:, 0]
        action_R = torch.where(open_R, level_action_R, action_R)
        seconds_R = torch.where(open_R, time_R, seconds_R)
        if level in (LIGHT, FULL):
            passes_R |= open_R & ~unknown_R
        open_R = open_R & space.needs_draft_A[chosen_R] & ~unknown_R
    passes_R |= space.needs_draft_A[action_R]
    return Decided(action_R, seconds_R, passes_R)


def replay_setting(
    timed: Timed, predictions: Predictions, setting: Setting, are_logits: bool = False
) -> Replayed:
    return decide(timed, predictions, setting, are_logits).replayed(timed)


@dataclass(frozen=True)
class Judged:
    """A setting, and its speed over the best static tree's by replay; the replay itself and the
    sources of its texts."""

    setting: Setting
    ratio: Ratio
    replayed: Replayed | None = None
    source_X: Tensor | None = None

    @property
    def pays(self) -> bool:
        return self.ratio.is_ahead(SURE)

    def is_ahead_of(self, other: Judged, times: float = 1.0) -> bool:
        """Whether it is surely faster on the same texts, or so many times as fast."""
        assert (
            self.replayed is not None and other.replayed is not None and self.source_X is not None
        )
        return ratio_of_speeds(self.replayed, other.replayed, self.source_X).is_ahead(SURE, times)


def judge_setting(
    timed: Timed,
    predictions: Predictions,
    setting: Setting,
    static: Action,
    are_logits: bool = False,
) -> Judged:
    source_X = timed.texts.source_number_X
    replayed = replay_setting(timed, predictions, setting, are_logits)
    baseline = replay_setting(timed, {}, Setting(timed.sampling, static))
    return Judged(setting, ratio_of_speeds(replayed, baseline, source_X), replayed, source_X)


def tune_setting(
    timed: Timed, predictions: Predictions, static: Setting, are_logits: bool = False
) -> Judged:
    """The fastest setting for some predictions: its feature levels (one, or the early one and then
    all), price of time and actions; judged on the same texts. `static` is the setting in which
    nothing is decided."""
    ways: list[tuple[str, ...]] = [(level,) for level in predictions]
    if tuple(predictions) not in ways:
        ways.append(tuple(predictions))
    tried = []
    for levels in ways:
        base_setting = replace(static, feature_levels=levels, rho=1.0)
        speed = replay_setting(timed, predictions, base_setting, are_logits).speed
        priced = [base_setting]
        if not are_logits:
            for rho, factor in product(RHOS, SPEEDS):
                if rho < 1:
                    priced.append(replace(base_setting, rho=rho, speed=speed * factor))
        tried += priced
        if levels == (EARLY,):  # the other features need a forward pass of the draft
            free = tuple((~timed.space.needs_draft_A).nonzero()[:, 0].tolist())
            tried += [replace(setting, allowed=free) for setting in priced]
    best = max(
        tried, key=lambda setting: replay_setting(timed, predictions, setting, are_logits).speed
    )
    decided = decide(timed, predictions, best, are_logits)
    best = replace(best, allowed=common(decided.replayed(timed).visits_R, decided.action_R, timed))
    return judge_setting(timed, predictions, best, static.action, are_logits)


def tune_lookup_rule(
    timed: Timed,
    static: Setting,
    drafts: bool = True,
    clocks: Sequence[Callable[[Setting], Replayed]] = (),
) -> Setting:
    """The lookup rule with the highest speed over plain decoding on some texts: in the mean less
    one standard error over `clocks`, the replays with equally likely step times, by default with
    those of the texts. The least match and the lookup are searched together, then each of these and
    the tree that is drafted elsewhere in turn, until none of them changes. A lookup may stand in
    one tree with a shape by rank. Nothing is drafted elsewhere, nor beside a lookup, unless
    `drafts`."""
    space = timed.space
    lookups = [Action.copy(length) for length in space.lookups]
    some_lookups = lookups[:: max(1, len(lookups) // 4)]
    if drafts:
        chains = [space.chain(length) for length in range(space.depth + 1)]
        shapes = [shape for shape in space.ranked if not shape.copied]
        trees = list(dict.fromkeys([static.action, *chains, *shapes]))
        unions = [shape for shape in space.ranked if shape.copied]
        lookups += unions
        some_lookups += [shape for shape in unions if shape.ranks == static.action.ranks]
    else:
        static = replace(static, action=EMPTY)
        trees = [EMPTY]

    def setting_of(least: int, lookup: Action, tree: Action) -> Setting:
        rule = LookupRule(least, lookup.copied, lookup.ranks)
        return replace(static, action=tree, rule=rule)

    speed_of = _cautious_speed(static, clocks or [partial(replay_setting, timed, {})])

    def speed(tried: tuple[Any, ...]) -> float:
        return speed_of(setting_of(*tried))

    best: tuple[Any, ...] = max(product(LEASTS, some_lookups, [static.action]), key=speed)
    before = None
    while best != before:
        before = best
        for at, values in enumerate((LEASTS, lookups, trees)):
            others = [(*best[:at], value, *best[at + 1 :]) for value in values]
            best = max([best, *others], key=speed)
    return setting_of(*best)


def _cautious_speed(
    static: Setting, clocks: Sequence[Callable[[Setting], Replayed]]
) -> Callable[[Setting], float]:
    """The speed of a setting over plain decoding: the mean less one standard error over the replays
    with equally likely step times."""
    plain = replace(static, action=EMPTY, rule=None)
    plain_speeds = [replayed(plain).speed for replayed in clocks]

    @cache
    def speed(setting: Setting) -> float:
        gains = []
        for replayed, plain_speed in zip(clocks, plain_speeds, strict=True):
            gains.append(replayed(setting).speed / plain_speed)
        return statistics.fmean(gains) - statistics.pstdev(gains)

    return speed


def tune_lengths(
    setting: Setting, lookups: Sequence[int], clocks: Sequence[Callable[[Setting], Replayed]]
) -> Setting:
    """The setting whose lookup rule copies the more tokens the longer the match is, with one of the
    lengths `lookups`, of which the larger ones are thinned, or none. The length after each match is
    searched in turn, and the others follow so that none falls as matches grow, until no length
    gains more than `LEAST_SPEED`; `clocks` as in `tune_lookup_rule`."""
    assert setting.rule is not None
    tried_lengths = [0, *(n for n in lookups if n <= 6 or n % 4 == 0)]
    ranks = setting.rule.ranks
    speed_of = _cautious_speed(setting, clocks)
    best = [setting.rule.length if match >= setting.rule.least else 0 for match in LEASTS]

    def setting_of(lengths: Sequence[int]) -> Setting:
        changes = []
        before = 0
        for match, length in zip(LEASTS, lengths, strict=True):
            if length != before:
                changes.append((match, length))
            before = length
        return replace(setting, rule=LookupRule.of(changes, ranks) if changes else None)

    gained = True
    while gained:
        gained = False
        for number in range(len(LEASTS)):
            for length in tried_lengths:
                tried = [min(shorter, length) for shorter in best[:number]]
                tried += [max(longer, length) for longer in best[number:]]
                tried[number] = length
                if speed_of(setting_of(tried)) > speed_of(setting_of(best)) + LEAST_SPEED:
                    best = tried
                    gained = True
    return setting_of(best)


def common(visits_R: Tensor, action_R: Tensor, timed: Timed) -> tuple[int, ...]:
    """Positions of the most frequent actions, which all but a share `RARE` of the steps take, and
    of the empty tree."""
    steps_A = torch.zeros(len(timed.space), dtype=torch.float64).index_add_(0, action_R, visits_R)
    shares, order = (steps_A / steps_A.sum()).sort(descending=True)
    needed = int((shares.cumsum(0) < 1 - RARE).sum()) + 1
    return tuple(sorted({timed.space.index(EMPTY), *order[:needed].tolist()}))


def actions_that_pay(timed: Timed, most: int = MOST) -> list[Action]:
    """The branching trees and shapes by rank that a selector may choose for texts of one sampling
    setting, by their labels: the fastest static tree of each of these two families, then those that
    add most to the best action at each root, beside the chains and lookups that are always there.
    Each shape is followed by itself with a lookup in the same tree, of each of the space's lengths
    but the shortest."""
    space = replace(timed.space, ranked=tuple(candidates(timed.texts.rank_RD)))
    tried = replace(timed, texts=replace(timed.texts, space=space))
    table = StaticTable.of(tried)
    is_shape_A = torch.tensor([bool(tree.ranks) for tree in space.trees])
    speed = table.speeds().max()
    net_RA = space.efficiencies(tried.survivals_RS) - speed * tried.seconds()
    always = [a for a, action in enumerate(space) if action.K == 1 and not action.ranks]
    chosen = [table.best(allowed_A) for allowed_A in (is_shape_A, ~is_shape_A)]
    best_R = net_RA[:, always + chosen].amax(1)
    for _ in range(most):
        gain_A = (net_RA - best_R.unsqueeze(1)).clamp(min=0).mean(0)
        if gain_A.max() < LEAST_GAIN:
            break
        chosen.append(int(gain_A.argmax()))
        best_R = torch.maximum(best_R, net_RA[:, chosen[-1]])
    actions: list[Action] = []
    for action in dict.fromkeys(space.actions[a] for a in chosen):
        actions.append(action)
        if action.ranks:
            actions += united(action, space.lookups[1:])
    return actions
