"""The rules of other projects: how their numbers are found, and what is replayed.

Legend: X texts, R roots, D depths.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from pipelines.logs.rivals import rivals, tuned_rivals
from pipelines.logs.rivals.adaptive import Adaptive, Bandit, Estimated
from pipelines.logs.rivals.copying import (
    Copying,
    Scored,
    best_rule,
    hybrid_verified_decoding,
    n_gram_first,
    payoff,
    sam_decoding,
    tensorrt_llm,
)
from pipelines.logs.rivals.rules import Rival, RivalTexts, climbed, grid
from selector.schema import LOG
from selector.train.data import Timed
from selector.train.replay import fastest_possible
from selector.train.tuning import LEASTS
from tests.pipelines.rival_texts import CLOCK, DEPTH, LONGEST, timed

LEARNING = {"SGLang adaptive", "vLLM acceptance estimator", "bandit"}  # rules that learn from their own steps
STATELESS = {
    "n-gram first",
    "SAM-Decoding",
    "TensorRT-LLM suffix automaton",
    "the lookup rule with all options",
    "ArcticInference",
    "HVD",
}


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
    for name, rule in tuned_rivals(RivalTexts(train)).items():
        assert found[name].seconds_X.tolist() == RivalTexts(test).replayed(rule).seconds_X.tolist(), name


@pytest.mark.parametrize("certain", [True, False])
def test_published_numbers_stay_and_the_rest_is_the_best(certain: bool) -> None:
    train = RivalTexts(timed(seed=12, certain=certain))
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
    train = RivalTexts(timed(seed=seed, certain=certain))
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
    train = RivalTexts(data)
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
    match_R, hits_R = (data.texts.scalars_RF[:, LOG.index(name)] for name in ("match", "hit_mean_0.8"))
    foretold_R = torch.where(match_R >= 8, 8, torch.where(match_R >= 3, 2, 0))
    right_RD = (hits_R > 0.6).unsqueeze(-1).expand(-1, DEPTH)
    texts = replace(data.texts, foretold_R=foretold_R.to(torch.uint8), survivals={"naive": right_RD.half()})
    train = RivalTexts(Timed(texts, "naive", CLOCK, data.space))
    found = best_rule(train, n_gram_first(train, [sam_decoding(train), tensorrt_llm(train)]))
    wanted = Copying(0, 3, 2, longer=8, far=8, hits=0.6, steady=DEPTH)
    assert train.speed(found) >= train.speed(wanted) * (1 - 1e-9)
    assert train.speed(found) > 1.05 * train.speed(n_gram_first(train, [sam_decoding(train)]))


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


def test_a_suffix_automaton_copies_as_many_tokens_as_are_drafted() -> None:
    assert tensorrt_llm(RivalTexts(timed(depth=1))) == Copying(1, 4, 1)


def test_a_drafter_of_which_nothing_was_ever_accepted() -> None:
    found = rivals(timed(depth=0), timed(seed=1, depth=0))
    assert set(found) == STATELESS | LEARNING
    assert all(each.speed > 0 for each in found.values())
