"""Stronger rules than the lookup rule: how their numbers are found, and what is replayed, against plain walks.

Legend: X texts, R roots, D depths.
"""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pipelines.logs.rivals import (
    PAYOFF_SCALARS,
    Copying,
    Payoff,
    Rival,
    RivalTexts,
    best_rule,
    climbed,
    grid,
    hybrid_verified_decoding,
    payoff,
    rivals,
)
from selector.actions import ActionSpace, Choice, Lookup
from selector.decision import Mode
from selector.latency import LatencyProfile
from selector.schema import LEVELS, LOG
from selector.tables import FREE, Table
from selector.train.data import Texts, Timed
from selector.train.replay import fastest_possible
from selector.train.tuning import StaticTable, best_static, tune_lookup_rule

DEPTH, LONGEST, TEXTS = 5, 8, 6
CLOCK = LatencyProfile(
    device="test machine",
    pair="log:drafter",
    draft=Table([1], [1], [[0.9e-3]]),
    target=Table([1], [1, 33], [[6e-3, 9e-3]]),
    verify={"naive": FREE},
    decide=dict.fromkeys(LEVELS, 0.0),
    step=1e-3,
)
SPACE = ActionSpace.chains(DEPTH, LONGEST)
WEIGHTS = (0.3, 0.5, *(0.1 * (-1) ** f for f in range(len(PAYOFF_SCALARS) - 1)))
RULES: list[Rival] = [
    Copying(3, 5, 40),
    Copying(2, 4, 2),
    Copying(4, 3, 2, longer=7, far=6, hits=0.55, steady=1),
    Copying(1, 7, 3, longer=4, far=2, hits=0.4, steady=5),
    Payoff(WEIGHTS, 2, 1.5, 4),
    Payoff((2.0, *WEIGHTS[1:]), 1, 0.5, 3),  # high enough where there is no match
    Payoff(WEIGHTS, 3, math.inf, 4),
]


def timed(seed: int = 0, certain: bool = True, depth: int = DEPTH) -> Timed:
    """Texts that repeat themselves where the match is long, some of which are easier for the drafter than others."""
    generator = torch.Generator().manual_seed(seed)
    size_X = torch.tensor([80 - 9 * x for x in range(TEXTS)])
    R = int(size_X.sum())

    def drawn(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    match_R = (13 * drawn(R) ** 2).floor()
    foretold_R = (match_R * 2 * drawn(R)).floor().clamp(max=LONGEST)
    easy_R = (0.3 + 0.6 * drawn(TEXTS)).repeat_interleave(size_X)
    rate_RD = easy_R.unsqueeze(-1).expand(R, depth)
    survivals_RD = ((drawn(R, depth) < rate_RD).float() if certain else rate_RD).cumprod(-1)
    scalars_RF = drawn(R, len(LOG.scalars))
    known = {
        "match": match_R,
        "second_match": (match_R + 1 - (4 * drawn(R)).floor()).clamp(min=0),
        "hit_mean_0.8": (easy_R + 0.4 * (drawn(R) - 0.5)).clamp(0, 1),
    }
    for name, values_R in known.items():
        scalars_RF[:, LOG.index(name)] = values_R
    data = Texts(
        settings=[(0.0, 1.0)],
        size_X=size_X,
        setting_X=torch.zeros(TEXTS, dtype=torch.int64),
        kind_X=["prose"] * TEXTS,
        source_X=[f"source {x}" for x in range(TEXTS)],
        prompt_X=[f"prompt {x}" for x in range(TEXTS)],
        scalars_RF=scalars_RF,
        length_R=20 + torch.cat([torch.arange(size) for size in size_X.tolist()]),
        survivals={"naive": survivals_RD.half()},
        foretold_R=foretold_R.to(torch.uint8),
        hidden_R=torch.full((R,), -1),
        from_the_start=True,
        schema=LOG,
    )
    return Timed(data, "naive", CLOCK, ActionSpace.chains(depth, LONGEST))


def lookup_rule(train: Timed) -> Mode:
    return tune_lookup_rule(train, best_static(train, StaticTable.of(train)))


def start_of(mode: Mode) -> Copying:
    assert mode.rule is not None
    return Copying(mode.action.nodes, *mode.rule)


@pytest.mark.parametrize("certain", [True, False])
def test_no_rule_beats_the_one_that_is_told_everything(certain: bool) -> None:
    train, test = timed(seed=9, certain=certain), timed(seed=8, certain=certain)
    best = fastest_possible(test.survivals_RS, test.seconds(), test.texts.size_X, test.space)
    for name, found in rivals(train, test, lookup_rule(train)).items():
        assert (found.seconds_X >= best.seconds_X * (1 - 1e-6)).all(), name


def test_what_is_replayed_is_the_rule_that_was_tuned_on_the_other_texts() -> None:
    train, test = timed(seed=10), timed(seed=11)
    own, rule = RivalTexts(train), lookup_rule(train)
    tuned: list[Rival] = [best_rule(own, start_of(rule)), hybrid_verified_decoding(own)]
    found = rivals(train, test, rule)
    assert list(found) == ["the lookup rule with all options", "HVD"]
    for mine, each in zip(found.values(), tuned, strict=True):
        assert mine.seconds_X.tolist() == RivalTexts(test).replayed(each).seconds_X.tolist()


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("certain", [True, False])
def test_a_tuned_rule_is_as_fast_as_the_rules_that_it_contains(seed: int, certain: bool) -> None:
    data = timed(seed=seed, certain=certain)
    train, start = RivalTexts(data), start_of(lookup_rule(data))
    best, hvd = best_rule(train, start), hybrid_verified_decoding(train)
    fixed = max(train.speed(Copying(k, 99, 1)) for k in range(DEPTH + 1))
    assert train.speed(best) >= train.speed(start) >= fixed * (1 - 1e-6)
    assert train.speed(hvd) >= fixed


def test_two_lengths_are_found_where_they_pay() -> None:
    """Short matches go on for two tokens, long ones for eight. The drafter is right where it has been, else never."""
    data = timed(seed=14)
    match_R, hits_R = (data.texts.scalars_RF[:, LOG.index(name)] for name in ("match", "hit_mean_0.8"))
    foretold_R = torch.where(match_R >= 8, 8, torch.where(match_R >= 3, 2, 0))
    right_RD = (hits_R > 0.6).unsqueeze(-1).expand(-1, DEPTH)
    texts = replace(data.texts, foretold_R=foretold_R.to(torch.uint8), survivals={"naive": right_RD.half()})
    own = Timed(texts, "naive", CLOCK, data.space)
    train, start = RivalTexts(own), start_of(lookup_rule(own))
    found = best_rule(train, start)
    wanted = Copying(0, 3, 2, longer=8, far=8, hits=0.6, steady=DEPTH)
    assert train.speed(found) >= train.speed(wanted) * (1 - 1e-9)
    assert train.speed(found) > 1.05 * train.speed(start)


def test_a_payoff_that_is_linear_is_found() -> None:
    data = timed(seed=15)
    match_R, seen_R = (data.texts.scalars_RF[:, LOG.index(name)] for name in ("match", "seen_1"))
    seen_R.copy_((2 * seen_R).floor())
    match_R.clamp_(max=6)
    foretold_R = torch.where(match_R > 0, match_R + seen_R, 0)
    texts = replace(data.texts, foretold_R=foretold_R.to(torch.uint8))
    train = RivalTexts(Timed(texts, "naive", CLOCK, data.space))
    found = hybrid_verified_decoding(train)
    has_R = match_R > 0
    assert payoff(train, found.weights)[has_R].tolist() == pytest.approx(foretold_R[has_R].tolist(), abs=1e-3)


def test_a_step_of_the_search_never_loses_speed() -> None:
    train = RivalTexts(timed(seed=16))
    start = max((Copying(k, 99, 1) for k in range(DEPTH + 1)), key=train.speed)
    others = [k for k in range(DEPTH + 1) if k != start.drafted]
    assert climbed(train, start, [grid(drafted=others)]) == start
    assert climbed(train, replace(start, drafted=others[0]), [grid(drafted=range(DEPTH + 1))]) == start


def test_a_drafter_of_which_nothing_was_ever_accepted() -> None:
    train = timed(depth=0)
    found = rivals(train, timed(seed=1, depth=0), lookup_rule(train))
    assert all(each.speed > 0 for each in found.values())


def plain(rule: Rival, known: dict[str, float]) -> Choice:
    """What a rule drafts where these are the scalars."""
    match = int(known["match"])
    if isinstance(rule, Copying):
        if match >= rule.longer:
            return Lookup(min(rule.far, LONGEST))
        if match >= rule.least:
            return Lookup(min(rule.copied, LONGEST))
        return SPACE.chain(rule.steady if known["hit_mean_0.8"] > rule.hits else rule.drafted)
    assert isinstance(rule, Payoff)
    values = [1.0, *(known[name] for name in PAYOFF_SCALARS)]
    payoff = math.fsum(weight * value for weight, value in zip(rule.weights, values, strict=True))
    return Lookup(rule.copied) if match and payoff >= rule.least else SPACE.chain(rule.drafted)


def expected(data: Timed, rule: Rival) -> list[tuple[float, float]]:
    """Seconds and steps of each text: every root with the probability that a step begins there."""
    result, begin = [], 0
    for size in data.texts.size_X.tolist():
        begins = [1.0] + [0.0] * (size + LONGEST + 1)
        seconds = 0.0
        for n in range(size):
            row = begin + n
            choice = plain(rule, dict(zip(LOG.names, data.texts.scalars_RF[row].tolist(), strict=True)))
            seconds += begins[n] * CLOCK.action_seconds(choice, float(data.texts.length_R[row]), "naive")
            first = DEPTH if isinstance(choice, Lookup) else 0
            reached = [1.0, *data.survivals_RS[row, first : first + choice.nodes].tolist(), 0.0]
            for accepted in range(choice.nodes + 1):
                begins[n + 1 + accepted] += begins[n] * (reached[accepted] - reached[accepted + 1])
        result.append((seconds, sum(begins[:size])))
        begin += size
    return result


@pytest.mark.parametrize("certain", [True, False])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_replay_is_what_a_plain_walk_expects(rule: Rival, certain: bool) -> None:
    data = timed(certain=certain)
    texts = RivalTexts(data)
    assert texts.certain == certain
    found = texts.replayed(rule)
    assert found.tokens_X.tolist() == pytest.approx(data.texts.size_X.tolist(), rel=1e-6)
    steps_X2 = torch.stack([found.seconds_X, found.steps_X], dim=1)
    assert steps_X2.tolist() == [pytest.approx(each, rel=1e-6) for each in expected(data, rule)]
    assert texts.speed(rule) == pytest.approx(found.speed, rel=1e-5)


def test_the_rules_here_do_copy_and_draft() -> None:
    data = timed()
    for rule in RULES[:-1]:
        actions = set(rule.actions(RivalTexts(data)).tolist())
        assert min(actions) <= DEPTH < max(actions), rule
