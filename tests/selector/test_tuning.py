"""What replay tunes, on texts whose labels are made by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from selector.actions import EMPTY, Action
from selector.data import Timed
from selector.decision import Mode, choices
from selector.latency import interpolated
from selector.replay import Ratio, replay
from selector.schema import LIGHT
from selector.tuning import (
    RARE,
    Judged,
    StaticTable,
    actions_of,
    best_static,
    common,
    replay_actions,
    replay_mode,
    sources,
    static_replay,
    tuned,
)
from tests.selector.synthetic import EASY, HARD, SPACE, profile, survivals_of, texts, timed


@pytest.fixture(scope="module")
def data() -> Timed:
    return timed(texts(count=10, roots=15))


@pytest.fixture(scope="module")
def static(data: Timed) -> Mode:
    return best_static(data, StaticTable.of(data), data.setting)


def true_scores(data: Timed) -> Tensor:
    return SPACE.efficiencies(data.survivals_RS)


def speed_of(data: Timed, action_R: Tensor, sees: str | None) -> float:
    """By replay itself."""
    seconds_R = data.seconds(sees).gather(-1, action_R.unsqueeze(-1))[:, 0]
    return replay(data.survivals_RS, action_R, seconds_R, data.texts.layout, SPACE).speed


def alike(data: Timed) -> Timed:
    """The same texts without anything to tell: the labels are the same at all roots."""
    survivals_RS = survivals_of(torch.full((len(data.texts.length_R),), 0.7))
    return Timed(replace(data.texts, survivals={"traversal": survivals_RS}), data.verifier, data.profile)


def test_the_best_static_tree_is_that_of_brute_force(data: Timed, static: Mode) -> None:
    """Every tree replayed by itself: its speed, its tokens per step, and which is the fastest of all or of some."""
    table = StaticTable.of(data)
    replays = [replay_actions(data, torch.full((150,), a), data.seconds()) for a in range(len(SPACE))]
    speeds = [each.speed for each in replays]
    assert table.speeds().tolist() == pytest.approx(speeds, rel=1e-5)
    assert table.efficiencies().tolist() == pytest.approx([each.block_efficiency for each in replays], rel=1e-5)
    best = max(range(len(SPACE)), key=speeds.__getitem__)
    assert table.best() == best
    few = [3, 50, 120, 200]
    allowed_A = torch.zeros(len(SPACE), dtype=torch.bool)
    allowed_A[few] = True
    assert table.best(allowed_A=allowed_A) == max(few, key=speeds.__getitem__) != best
    assert static == Mode(1.0, 1.0, SPACE.actions[best], speed=pytest.approx(speeds[best], rel=1e-5))
    limited = best_static(data, table, (1.0, 1.0), allowed_A)
    assert limited.speed == pytest.approx(max(speeds[a] for a in few), rel=1e-5)
    assert SPACE.index(limited.action) in few
    for found in (table.replayed(best), static_replay(data, SPACE.actions[best])):
        assert found.speed == pytest.approx(speeds[best], rel=1e-5)
        assert found.block_efficiency == pytest.approx(replays[best].block_efficiency, rel=1e-5)


def test_the_best_static_tree_of_some_texts(data: Timed) -> None:
    table, index_X = StaticTable.of(data), torch.tensor([1, 4, 7])
    own = StaticTable.of(timed(data.texts.take(index_X)))
    assert torch.allclose(table.speeds(index_X), own.speeds())
    assert table.best(index_X) == own.best()


def test_a_planted_gain_is_found_and_pays(data: Timed, static: Mode) -> None:
    """With the true block efficiencies: faster than the best static tree, by more than two standard errors; and no
    price that was tried would have been better."""
    scores_RA = true_scores(data)
    judged = tuned(data, scores_RA, static, LIGHT)
    assert judged.pays
    assert judged.ratio.value > 1.15
    assert judged.mode.decides
    assert judged.mode.action == static.action
    chosen_R = actions_of(data, scores_RA, judged.mode, data.seconds(LIGHT))
    assert judged.ratio.value == pytest.approx(speed_of(data, chosen_R, LIGHT) / static.speed, rel=1e-5)
    everything = [
        replace(judged.mode, rho=rho, speed=factor * static.speed, allowed=())
        for rho in (0.0, 0.25, 0.5, 0.75, 1.0)
        for factor in (0.85, 1.0, 1.15)
    ]
    best = max(replay_mode(data, scores_RA, mode, LIGHT).speed for mode in everything)
    assert judged.ratio.value == pytest.approx(best / static.speed, rel=5e-3)  # rare trees are left out afterwards


@pytest.mark.parametrize("policy", [False, True])
def test_no_gain_does_not_pay(data: Timed, policy: bool) -> None:
    """Predictions without any bearing on the text; or a text where all roots are alike: a decision costs time."""
    noise_RA = true_scores(data)[torch.randperm(150, generator=torch.Generator().manual_seed(3))]
    noise_RA = noise_RA.log() if policy else noise_RA
    for own, scores_RA in ((data, noise_RA), (alike(data), true_scores(alike(data)))):
        static = best_static(own, StaticTable.of(own), own.setting)
        judged = tuned(own, scores_RA, static, LIGHT, policy)
        assert not judged.pays
        assert judged.ratio.value < 1


def test_a_policys_best_is_its_own(data: Timed, static: Mode) -> None:
    """Logits that say what is best are followed, whatever the price of time."""
    seconds_RA = data.seconds(LIGHT)
    logits_RA = true_scores(data) - static.speed * seconds_RA
    judged = tuned(data, logits_RA, static, LIGHT, policy=True)
    assert judged.pays
    chosen_R = actions_of(data, logits_RA, judged.mode, seconds_RA, policy=True)
    wanted_R = logits_RA[:, list(judged.mode.allowed)].argmax(-1)
    expected_R = torch.tensor(judged.mode.allowed)[wanted_R]
    assert torch.equal(chosen_R[~data.texts.first_R], expected_R[~data.texts.first_R])


@pytest.mark.parametrize(("value", "error", "pays"), [(1.05, 0.024, True), (1.05, 0.026, False), (0.99, 0.0, False)])
def test_a_gain_pays_where_it_is_two_standard_errors_ahead(
    static: Mode, value: float, error: float, pays: bool
) -> None:
    assert Judged(static, Ratio(value, error)).pays == pays


def test_first_roots_draft_the_static_tree(data: Timed, static: Mode) -> None:
    decided = replace(static, decides=True, rho=0.5)
    seconds_RA, scores_RA, first_R = data.seconds(LIGHT), true_scores(data), data.texts.first_R
    chosen_R = actions_of(data, scores_RA, decided, seconds_RA)
    at = SPACE.index(static.action)
    assert first_R.sum() == 10
    assert (chosen_R[first_R] == at).all()
    assert torch.equal(chosen_R[~first_R], choices(scores_RA, seconds_RA, decided, SPACE)[~first_R])
    for scores in (scores_RA, None):
        assert (actions_of(data, scores, static, seconds_RA) == at).all()
    assert (actions_of(data, None, decided, seconds_RA) == at).all()


def test_what_is_decided_is_charged_for_deciding(data: Timed, static: Mode) -> None:
    """The very same trees, once by a decision and once without."""
    logits_RA = torch.zeros(150, len(SPACE))
    logits_RA[:, SPACE.index(static.action)] = 1
    decided, free = (
        replay_mode(data, logits_RA, mode, LIGHT, policy=True) for mode in (replace(static, decides=True), static)
    )
    assert torch.allclose(decided.tokens_X, free.tokens_X)
    assert torch.allclose(decided.steps_X, free.steps_X)
    more_X = decided.seconds_X - free.seconds_X
    assert torch.allclose(more_X, profile().decide[LIGHT] * free.steps_X, rtol=1e-3)


def test_only_trees_that_are_never_missed_are_left_out(data: Timed) -> None:
    """Those kept make up all but so many of the steps, no smaller set does, and the empty tree is one of them."""
    generator = torch.Generator().manual_seed(4)
    weight_A = torch.rand(len(SPACE), generator=generator, dtype=torch.float64) ** 8
    weight_A[SPACE.index(EMPTY)] = 0
    action_R = weight_A.multinomial(150, replacement=True, generator=generator)
    visits_R = torch.rand(150, generator=generator, dtype=torch.float64) ** 6
    kept = common(visits_R, action_R, data)
    steps_A = torch.zeros(len(SPACE), dtype=torch.float64)
    for action, visits in zip(action_R.tolist(), visits_R.tolist(), strict=True):
        steps_A[action] += visits
    share_A = steps_A / steps_A.sum()
    assert list(kept) == sorted(set(kept))
    assert SPACE.index(EMPTY) in kept
    of_use = [a for a in kept if a != SPACE.index(EMPTY)]
    assert float(share_A[of_use].sum()) >= 1 - RARE
    assert float(share_A[of_use].sum() - share_A[of_use].min()) < 1 - RARE
    assert float(share_A[of_use].min()) >= float(share_A[[a for a in range(len(SPACE)) if a not in kept]].max())
    assert len(of_use) < int((share_A > 0).sum())


def test_one_tree_for_all_steps_leaves_that_and_the_empty_one(data: Timed) -> None:
    action_R = torch.full((150,), SPACE.index(Action(2, 1, 1)))
    assert common(torch.ones(150, dtype=torch.float64), action_R, data) == (0, SPACE.index(Action(2, 1, 1)))
    empty_R = torch.full((150,), SPACE.index(EMPTY))
    assert common(torch.ones(150, dtype=torch.float64), empty_R, data) == (SPACE.index(EMPTY),)


def test_trees_that_are_left_out_are_not_chosen(data: Timed, static: Mode) -> None:
    judged = tuned(data, true_scores(data), static, LIGHT)
    chosen_R = actions_of(data, true_scores(data), judged.mode, data.seconds(LIGHT))
    assert set(chosen_R[~data.texts.first_R].tolist()) <= set(judged.mode.allowed)
    assert 2 <= len(judged.mode.allowed) < 20


def test_the_error_is_over_sources(data: Timed, static: Mode) -> None:
    """Texts of one source move together; a single source tells no error."""
    assert sources(data.texts).tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    alone = replace(data.texts, source_X=[f"{x}" for x in range(10)])
    scores_RA = true_scores(data)
    by_two, by_one = (tuned(timed(each), scores_RA, static, LIGHT) for each in (data.texts, alone))
    assert by_two.mode == by_one.mode
    assert by_two.ratio.value == pytest.approx(by_one.ratio.value)
    assert by_two.ratio.error != pytest.approx(by_one.ratio.error, rel=1e-3)
    one = tuned(timed(replace(data.texts, source_X=["one"] * 10)), scores_RA, static, LIGHT)
    assert one.ratio.value > 1.15
    assert not one.pays


def test_times_are_those_of_the_machine_at_every_root(data: Timed) -> None:
    lengths_L, seconds_LA = profile().table(SPACE.actions, "traversal", LIGHT)
    assert torch.allclose(data.seconds(LIGHT), interpolated(seconds_LA, lengths_L, data.texts.length_R))
    assert not torch.allclose(data.seconds(LIGHT)[0], data.seconds(LIGHT)[-1], rtol=0.1)
    far = int(data.texts.length_R.argmax())  # the last length that was measured, or beyond
    assert data.texts.length_R[far] >= 100
    for a in (0, 9, 200):
        for sees in (None, LIGHT):
            expected = profile().action_seconds(SPACE.actions[a], 100, "traversal", sees)
            assert float(data.seconds(sees)[far, a]) == pytest.approx(expected, rel=1e-5)
    filtered = timed(texts(4, 3, setting=(1.0, 0.9)))
    assert (filtered.seconds() > timed(texts(4, 3)).seconds()).all()  # a nucleus takes time, too


def test_where_it_is_easy_longer_trees_are_best() -> None:
    """The synthetic labels are what they say: for the tests above to mean anything."""
    survivals_RS = survivals_of(torch.tensor([EASY, HARD]))
    efficiency_RA = SPACE.efficiencies(survivals_RS)
    assert float(efficiency_RA[0, SPACE.index(SPACE.chain(16))]) == pytest.approx((1 - EASY**17) / (1 - EASY))
    assert float(efficiency_RA[1, SPACE.index(Action(3, 0, 1))]) == pytest.approx(2 - (1 - HARD) ** 3)
