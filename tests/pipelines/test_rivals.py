"""The rules of other projects against walks in plain Python.

Legend: X texts, R roots, D depths.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import fields, replace

import pytest
import torch

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
    hybrid_verified_decoding,
    n_gram_first,
    rivals,
    sam_decoding,
    suffix_score,
    tensorrt_llm,
    tuned_rivals,
)
from selector.actions import ActionSpace, Lookup
from selector.data import Texts, Timed
from selector.latency import LatencyProfile
from selector.replay import Replayed, fastest_possible
from selector.schema import LEVELS, LOG
from selector.tables import FREE, Table

DEPTH, LONGEST = 5, 8
SPACE = ActionSpace.chains(DEPTH, LONGEST)
SEQUENTIAL = {"SGLang adaptive", "vLLM acceptance estimator", "bandit"}
NAMES = {
    "n-gram first",
    "SAM-Decoding",
    "TensorRT-LLM suffix automaton",
    "the rule at its best",
    "ArcticInference",
    "HVD",
    *SEQUENTIAL,
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
Chooser = Callable[[int], Iterator[int]]  # of a text: what it drafts, told at each step its root and what was accepted


def timed(seed: int = 0, texts: int = 6, roots: int = 80, certain: bool = True, depth: int = DEPTH) -> Timed:
    """Texts that repeat themselves where the match is long, of which some are easier for the drafter than others."""
    generator = torch.Generator().manual_seed(seed)
    R = texts * roots

    def drawn(*shape: int) -> torch.Tensor:
        return torch.rand(*shape, generator=generator)

    match_R = (13 * drawn(R) ** 2).floor()
    foretold_R = (match_R * 2 * drawn(R)).floor().clamp(max=LONGEST) * (match_R > 0)
    easy_R = (0.3 + 0.6 * drawn(texts)).repeat_interleave(roots)
    rate_RD = easy_R.unsqueeze(-1).expand(R, depth)
    survivals_RD = (drawn(R, depth) < rate_RD).float().cumprod(-1) if certain else rate_RD.cumprod(-1)
    scalars_RF = drawn(R, len(LOG.scalars))
    known = {
        "match": match_R,
        "second_match": (match_R - (4 * drawn(R)).floor() + 1).clamp(min=0),
        "hit_mean_0.8": (easy_R + 0.4 * (drawn(R) - 0.5)).clamp(0, 1),
    }
    for name, values_R in known.items():
        scalars_RF[:, LOG.names.index(name)] = values_R
    data = Texts(
        settings=[(0.0, 1.0)],
        size_X=torch.full((texts,), roots),
        setting_X=torch.zeros(texts, dtype=torch.int64),
        kind_X=["prose"] * texts,
        source_X=[f"source {x}" for x in range(texts)],
        prompt_X=[f"prompt {x}" for x in range(texts)],
        scalars_RF=scalars_RF,
        length_R=20 + torch.arange(R) % roots,
        survivals={"naive": survivals_RD.half()},
        foretold_R=foretold_R.to(torch.uint8),
        from_the_start=True,
    )
    return Timed(data, "naive", CLOCK, ActionSpace.chains(depth, LONGEST))


def scalars_at(data: Timed, row: int) -> dict[str, float]:
    return dict(zip(LOG.names, data.texts.scalars_RF[row].tolist(), strict=True))


def seconds_at(data: Timed, row: int, action: int) -> float:
    return CLOCK.action_seconds(SPACE.actions[action], float(data.texts.length_R[row]), "naive")


def law_at(data: Timed, row: int, action: int) -> list[float]:
    """P(accepted = 0, 1, ..) there."""
    choice = SPACE.actions[action]
    begin = DEPTH if isinstance(choice, Lookup) else 0
    reached = [1.0, *data.survivals_RS[row, begin : begin + choice.nodes].tolist(), 0.0]
    return [a - b for a, b in zip(reached, reached[1:], strict=False)]


def expected(data: Timed, choose: Callable[[int], int]) -> list[tuple[float, float]]:
    """Seconds and steps of each text, of a rule that looks at the root alone."""
    result, begin = [], 0
    for size in data.texts.size_X.tolist():
        begins = [1.0] + [0.0] * (size + LONGEST + 1)
        seconds = steps = 0.0
        for n in range(size):
            action = choose(begin + n)
            seconds += begins[n] * seconds_at(data, begin + n, action)
            steps += begins[n]
            for accepted, chance in enumerate(law_at(data, begin + n, action)):
                begins[n + 1 + accepted] += begins[n] * chance
        result.append((seconds, steps))
        begin += size
    return result


def walked(data: Timed, chooser: Callable[[Timed], Iterator[int]]) -> list[tuple[float, float]]:
    """The same of a rule that learns from its steps: it gets each root and sends a length, then gets what was accepted.

    Args:
        chooser: begun anew for each text; sent a root it yields a length, sent the accepted tokens it yields nothing.
    """
    result, begin = [], 0
    for size in data.texts.size_X.tolist():
        rule = chooser(data)
        next(rule)
        n, seconds, steps = 0, 0.0, 0
        while n < size:
            length = rule.send(begin + n)  # type: ignore[attr-defined]
            accepted = int(min(length, data.survivals_RS[begin + n, :DEPTH].sum().item()))
            rule.send(accepted)  # type: ignore[attr-defined]
            seconds += seconds_at(data, begin + n, length)
            steps += 1
            n += 1 + accepted
        result.append((seconds, steps))
        begin += size
    return result


def assert_same(found: Replayed, wanted: list[tuple[float, float]], data: Timed) -> None:
    seconds, steps = zip(*wanted, strict=True)
    assert found.tokens_X.tolist() == pytest.approx(data.texts.size_X.tolist(), rel=1e-6)
    assert found.seconds_X.tolist() == pytest.approx(list(seconds), rel=1e-6)
    assert found.steps_X.tolist() == pytest.approx(list(steps), rel=1e-6)


def plain_copying(rule: Copying, data: Timed) -> Callable[[int], int]:
    def choose(row: int) -> int:
        known = scalars_at(data, row)
        if known["match"] >= rule.longer:
            return SPACE.index(Lookup(min(rule.far, LONGEST)))
        if known["match"] >= rule.least:
            return SPACE.index(Lookup(min(rule.copied, LONGEST)))
        return SPACE.index(SPACE.chain(rule.steady if known["hit_mean_0.8"] > rule.hits else rule.drafted))

    return choose


def plain_scored(rule: Scored, data: Timed) -> Callable[[int], int]:
    def choose(row: int) -> int:
        known = scalars_at(data, row)
        match, share = int(known["match"]), 0.0
        if match > 0:
            share = 1.0 if known["second_match"] < match else known[f"agree_{min(match, 4)}"]
        score, chance, length = 0.0, share, 0
        while length < min(match, LONGEST) and chance >= 0.1:
            score, length, chance = score + chance, length + 1, chance * share
        if length and score >= rule.drafted:
            return SPACE.index(Lookup(length))
        return SPACE.index(SPACE.chain(rule.drafted))

    return choose


def plain_payoff(rule: Payoff, data: Timed) -> Callable[[int], int]:
    def choose(row: int) -> int:
        known = scalars_at(data, row)
        values = [1.0, *(known[name] for name in PAYOFF_SCALARS)]
        payoff = math.fsum(weight * value for weight, value in zip(rule.weights, values, strict=True))
        if known["match"] and payoff >= rule.least:
            return SPACE.index(Lookup(rule.copied))
        return SPACE.index(SPACE.chain(rule.drafted))

    return choose


def plain_adaptive(rule: Adaptive) -> Callable[[Timed], Iterator[int]]:
    """SGLang's, in words: after the warm-up and then at every interval, go down while the average is at most half a token
    (and the slack) below the next smaller length; where it did not go down, go up while it exceeds the length less half
    a token. From no drafting it always goes up by one."""

    def walk(data: Timed) -> Iterator[int]:
        at, mean, count = rule.start, rule.candidates[rule.start] - 1.0, 0
        yield -1
        while True:
            length = rule.candidates[at]
            yield -1  # the root tells nothing
            accepted = yield length
            count += 1
            if length:
                mean = (1 - rule.weight) * mean + rule.weight * accepted
            if count > rule.warm_up and (count - rule.warm_up) % rule.interval == 0:
                at, mean = moved(at, mean)

    def moved(at: int, mean: float) -> tuple[int, float]:
        lengths = rule.candidates
        if lengths[at] == 0:
            up = min(at + 1, len(lengths) - 1)
            return up, lengths[up] - 1.0 if lengths[up] and mean < 0 else mean
        down = at
        while down > 0 and mean <= (0.5 if lengths[down - 1] == 0 else lengths[down - 1] - 0.5) + rule.slack:
            down -= 1
        if down < at:
            return down, mean
        while at + 1 < len(lengths) and mean > lengths[at] - 0.5:
            at += 1
        return at, mean

    return reordered(walk)


def plain_estimated(rule: Estimated) -> Callable[[Timed], Iterator[int]]:
    def walk(data: Timed) -> Iterator[int]:
        rates, count = list(rule.rates), 0
        yield -1
        row = yield -1
        while True:
            count += 1
            goodput = []
            for k in range(DEPTH + 1):
                tokens = 1 + sum(math.prod(rates[:d]) for d in range(1, k + 1))
                goodput.append(tokens / seconds_at(data, row, k))
            length = goodput.index(max(goodput))
            if rule.probe and count % rule.probe == 0:
                length = min(length + 1, DEPTH)
            accepted = yield length
            for d in range(length):
                if d <= accepted:
                    rates[d] = (1 - rule.weight) * rates[d] + rule.weight * (d < accepted)
            row = yield -1

    return walk


def plain_bandit(rule: Bandit) -> Callable[[Timed], Iterator[int]]:
    def walk(data: Timed) -> Iterator[int]:
        rewards: dict[int, list[float]] = {arm: [] for arm in rule.arms}
        yield -1
        row = yield -1
        while True:
            count = sum(map(len, rewards.values()))
            untried = [arm for arm, own in rewards.items() if not own]
            scores = {
                arm: sum(own) / len(own) + math.sqrt(rule.weight * math.log(count) / len(own))
                for arm, own in rewards.items()
                if own
            }
            length = untried[0] if untried else max(scores, key=scores.__getitem__)
            accepted = yield length
            most = max((arm + 1) / seconds_at(data, row, arm) for arm in rule.arms)
            rewards[length].append((accepted + 1) / seconds_at(data, row, length) / most)
            row = yield -1

    return walk
