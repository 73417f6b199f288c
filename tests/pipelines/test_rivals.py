"""Stronger rules than the lookup rule: how their numbers are found, and what is replayed."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from pipelines.logs.gains import PAYOFF_SCALARS, UNIT, Rule, best_rule, payoff_weights, rivals, with_payoff
from selector.actions import Action
from selector.decision import Mode
from selector.train.data import Timed
from selector.train.replay import fastest_possible
from selector.train.tuning import StaticTable, best_static, replay_mode, tune_lookup_rule
from tests.selector import logged

DEPTH = logged.SPACE.depth


def told(seed: int = 0) -> Timed:
    """Short matches go on for two tokens, long ones for six; the drafter is right where it has been, else never."""
    data = logged.timed(seed=seed)
    match_R, hits_R = data.texts.scalar("match"), data.texts.scalar("hit_mean_0.8")
    match_R.mul_(2)  # from 0 to 10
    foretold_R = torch.where(match_R >= 8, 6, torch.where(match_R >= 4, 2, 0))
    right_RD = (hits_R > 0.6).unsqueeze(-1).expand(-1, DEPTH)
    texts = replace(data.texts, foretold_R=foretold_R.to(torch.uint8), survivals={"naive": right_RD.half()})
    return replace(data, texts=texts)


def lookup_rule(train: Timed) -> Mode:
    return tune_lookup_rule(train, best_static(train, StaticTable.of(train)))


@pytest.mark.parametrize("of", [told, lambda seed: logged.timed(seed=seed)])
def test_no_rule_beats_the_one_that_is_told_everything(of: object) -> None:
    train, test = of(seed=1), of(seed=2)  # type: ignore[operator]
    best = fastest_possible(test.survivals_RS, test.seconds(), test.texts.size_X, test.space)
    found = rivals(train, test, lookup_rule(train))
    assert list(found) == ["the lookup rule with all options", "HVD"]
    for name, own in found.items():
        assert (own.seconds_X >= best.seconds_X * (1 - 1e-6)).all(), name


def test_two_lengths_are_found_where_they_pay() -> None:
    train = told()
    rule = lookup_rule(train)
    found = best_rule(train, rule).replayed(train).speed
    wanted = Rule(0, 4, 2, longer=8, far=6, hits=0.6, steady=DEPTH)
    assert found > 0.95 * wanted.replayed(train).speed
    assert found > 1.02 * replay_mode(train, {}, rule).speed


def test_a_payoff_that_is_linear_is_found() -> None:
    data = logged.timed()
    match_R, seen_R = data.texts.scalar("match"), data.texts.scalar("seen_1")
    seen_R.copy_((2 * seen_R).floor())
    foretold_R = torch.where(match_R > 0, match_R.clamp(max=4) + seen_R, 0)
    match_R.clamp_(max=4)
    train = replace(data, texts=replace(data.texts, foretold_R=foretold_R.to(torch.uint8)))
    payoff_R = UNIT * with_payoff(train, payoff_weights(train)).texts.scalar("match")
    assert payoff_R.tolist() == pytest.approx(foretold_R.tolist(), abs=1e-3)
    assert "seen_1" in PAYOFF_SCALARS and train.texts.scalar("match").tolist() == match_R.tolist(), "in a copy alone"


def plain(rule: Rule, match: float, hits: float) -> Action:
    """What a rule drafts where these are the scalars."""
    if match >= rule.longer:
        return Action.copy(rule.far)
    if match >= rule.least:
        return Action.copy(rule.copied)
    return logged.SPACE.chain(rule.steady if hits > rule.hits else rule.drafted)


@pytest.mark.parametrize(
    "rule",
    [
        Rule(3, 5, 4),
        Rule(4, 3, 2, longer=4, far=6, hits=0.55, steady=1),
        Rule(1, 4, 3, longer=2, far=2, hits=0.4, steady=5),
        Rule(2, math.inf, 1),
    ],
    ids=str,
)
def test_a_replay_is_a_plain_walk(rule: Rule) -> None:
    data = logged.timed()
    match_R, hits_R = (data.texts.scalar(name).tolist() for name in ("match", "hit_mean_0.8"))
    steps, _, seconds = logged.ten_lines(data, lambda r: plain(rule, match_R[r], hits_R[r]))
    found = rule.replayed(data)
    assert float(found.seconds_X.sum()) == pytest.approx(seconds, rel=1e-6)
    assert float(found.steps_X.sum()) == pytest.approx(steps, rel=1e-6)
