"""What replay tunes, on texts whose labels are made by hand."""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor

from selector.actions import EMPTY, Action
from selector.decision import RHOS, RULE, LookupRule, Setting
from selector.sampling import Sampling
from selector.schema import EARLY, FULL, LIGHT, MATCH
from selector.tables import Table
from selector.train import tuning
from selector.train.data import Timed
from selector.train.replay import Replayed, replay
from selector.train.tuning import (
    StaticTable,
    best_static,
    decide,
    replay_setting,
    tune_lengths,
    tune_lookup_rule,
    tune_setting,
)
from tests.selector.synthetic import REPEATED, SPACE, profile, survivals_of, texts, timed

TREES = len(SPACE.trees)


@pytest.fixture(scope="module")
def data() -> Timed:
    return timed(texts(count=10, roots=15, seed=6, repeats=0.1))


@pytest.fixture(scope="module")
def static(data: Timed) -> Setting:
    return best_static(data, StaticTable.of(data))


def true_scores(data: Timed) -> Tensor:
    return SPACE.efficiencies(data.survivals_RS)


def replayed(data: Timed, action_R: Tensor, feature_levels: tuple[str, ...] = ()) -> Replayed:
    """By replay itself."""
    seconds_R = data.seconds(feature_levels).gather(-1, action_R.unsqueeze(-1))[:, 0]
    return replay(data.survivals_RS, action_R, seconds_R, data.texts.size_X, SPACE)


def alike(data: Timed) -> Timed:
    """The same texts without anything to tell: the labels are the same at all roots."""
    survivals_RS = survivals_of(torch.full((len(data.texts.length_R),), 0.7))
    nothing_R = torch.zeros_like(data.texts.lookup_R)
    return replace(
        data, texts=replace(data.texts, survivals={"traversal": survivals_RS}, lookup_R=nothing_R)
    )


def test_the_best_static_tree_is_that_of_brute_force(data: Timed, static: Setting) -> None:
    """Every tree replayed by itself: its speed, its tokens per step, and which is the fastest of
    all or of some. No lookup is one for all places: where nothing repeats there is nothing to
    copy."""
    table = StaticTable.of(data)
    assert table.speeds().shape == (TREES,)
    replays = [replayed(data, torch.full((150,), a)) for a in range(TREES)]
    speeds = [replay.speed for replay in replays]
    assert table.speeds().tolist() == pytest.approx(speeds, rel=1e-5)
    assert table.efficiencies().tolist() == pytest.approx(
        [replay.block_efficiency for replay in replays], rel=1e-5
    )
    best = max(range(TREES), key=speeds.__getitem__)
    assert table.best() == best
    few = [3, 50, 120, 200]
    allowed_A = torch.zeros(TREES, dtype=torch.bool)
    allowed_A[few] = True
    assert table.best(allowed_A=allowed_A) == max(few, key=speeds.__getitem__) != best
    assert static == Setting(
        Sampling(), SPACE.actions[best], speed=pytest.approx(speeds[best], rel=1e-5)
    )
    of_static = replay_setting(data, {}, static)
    assert of_static.speed == pytest.approx(speeds[best], rel=1e-5)
    assert of_static.block_efficiency == pytest.approx(replays[best].block_efficiency, rel=1e-5)


def priced(
    data: Timed, predictions: dict[str, Tensor], static: Setting, feature_levels: tuple[str, ...]
) -> list[Setting]:
    """Every price of time that is tried for one way to ask."""
    base = replace(static, feature_levels=feature_levels, rho=1.0)
    speed = replay_setting(data, predictions, base).speed
    return [
        replace(base, rho=rho, speed=factor * speed) for rho in RHOS for factor in tuning.SPEEDS
    ]


@pytest.mark.parametrize("policy", [False, True])
def test_no_gain_does_not_pay(data: Timed, policy: bool) -> None:
    """Predictions without any bearing on the text; or a text where all roots are alike: a decision
    costs time."""
    noise_RA = true_scores(data)[torch.randperm(150, generator=torch.Generator().manual_seed(3))]
    noise_RA = noise_RA.log() if policy else noise_RA
    for timed_texts, scores_RA in ((data, noise_RA), (alike(data), true_scores(alike(data)))):
        static = best_static(timed_texts, StaticTable.of(timed_texts))
        judged = tune_setting(timed_texts, {LIGHT: scores_RA}, static, policy)
        assert not judged.pays
        assert judged.ratio.value < 1


def test_only_trees_that_are_never_missed_are_left_out(data: Timed) -> None:
    """Those kept make up all but so many of the steps, no smaller set does, and the empty tree is
    one of them."""
    generator = torch.Generator().manual_seed(4)
    weight_A = torch.rand(len(SPACE), generator=generator, dtype=torch.float64) ** 8
    weight_A[SPACE.index(EMPTY)] = 0
    action_R = weight_A.multinomial(150, replacement=True, generator=generator)
    visits_R = torch.rand(150, generator=generator, dtype=torch.float64) ** 6
    kept = tuning.common(visits_R, action_R, data)
    steps_A = torch.zeros(len(SPACE), dtype=torch.float64)
    for action, visits in zip(action_R.tolist(), visits_R.tolist(), strict=True):
        steps_A[action] += visits
    share_A = steps_A / steps_A.sum()
    assert list(kept) == sorted({*kept, SPACE.index(EMPTY)})
    of_use = [a for a in kept if a != SPACE.index(EMPTY)]
    assert float(share_A[of_use].sum()) >= 1 - tuning.RARE
    assert float(share_A[of_use].sum() - share_A[of_use].min()) < 1 - tuning.RARE
    assert float(share_A[of_use].min()) >= float(
        share_A[[a for a in range(len(SPACE)) if a not in kept]].max()
    )


def by_loop(
    data: Timed, predictions: dict[str, Tensor], setting: Setting, policy: bool
) -> tuple[list[int], list[float], list[int]]:
    """What a setting does, root by root: the action, its seconds, and how often it has been
    asked."""
    may = list(setting.allowed) or list(range(len(SPACE)))
    times = [
        data.seconds(setting.feature_levels[: number + 1]).tolist()
        for number in range(len(setting.feature_levels))
    ]
    actions, seconds, asked = [], [], []
    for r, first in enumerate(data.texts.unknown_R.tolist()):
        for number, level in enumerate(setting.feature_levels):
            times_A, tokens = times[number][r], predictions[level][r].tolist()
            price = (
                setting.speed ** (1 - setting.rho)
                * max(tokens[a] / times_A[a] for a in may) ** setting.rho
            )
            best = max(may, key=lambda a: tokens[a] if policy else tokens[a] - price * times_A[a])
            action = SPACE.index(setting.action) if first else best
            if first or SPACE.actions[action] == EMPTY or SPACE.actions[action].copies:
                break
        actions.append(action)
        seconds.append(times_A[action])
        asked.append(number + 1)
    return actions, seconds, asked


@pytest.mark.parametrize("policy", [False, True])
@pytest.mark.parametrize(
    "allowed", [(), (0, 1, 9, 40, 200, TREES + 1, TREES + 3)], ids=["any", "some"]
)
@pytest.mark.parametrize(
    "feature_levels", [(EARLY,), (LIGHT,), (EARLY, LIGHT), (EARLY, FULL)], ids=" ".join
)
def test_roots_are_decided_one_after_the_other(
    data: Timed,
    static: Setting,
    feature_levels: tuple[str, ...],
    allowed: tuple[int, ...],
    policy: bool,
) -> None:
    """Early answers that need no draft stand, and cost no pass of it; the others are decided again
    with all that is known then, and pay for both decisions. A lookup that is chosen only then has
    paid for the pass."""
    predictions = {level: noisy_scores(data, seed) for seed, level in enumerate(feature_levels)}
    setting = replace(static, feature_levels=feature_levels, rho=0.25, allowed=allowed)
    decided = decide(data, predictions, setting, policy)
    actions, seconds, asked = by_loop(data, predictions, setting, policy)
    assert decided.action_R.tolist() == actions
    firsts = data.texts.unknown_R.tolist()
    assert decided.passes_R.tolist() == [
        SPACE.actions[a].drafts or (not first and feature_levels[:times] != (EARLY,))
        for a, times, first in zip(actions, asked, firsts, strict=True)
    ]
    assert decided.seconds_R.tolist() == pytest.approx(seconds, rel=1e-6)
    known = (~data.texts.unknown_R).nonzero()[:, 0].tolist()
    kinds = {(not SPACE.actions[actions[r]].drafts, asked[r]) for r in known}
    expected = (
        {(True, 1), (True, 2), (False, 2)} if len(feature_levels) == 2 else {(True, 1), (False, 1)}
    )
    assert kinds == expected


def noisy_scores(data: Timed, seed: int) -> Tensor:
    """Near those of any root at all: lookups, the empty tree and drafts are all chosen
    somewhere."""
    generator = torch.Generator().manual_seed(seed)
    scores_RA = 1 + (true_scores(data) - 1) * (
        0.5 + torch.rand(150, len(SPACE), generator=generator)
    )
    scores_RA[torch.rand(150, generator=generator) < 0.2, TREES:] += 4
    return scores_RA


def test_drafts_that_come_too_late_to_pay_are_left_out(data: Timed, static: Setting) -> None:
    """A dear draft pays at easy roots alone, and not even there if it has to pass all tokens since
    the last one."""
    drafts = {}
    for extra in (0.0, 0.5):
        lagging = data.on(replace(profile(draft=3e-3), lag=Table([0], [0, 1], [[0.0, extra]])))
        setting = tune_setting(
            lagging, {EARLY: true_scores(data)}, replace(static, action=EMPTY)
        ).setting
        drafts[extra] = any(SPACE.actions[a].drafts for a in setting.allowed)
    assert drafts == {0.0: True, 0.5: False}


def test_the_best_way_to_ask_is_found(data: Timed, static: Setting) -> None:
    """In turn, where the early features tell when to copy and the others how far to draft; with the
    early ones alone where these tell as much; without them where they tell nothing. It pays, and no
    way or price that was tried is better: multiples of the speed at each root's own price."""
    data = data.on(replace(profile(), decide={EARLY: 5e-5, LIGHT: 5e-4}))
    truth = true_scores(data)
    noise = truth[torch.randperm(150, generator=torch.Generator().manual_seed(3))]
    # where all that is known of trees is their mean
    lookups = torch.cat([truth[:, :TREES].mean(0).expand(150, -1), truth[:, TREES:]], dim=-1)
    for early, level in ((lookups, (EARLY, LIGHT)), (truth, (EARLY,)), (noise, (LIGHT,))):
        predictions = {EARLY: early, LIGHT: truth}
        judged = tune_setting(data, predictions, static)
        assert judged.pays and (judged.setting.feature_levels, judged.setting.action) == (
            level,
            static.action,
        )
        speeds = {
            asked: max(
                replay_setting(data, predictions, setting).speed
                for setting in priced(data, predictions, static, asked)
            )
            for asked in ((EARLY,), (LIGHT,), (EARLY, LIGHT))
        }
        assert max(speeds, key=speeds.__getitem__) == level
        # rare trees are left out
        assert judged.ratio.value == pytest.approx(speeds[level] / static.speed, rel=5e-3)
        assert replay_setting(data, predictions, judged.setting).speed == pytest.approx(
            judged.ratio.value * static.speed
        )


def test_the_rule_copies_wherever_the_match_is_long_enough(data: Timed, static: Setting) -> None:
    """And drafts the static tree elsewhere, and at first roots even where its least match is none
    at all. It pays for its decisions whether it copies or not, and for nothing else."""
    seconds_RA = data.seconds()
    for least, taken in ((0, 0.0), (3, 0.0), (4, 0.002), (6, 0.0), (9, 0.0)):
        setting, decides = (
            replace(static, rule=LookupRule(least, 8)),
            {**data.profile.decide, MATCH: taken},
        )
        decided = decide(data.on(replace(data.profile, decide=decides)), {}, setting)
        for r, first in enumerate(data.texts.unknown_R.tolist()):
            copies = not first and float(data.texts.scalar("match")[r]) >= least
            action = Action.copy(8) if copies else static.action
            assert SPACE.actions[int(decided.action_R[r])] == action
            assert float(
                decided.seconds_R[r] - seconds_RA[r, SPACE.index(action)]
            ) == pytest.approx(taken, abs=1e-8)


def test_the_tuned_rule_is_the_fastest_of_all_that_are_tried(data: Timed, static: Setting) -> None:
    """It copies where the text repeats itself, as far as it does: the fastest of all rules, and
    faster than the best static tree, which has none."""

    def speed(least: int, length: int, tree: Action) -> float:
        copies_R = (data.texts.scalar("match") >= least) & ~data.texts.unknown_R
        return replayed(
            data, torch.where(copies_R, SPACE.index(Action.copy(length)), SPACE.index(tree))
        ).speed

    setting = tune_lookup_rule(data, static)
    assert (setting.decider, setting.sampling) == (RULE, data.sampling)
    assert setting.rule == LookupRule(REPEATED, 16)
    trees = {static.action, EMPTY, *map(SPACE.chain, range(17))}
    every = {rule: speed(*rule) for rule in product(tuning.LEASTS, SPACE.lookups, trees)}
    assert (*setting.rule[:2], setting.action) == max(every, key=every.__getitem__)
    assert replay_setting(data, {}, setting).speed == pytest.approx(
        speed(*setting.rule[:2], setting.action)
    )
    assert replay_setting(data, {}, setting).speed > static.speed


def test_lengths_by_match_are_the_fastest_of_all_that_rise(
    static: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After longer matches the text goes on as before for longer. No clock alone decides."""
    data = timed(texts(count=10, roots=40, seed=6, repeats=0.4))
    match_R = data.texts.scalar("match").long()
    right_R = torch.where(match_R >= REPEATED, 4 * (match_R - REPEATED), 0)
    data.texts.lookup_R.copy_(right_R)
    monkeypatch.setattr(tuning, "LEASTS", (2, 5, 6, 7))
    clocks = [partial(replay_setting, data, {})]
    simple = replace(static, action=EMPTY, rule=LookupRule(5, 8))
    setting = tune_lengths(simple, SPACE.lookups, clocks)
    assert setting.rule is not None and setting.rule.longer
    speeds = {}
    for lengths in product((0, *SPACE.lookups), repeat=len(tuning.LEASTS)):
        if list(lengths) == sorted(lengths):
            by_hand_R = torch.full_like(match_R, SPACE.index(EMPTY))
            for least, length in zip(tuning.LEASTS, lengths, strict=True):
                action = Action.copy(length) if length else EMPTY
                by_hand_R[(match_R >= least) & ~data.texts.unknown_R] = SPACE.index(action)
            speeds[lengths] = replayed(data, by_hand_R).speed
    best = max(speeds.values())
    assert replay_setting(data, {}, setting).speed == pytest.approx(best, rel=1e-3)
    assert best > 1.01 * replay_setting(data, {}, simple).speed


def test_a_rule_is_tuned_for_what_is_unsure_of_the_clock(data: Timed, static: Setting) -> None:
    """By the mean over clocks of the speed over plain decoding, less one standard error: where one
    says that verified tokens are nearly free and another that they are dear, it copies less."""
    clocks = []
    for dearness in (0.1, 1.0, 20.0):
        target = data.profile.target
        rows = []
        for row in target.seconds:
            rows.append([row[0] + dearness * (seconds - row[0]) for seconds in row])
        clock = data.on(replace(data.profile, target=replace(target, seconds=rows)))
        clocks.append(partial(replay_setting, clock, {}))
    setting = tune_lookup_rule(data, static, False, clocks)

    def caution(least: int, length: int) -> float:
        plain = replace(static, action=EMPTY)
        rule = replace(plain, rule=LookupRule(least, length))
        gains = [replayed(rule).speed / replayed(plain).speed for replayed in clocks]
        return statistics.fmean(gains) - statistics.pstdev(gains)

    every = {rule: caution(*rule) for rule in product(tuning.LEASTS, SPACE.lookups)}
    assert setting.rule is not None and caution(*setting.rule[:2]) == max(every.values())
    assert setting.rule.length < tune_lookup_rule(data, static, False, clocks[:1]).rule.length
