"""Features of token ids and of a drafter's hits: by definition, and however they are asked for."""

from __future__ import annotations

import random

import numpy as np
import pytest

from data_gen.features.root import DrafterKnowledge
from data_gen.models.sampling import Sampling
from selector.runtime.tokens import TokenStatistics
from selector.schema import DRAFTER, KEYS, LOG, TEXT, TOKEN_SCALARS
from tests.data_gen import by_definition

GREEDY = Sampling(0.0)
START = 7
BY_KEY = [*(scalar.name for scalar in TOKEN_SCALARS), "hit_accepted", "hit_copied", "hit_known"]


def text_of(seed: int, length: int = 120, vocabulary: int = 6) -> tuple[list[int], list[float]]:
    """Tokens that repeat themselves, and the drafter's hits on those after the prompt."""
    random_ = random.Random(seed)
    phrases = [[random_.randrange(vocabulary) for _ in range(random_.randrange(2, 7))] for _ in range(4)]
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += random_.choice(phrases)
    return tokens[:length], [float(random_.random() < 0.6) for _ in range(length - START)]


def knowledge(tokens: list[int], hits: list[float], end: int, step: int = 1) -> DrafterKnowledge:
    """Of the text up to a token, in steps of so many."""
    known = DrafterKnowledge(tokens[:START], GREEDY, TokenStatistics.empty(), batch=3)
    for at in range(START, end, step):
        known.committed(tokens[at : min(at + step, end)], hits[at - START : min(at + step, end) - START])
    return known


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("end", [START, START + 1, 40, 120])
def test_scalars_by_definition(seed: int, end: int) -> None:
    tokens, hits = text_of(seed, vocabulary=2 + 2 * seed)
    known = knowledge(tokens, hits, end)
    found = dict(zip(LOG.names, known.scalars(DRAFTER).tolist(), strict=True))
    assert sum(found.pop(name) for name in BY_KEY) == 0  # there are no statistics
    expected = by_definition.of_text(tokens[:end], START) | {"batch": 3, "temperature": 0.0, "top_p": 1.0}
    expected |= by_definition.of_hits(tokens[:end], START, hits[: end - START])
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_statistics_by_token_are_those_of_the_keys() -> None:
    tokens, hits = text_of(1)
    known = knowledge(tokens, hits, 80)
    keys_RJ, values_RK = np.stack([known.keys()] * 3), np.array([[1.0, 2.0], [3.0, 1.0], [0.0, 5.0]])
    known.tokens, _ = TokenStatistics.fit(keys_RJ, values_RK, np.arange(3))
    of_keys = known.tokens.of(known.keys()).astype(np.float32)
    found_F = known.scalars(DRAFTER)
    assert found_F[[LOG.index(name) for name in BY_KEY]].tolist() == of_keys.tolist()
    assert found_F[LOG.index("last_known")] == 3


@pytest.mark.parametrize("step", [2, 17])
def test_steps_of_any_size_give_the_same_numbers(step: int) -> None:
    tokens, hits = text_of(3, 700)
    one, other = (knowledge(tokens, hits, 700, each) for each in (1, step))
    for _ in range(2):  # asking changes nothing
        assert np.array_equal(one.scalars(DRAFTER), other.scalars(DRAFTER))
    assert np.array_equal(one.keys(), other.keys())
    assert other.scalars(TEXT).tolist() == other.scalars(DRAFTER)[: LOG.first].tolist()


def test_keys_are_those_of_equal_places() -> None:
    tokens, hits = [1, 2, 3, 1, 2, 3, 4, 2, 3], [1.0, 1.0]
    keys = {end: knowledge(tokens, hits, end).keys().tolist() for end in (7, 8, 9)}
    names = [*KEYS, "hit"]
    one, other = (dict(zip(names, keys[end], strict=True)) for end in (7, 9))
    assert len({value for own in keys.values() for value in own}) > 15
    assert one["last"] != other["last"]
    again = dict(zip(names, knowledge([9, 9, 9, 9, 9, 9, 9, 2, 3], hits, 9).keys().tolist(), strict=True))
    assert (again["last"], again["two"], again["hit"]) == (other["last"], other["two"], other["hit"])
    assert again["next"] != other["next"] and again["copy"] != other["copy"]


def test_keys_are_those_that_artefacts_hold() -> None:
    """A change of these would make the statistics of every artefact meaningless without an error."""
    assert knowledge([1, 2, 3, 1, 2, 3, 4, 2, 3], [1.0, 1.0], 9).keys().tolist() == [
        *(3698634717145261875, 2567005027096588903, 3316454189254552019),
        *(2787508183354919297, 6199581249243900810, 2049445783360526295),
    ]
