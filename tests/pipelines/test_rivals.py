"""The rules of other projects, against walks in plain Python.

Legend: X texts, R roots, D depths.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from pipelines.logs.rivals import (
    PAYOFF_SCALARS,
    Adaptive,
    Bandit,
    Copying,
    Estimated,
    Logged,
    Payoff,
    Rival,
    Scored,
    Sequential,
    best_rule,
    climbed,
    hybrid_verified_decoding,
    n_gram_first,
    one,
    rivals,
    sam_decoding,
    suffix_score,
    tensorrt_llm,
    tuned_rivals,
)
from selector.actions import ActionSpace, Choice, Lookup
from selector.data import Texts, Timed
from selector.latency import LatencyProfile
from selector.replay import Replayed, fastest_possible
from selector.schema import LEVELS, LOG
from selector.tables import FREE, Table
from selector.tuning import LEASTS

DEPTH, LONGEST = 5, 8
LEARNING = {"SGLang adaptive", "vLLM acceptance estimator", "bandit"}  # rules that learn from their own steps
STATELESS = {
    "n-gram first",
    "SAM-Decoding",
    "TensorRT-LLM suffix automaton",
    "the rule at its best",
    "ArcticInference",
    "HVD",
}
CLOCK = LatencyProfile(
    device="test machine",
    pair="log:drafter",
    draft=Table([1], [1], [[0.9e-3]]),
    target=Table([1], [1, 33], [[6e-3, 9e-3]]),
    verify={"naive": FREE},
    decide=dict.fromkeys(LEVELS, 0.0),
    step=1e-3,
)
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


def timed(seed: int = 0, certain: bool = True, depth: int = DEPTH, texts: int = 6, roots: int = 80) -> Timed:
    """Texts that repeat themselves where the match is long, some of which are easier for the drafter than others."""
    generator = torch.Generator().manual_seed(seed)
    size_X = torch.tensor([roots - 9 * x for x in range(texts)])
    R = int(size_X.sum())

    def drawn(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    match_R = (13 * drawn(R) ** 2).floor()
    foretold_R = (match_R * 2 * drawn(R)).floor().clamp(max=LONGEST)
    easy_R = (0.3 + 0.6 * drawn(texts)).repeat_interleave(size_X)
    rate_RD = easy_R.unsqueeze(-1).expand(R, depth)
    survivals_RD = ((drawn(R, depth) < rate_RD).float() if certain else rate_RD).cumprod(-1)
    scalars_RF = drawn(R, len(LOG.scalars))
    known = {
        "match": match_R,
        "second_match": (match_R + 1 - (4 * drawn(R)).floor()).clamp(min=0),
        "hit_mean_0.8": (easy_R + 0.4 * (drawn(R) - 0.5)).clamp(0, 1),
    }
    for name, values_R in known.items():
        scalars_RF[:, LOG.names.index(name)] = values_R
    data = Texts(
        settings=[(0.0, 1.0)],
        size_X=size_X,
        setting_X=torch.zeros(texts, dtype=torch.int64),
        kind_X=["prose"] * texts,
        source_X=[f"source {x}" for x in range(texts)],
        prompt_X=[f"prompt {x}" for x in range(texts)],
        scalars_RF=scalars_RF,
        length_R=20 + torch.cat([torch.arange(size) for size in size_X.tolist()]),
        survivals={"naive": survivals_RD.half()},
        foretold_R=foretold_R.to(torch.uint8),
        hidden_R=torch.full((R,), -1),
        from_the_start=True,
    )
    return Timed(data, "naive", CLOCK, ActionSpace.chains(depth, LONGEST))


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
    logged = Logged(data)
    assert logged.certain == certain
    found = logged.replayed(rule)
    assert_same(found, expected(data, rule), data)
    assert logged.speed(rule) == pytest.approx(found.speed, rel=1e-5)


def test_the_rules_here_do_copy_and_draft() -> None:
    data = timed()
    for rule in RULES[:-1]:
        actions = set(rule.actions(Logged(data)).tolist())
        assert min(actions) <= DEPTH < max(actions), rule


@pytest.mark.parametrize(
    ("match", "second", "share", "score", "length"),
    [(6, 2, 0.5, 6, 6), (12, 3, 0.2, 8, 8), (8, 8, 0.5, 0.875, 3), (2, 9, 0.05, 0, 0), (0, 0, 0.9, 0, 0)],
)
def test_the_score_of_a_suffix(match: int, second: int, share: float, score: float, length: int) -> None:
    data = timed(texts=1, roots=1)
    values = {"match": match, "second_match": second, **{f"agree_{count}": share for count in (1, 2, 3, 4)}}
    for name, value in values.items():
        data.texts.scalars_RF[:, LOG.names.index(name)] = float(value)
    score_R, length_R = suffix_score(Logged(data))
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
    logged = Logged(data)
    found = logged.replayed(rule)
    assert_same(found, walked(data, lambda: PLAIN[type(rule)](rule, data)), data)
    assert logged.speed(rule) == pytest.approx(found.speed, rel=1e-5)


@pytest.mark.parametrize("rule", [each for each in LEARNERS if each != LEARNERS[3]], ids=str)
def test_a_rule_that_learns_never_looks_ahead(rule: Sequential) -> None:
    data, other = timed(seed=2), timed(seed=3)
    before_R = rule.actions(Logged(data))
    changed = 0
    for row in (85, 120, 150, 200):  # what is accepted there and later is another text's
        survivals_RD = data.texts.survivals["naive"].clone()
        survivals_RD[row:] = other.texts.survivals["naive"][row:]
        texts = replace(data.texts, survivals={"naive": survivals_RD})
        after_R = rule.actions(Logged(Timed(texts, "naive", CLOCK, data.space)))
        assert torch.equal(after_R[: row + 1], before_R[: row + 1])
        changed += not torch.equal(after_R, before_R)
    assert changed == 4


@pytest.mark.parametrize("rule", LEARNERS, ids=str)
def test_what_is_learnt_stays_in_its_text(rule: Sequential) -> None:
    data = timed(seed=4)
    last = torch.tensor([len(data.texts) - 1])
    alone = Timed(data.texts.take(last), "naive", CLOCK, data.space)
    rows = data.texts.text_R == last
    assert torch.equal(rule.actions(Logged(data))[rows], rule.actions(Logged(alone)))


# Tuning


def test_every_rule_is_there_if_all_labels_are_certain_and_else_those_that_need_no_steps() -> None:
    sure, unsure = timed(seed=5), timed(seed=6, certain=False)
    assert set(rivals(sure, timed(seed=7))) == STATELESS | LEARNING
    assert set(rivals(unsure, unsure)) == STATELESS
    assert set(rivals(sure, unsure)) == STATELESS
    assert set(rivals(unsure, sure)) == STATELESS


@pytest.mark.parametrize("certain", [True, False])
def test_no_rule_beats_the_one_that_is_told_everything(certain: bool) -> None:
    test = timed(seed=8, certain=certain)
    best = fastest_possible(test.survivals_RS, test.seconds(), test.texts.size_X, test.space)
    for name, found in rivals(timed(seed=9, certain=certain), test).items():
        assert (found.seconds_X >= best.seconds_X * (1 - 1e-6)).all(), name


def test_what_is_replayed_is_the_rule_that_was_tuned_on_the_other_texts() -> None:
    train, test = timed(seed=10), timed(seed=11)
    found = rivals(train, test)
    for name, rule in tuned_rivals(Logged(train)).items():
        assert found[name].seconds_X.tolist() == Logged(test).replayed(rule).seconds_X.tolist(), name


@pytest.mark.parametrize("certain", [True, False])
def test_published_numbers_stay_and_the_rest_is_the_best(certain: bool) -> None:
    train = Logged(timed(seed=12, certain=certain))
    found = tuned_rivals(train)
    kept: dict[str, list[Rival]] = {
        "SAM-Decoding": [Copying(k, 5, 40) for k in range(DEPTH + 1)],
        "TensorRT-LLM suffix automaton": [Copying(k, 4, k) for k in range(1, DEPTH + 1)],
        "ArcticInference": [Scored(k) for k in range(DEPTH + 1)],
    }
    for name, settings in kept.items():
        assert found[name] == max(settings, key=train.speed), name


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("certain", [True, False])
def test_a_tuned_rule_is_as_fast_as_the_rules_that_it_contains(seed: int, certain: bool) -> None:
    train = Logged(timed(seed=seed, certain=certain))
    sam, tensorrt = sam_decoding(train), tensorrt_llm(train)
    n_gram = n_gram_first(train, [sam, tensorrt])
    best, hvd = best_rule(train, n_gram), hybrid_verified_decoding(train)
    fixed = max(train.speed(Copying(k, 99, 1)) for k in range(DEPTH + 1))
    assert train.speed(n_gram) >= max(train.speed(sam), train.speed(tensorrt), fixed)
    assert train.speed(best) >= train.speed(n_gram)
    assert train.speed(hvd) >= fixed
    copied = [replace(n_gram, least=least, copied=length) for least in LEASTS for length in range(1, LONGEST + 1)]
    drafted = [replace(n_gram, drafted=k) for k in range(DEPTH + 1)]
    assert train.speed(n_gram) >= max(map(train.speed, [*copied, *drafted]))


def test_tuned_rules_that_learn_are_as_fast_as_with_published_numbers() -> None:
    data = timed(seed=13)
    train = Logged(data)
    found = tuned_rivals(train)
    adaptive = [Adaptive((1, 3, 5), at, -0.25, 0.2, 10, 5) for at in range(3)]
    adaptive += [Adaptive((0, 1, 3), at, 0.0, 0.2, 10, 5) for at in range(3)]
    assert train.speed(found["SGLang adaptive"]) >= max(map(train.speed, adaptive))
    assert train.speed(found["bandit"]) >= train.speed(Bandit((1, 2, 3, 4), 2.0))
    estimated = found["vLLM acceptance estimator"]
    assert isinstance(estimated, Estimated)
    reached_D = data.survivals_RS[:, :DEPTH].mean(0)
    assert estimated.rates == pytest.approx([reached_D[0].item(), *(reached_D[1:] / reached_D[:-1]).tolist()], rel=1e-5)


def test_two_lengths_are_found_where_they_pay() -> None:
    """Short matches go on for two tokens, long ones for eight. The drafter is right where it has been, else never."""
    data = timed(seed=14)
    match_R, hits_R = (data.texts.scalars_RF[:, LOG.names.index(name)] for name in ("match", "hit_mean_0.8"))
    foretold_R = torch.where(match_R >= 8, 8, torch.where(match_R >= 3, 2, 0))
    right_RD = (hits_R > 0.6).unsqueeze(-1).expand(-1, DEPTH)
    texts = replace(data.texts, foretold_R=foretold_R.to(torch.uint8), survivals={"naive": right_RD.half()})
    train = Logged(Timed(texts, "naive", CLOCK, data.space))
    found = best_rule(train, n_gram_first(train, [sam_decoding(train), tensorrt_llm(train)]))
    wanted = Copying(0, 3, 2, longer=8, far=8, hits=0.6, steady=DEPTH)
    assert train.speed(found) >= train.speed(wanted) * (1 - 1e-9)
    assert train.speed(found) > 1.05 * train.speed(n_gram_first(train, [sam_decoding(train)]))


def test_a_payoff_that_is_linear_is_found() -> None:
    data = timed(seed=15)
    match_R, seen_R = (data.texts.scalars_RF[:, LOG.names.index(name)] for name in ("match", "seen_1"))
    seen_R.copy_((2 * seen_R).floor())
    match_R.clamp_(max=6)
    foretold_R = torch.where(match_R > 0, match_R + seen_R, 0)
    texts = replace(data.texts, foretold_R=foretold_R.to(torch.uint8))
    train = Logged(Timed(texts, "naive", CLOCK, data.space))
    found = hybrid_verified_decoding(train)
    has_R = match_R > 0
    assert train.payoff(found.weights)[has_R].tolist() == pytest.approx(foretold_R[has_R].tolist(), abs=1e-3)


def test_a_step_of_the_search_never_loses_speed() -> None:
    train = Logged(timed(seed=16))
    start = max((Copying(k, 99, 1) for k in range(DEPTH + 1)), key=train.speed)
    others = [k for k in range(DEPTH + 1) if k != start.drafted]
    assert climbed(train, start, [one("drafted", others)]) == start
    assert climbed(train, replace(start, drafted=others[0]), [one("drafted", range(DEPTH + 1))]) == start


def test_a_suffix_automaton_copies_as_many_tokens_as_are_drafted() -> None:
    assert tensorrt_llm(Logged(timed(depth=1))) == Copying(1, 4, 1)


def test_a_drafter_of_which_nothing_was_ever_accepted() -> None:
    found = rivals(timed(depth=0), timed(seed=1, depth=0))
    assert set(found) == STATELESS | LEARNING
    assert all(each.speed > 0 for each in found.values())
