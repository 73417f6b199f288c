"""The rules of other projects, against walks in plain Python.

Legend: X texts, R roots, D depths.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from pipelines.logs.rivals.adaptive import Adaptive, Bandit, Estimated
from pipelines.logs.rivals.copying import PAYOFF_SCALARS, Copying, Payoff, Scored, suffix_score
from pipelines.logs.rivals.rules import Rival, RivalTexts, Sequential
from selector.actions import ActionSpace, Choice, Lookup
from selector.schema import LOG
from selector.train.data import Timed
from selector.train.replay import Replayed
from tests.pipelines.rival_texts import CLOCK, DEPTH, LONGEST, timed

WEIGHTS = (0.3, 0.5, *(0.1 * (-1) ** f for f in range(len(PAYOFF_SCALARS) - 1)))
RULES: list[Rival] = [
    Copying(3, 5, 40),
    Copying(2, 4, 2),
    Copying(4, 3, 2, longer=7, far=6, hits=0.55, steady=1),
    Copying(1, 7, 3, longer=4, far=2, hits=0.4, steady=5),
    *(Scored(k) for k in range(DEPTH + 1)),
    Payoff(WEIGHTS, 2, 1.5, 4),
    Payoff((2.0, *WEIGHTS[1:]), 1, 0.5, 3),  # high enough where there is no match
    Payoff(WEIGHTS, 3, math.inf, 4),
]
LEARNERS: list[Sequential] = [
    Adaptive((1, 3, 5), 1, -0.25, 0.2, 10, 5),
    Adaptive((0, 1, 3), 0, 0.0, 0.4, 0, 1),
    Adaptive((0, 1), 1, 0.0, 0.2, 3, 2),
    Adaptive((0,), 0, 0.0, 0.2, 0, 1),
    Adaptive(tuple(range(DEPTH + 1)), 4, 0.0, 0.3, 2, 3),
    Estimated((0.7, 0.6, 0.8, 0.5, 0.4), 0.1, 0),
    Estimated((0.1, 0.6, 0.8, 0.5, 0.4), 0.3, 4),
    Bandit((1, 2, 3, 4), 2.0),
    Bandit((0, 2, 5), 0.02),
]
Steps = list[tuple[float, float]]  # seconds and steps of each text


def scalars_at(data: Timed, row: int) -> dict[str, float]:
    return dict(zip(LOG.names, data.texts.scalars_RF[row].tolist(), strict=True))


def seconds_of(data: Timed, row: int, choice: Choice) -> float:
    return CLOCK.action_seconds(choice, float(data.texts.length_R[row]), "naive")


def chain(length: int) -> Choice:
    return ActionSpace.chains(DEPTH, LONGEST).chain(length)


def assert_same(found: Replayed, wanted: Steps, data: Timed) -> None:
    assert found.tokens_X.tolist() == pytest.approx(data.texts.size_X.tolist(), rel=1e-6)
    assert found.seconds_X.tolist() == pytest.approx([seconds for seconds, _ in wanted], rel=1e-6)
    assert found.steps_X.tolist() == pytest.approx([steps for _, steps in wanted], rel=1e-6)


# Rules that look at the root alone


def plain(rule: Rival, known: dict[str, float]) -> Choice:
    """What a rule drafts where these are the scalars."""
    match = int(known["match"])
    if isinstance(rule, Copying):
        if match >= rule.longer:
            return Lookup(min(rule.far, LONGEST))
        if match >= rule.least:
            return Lookup(min(rule.copied, LONGEST))
        return chain(rule.steady if known["hit_mean_0.8"] > rule.hits else rule.drafted)
    if isinstance(rule, Scored):
        share = 1.0 if known["second_match"] < match else known[f"agree_{min(match, 4)}"] if match else 0.0
        chance, score, length = share, 0.0, 0
        while length < min(match, LONGEST) and chance >= 0.1:
            score, length, chance = score + chance, length + 1, chance * share
        return Lookup(length) if length and score >= rule.drafted else chain(rule.drafted)
    assert isinstance(rule, Payoff)
    values = [1.0, *(known[name] for name in PAYOFF_SCALARS)]
    payoff = math.fsum(weight * value for weight, value in zip(rule.weights, values, strict=True))
    return Lookup(rule.copied) if match and payoff >= rule.least else chain(rule.drafted)


def expected(data: Timed, rule: Rival) -> Steps:
    """Every root with the probability that a step begins there."""
    result, begin = [], 0
    for size in data.texts.size_X.tolist():
        begins = [1.0] + [0.0] * (size + LONGEST + 1)
        seconds = 0.0
        for n in range(size):
            choice = plain(rule, scalars_at(data, begin + n))
            seconds += begins[n] * seconds_of(data, begin + n, choice)
            first = DEPTH if isinstance(choice, Lookup) else 0
            reached = [1.0, *data.survivals_RS[begin + n, first : first + choice.nodes].tolist(), 0.0]
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
    assert_same(found, expected(data, rule), data)
    assert texts.speed(rule) == pytest.approx(found.speed, rel=1e-5)


def test_the_rules_here_do_copy_and_draft() -> None:
    data = timed()
    for rule in RULES[:-1]:
        actions = set(rule.actions(RivalTexts(data)).tolist())
        assert min(actions) <= DEPTH < max(actions), rule


@pytest.mark.parametrize(
    ("match", "second", "share", "score", "length"),
    [(6, 2, 0.5, 6, 6), (12, 3, 0.2, 8, 8), (8, 8, 0.5, 0.875, 3), (2, 9, 0.05, 0, 0), (0, 0, 0.9, 0, 0)],
)
def test_the_score_of_a_suffix(match: int, second: int, share: float, score: float, length: int) -> None:
    data = timed(texts=1, roots=1)
    values = {"match": match, "second_match": second, **{f"agree_{count}": share for count in (1, 2, 3, 4)}}
    for name, value in values.items():
        data.texts.scalars_RF[:, LOG.index(name)] = float(value)
    score_R, length_R = suffix_score(RivalTexts(data))
    assert score_R.item() == pytest.approx(score)
    assert length_R.item() == length


# Rules that learn from their own steps


class PlainAdaptive:
    """SGLang's, in words: after the warm-up, at every interval, go down as long as the average is at most the next
    smaller length less half a token, and the slack. Where it did not go down, go up as long as the average exceeds the
    length less half a token. From no drafting always go up by one."""

    def __init__(self, rule: Adaptive, data: Timed) -> None:
        self.rule, self.at, self.count = rule, rule.start, 0
        self.mean = rule.candidates[rule.start] - 1.0

    def length(self, row: int) -> int:
        return self.rule.candidates[self.at]

    def told(self, row: int, accepted: int) -> None:
        rule, self.count = self.rule, self.count + 1
        if rule.candidates[self.at] > 0:
            self.mean = (1 - rule.weight) * self.mean + rule.weight * accepted
        if self.count <= rule.warm_up or (self.count - rule.warm_up) % rule.interval:
            return
        lengths, before = rule.candidates, self.at
        if lengths[before] == 0:
            self.at = min(before + 1, len(lengths) - 1)
            if lengths[self.at] > 0 and self.mean < 0:
                self.mean = lengths[self.at] - 1.0
            return
        while self.at > 0 and self.mean <= {0: 0.5}.get(lengths[self.at - 1], lengths[self.at - 1] - 0.5) + rule.slack:
            self.at -= 1
        if self.at == before:
            while self.at + 1 < len(lengths) and self.mean > lengths[self.at] - 0.5:
                self.at += 1


class PlainEstimated:
    def __init__(self, rule: Estimated, data: Timed) -> None:
        self.rule, self.data, self.rates, self.count = rule, data, list(rule.rates), 0

    def length(self, row: int) -> int:
        def speed(k: int) -> float:
            tokens = 1 + sum(math.prod(self.rates[:d]) for d in range(1, k + 1))
            return tokens / seconds_of(self.data, row, chain(k))

        self.count += 1
        self.drafted = max(range(DEPTH + 1), key=speed)
        if self.rule.probe and self.count % self.rule.probe == 0:
            self.drafted = min(self.drafted + 1, DEPTH)
        return self.drafted

    def told(self, row: int, accepted: int) -> None:
        weight = self.rule.weight
        for d in range(self.drafted):
            if d <= accepted:  # of later tokens nothing is known
                self.rates[d] = (1 - weight) * self.rates[d] + weight * (d < accepted)


class PlainBandit:
    def __init__(self, rule: Bandit, data: Timed) -> None:
        self.rule, self.data = rule, data
        self.rewards: dict[int, list[float]] = {arm: [] for arm in rule.arms}

    def length(self, row: int) -> int:
        steps = sum(map(len, self.rewards.values()))

        def score(arm: int) -> float:
            own = self.rewards[arm]
            return sum(own) / len(own) + math.sqrt(self.rule.weight * math.log(steps) / len(own)) if own else math.inf

        self.arm = max(self.rule.arms, key=score)
        return self.arm

    def told(self, row: int, accepted: int) -> None:
        most = max((arm + 1) / seconds_of(self.data, row, chain(arm)) for arm in self.rule.arms)
        self.rewards[self.arm].append((accepted + 1) / seconds_of(self.data, row, chain(self.arm)) / most)


PLAIN = {Adaptive: PlainAdaptive, Estimated: PlainEstimated, Bandit: PlainBandit}


def walked(data: Timed, begun: Callable[[], PlainAdaptive | PlainEstimated | PlainBandit]) -> Steps:
    """Step by step, with a rule that begins anew in each text and is told what was accepted."""
    result, begin = [], 0
    for size in data.texts.size_X.tolist():
        rule, n, seconds, steps = begun(), 0, 0.0, 0
        while n < size:
            length = rule.length(begin + n)
            accepted = min(length, int(data.survivals_RS[begin + n, :DEPTH].sum()))
            rule.told(begin + n, accepted)
            seconds, steps = seconds + seconds_of(data, begin + n, chain(length)), steps + 1
            n += 1 + accepted
        result.append((seconds, float(steps)))
        begin += size
    return result


@pytest.mark.parametrize("rule", LEARNERS, ids=str)
def test_a_rule_that_learns_does_what_it_does_in_plain_python(rule: Sequential) -> None:
    data = timed(seed=1)
    texts = RivalTexts(data)
    found = texts.replayed(rule)
    assert_same(found, walked(data, lambda: PLAIN[type(rule)](rule, data)), data)
    assert texts.speed(rule) == pytest.approx(found.speed, rel=1e-5)


@pytest.mark.parametrize("rule", [each for each in LEARNERS if each != LEARNERS[3]], ids=str)
def test_a_rule_that_learns_never_looks_ahead(rule: Sequential) -> None:
    data, other = timed(seed=2), timed(seed=3)
    before_R = rule.actions(RivalTexts(data))
    changed = 0
    for row in (85, 120, 150, 200):  # what is accepted there and later is another text's
        survivals_RD = data.texts.survivals["naive"].clone()
        survivals_RD[row:] = other.texts.survivals["naive"][row:]
        texts = replace(data.texts, survivals={"naive": survivals_RD})
        after_R = rule.actions(RivalTexts(Timed(texts, "naive", CLOCK, data.space)))
        assert torch.equal(after_R[: row + 1], before_R[: row + 1])
        changed += not torch.equal(after_R, before_R)
    assert changed == 4


@pytest.mark.parametrize("rule", LEARNERS, ids=str)
def test_what_is_learnt_stays_in_its_text(rule: Sequential) -> None:
    data = timed(seed=4)
    last = torch.tensor([len(data.texts) - 1])
    alone = Timed(data.texts.take(last), "naive", CLOCK, data.space)
    rows = data.texts.text_R == last
    assert torch.equal(rule.actions(RivalTexts(data))[rows], rule.actions(RivalTexts(alone)))
