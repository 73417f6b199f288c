"""Features of token ids and of a drafter's hits: against searches of the whole text, and however they are asked for."""

from __future__ import annotations

import random

import numpy as np
import pytest

from data_gen.drafting.lookup import LookupIndex
from data_gen.features.root import DrafterKnowledge
from data_gen.models.sampling import Sampling
from selector.runtime.tokens import TokenStatistics
from selector.schema import DECAYS, DRAFTER, KEYS, LOG, LONGEST_COUNTED, LONGEST_LOOKUP, MOST_SEEN, TEXT

GREEDY = Sampling(0.0)
START = 7


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
    known = DrafterKnowledge(tokens[:START], GREEDY, TokenStatistics.empty())
    for at in range(START, end, step):
        known.committed(tokens[at : min(at + step, end)], hits[at - START : min(at + step, end) - START])
    return known


def named(known: DrafterKnowledge) -> dict[str, float]:
    return dict(zip(LOG.names, known.scalars(DRAFTER).tolist(), strict=True))


def proposals(tokens: list[int]) -> list[list[int]]:
    """What a lookup would copy after each token."""
    index, found = LookupIndex(), []
    for token in tokens:
        index.extend([token])
        found.append(index.proposal(LONGEST_LOOKUP))
    return found


def copied(tokens: list[int], source: int, count: int) -> list[int]:
    period = len(tokens) - 1 - source
    return [tokens[source + 1 + n % period] for n in range(count)]


def in_common(one: list[int], other: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def mean(values: list[float], decay: float) -> float:
    weights = [decay**age for age in range(len(values))][::-1]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights) if values else 0.0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("end", [START, START + 1, 40, 120])
def test_scalars_of_the_text_by_searching_all_of_it(seed: int, end: int) -> None:
    tokens, hits = text_of(seed)
    tokens = tokens[:end]
    found = named(knowledge([*tokens], hits, end))
    index, said, sources, matches = LookupIndex(), [], [], []
    for token in tokens:
        proposal = index.proposal(1)
        said.append(float(proposal == [token]))
        index.extend([token])
        sources.append(index.source)
        matches.append(index.match)
    assert (found["context_length"], found["match"]) == (end, matches[-1])
    new = [float(token not in tokens[:at]) for at, token in enumerate(tokens)]
    for decay in DECAYS:
        assert found[f"copied_mean_{decay:g}"] == pytest.approx(mean(said, decay))
        assert found[f"new_mean_{decay:g}"] == pytest.approx(mean(new, decay))
    run = in_common(said[::-1], [1.0] * end)
    assert found["copied"] == run
    source = sources[-1]
    if source < 0:
        assert found["source_foretold"] == found["second_agrees"] == found["source_in_prompt"] == 0
        return
    after = said[source + 1 : source + 1 + LONGEST_LOOKUP]
    assert found["source_foretold"] == in_common(after, [1.0] * len(after))
    for count in (1, 2, 4, 8, 16):
        some = said[source + 1 : source + 1 + count]
        assert found[f"source_copied_{count}"] == pytest.approx(sum(some) / len(some))
    assert found["source_in_prompt"] == float(source < START - 1)
    proposal, second = copied(tokens, source, LONGEST_LOOKUP), sources[source]
    if second < 0:
        assert found["second_match"] == found["second_agrees"] == 0
        return
    assert found["second_match"] == min(32, in_common(tokens[second::-1], tokens[::-1]))
    agrees = in_common(proposal, copied(tokens, second, LONGEST_LOOKUP))
    assert found["second_agrees"] == agrees
    third = sources[second]
    further = in_common(proposal, copied(tokens, third, LONGEST_LOOKUP)) if third >= 0 else 0
    assert found["third_agrees"] == min(agrees, further)


@pytest.mark.parametrize("seed", range(6))
def test_lookups_are_judged_by_those_with_a_match_like_theirs(seed: int) -> None:
    tokens, hits = text_of(seed)
    found = named(knowledge(tokens, hits, len(tokens)))
    made = proposals(tokens)
    index, matches = LookupIndex(), []
    for token in tokens:
        index.extend([token])
        matches.append(index.match)

    def like(match: int) -> int:
        return sum(match >= least for least in (1, 2, 3, 4, 7, 12, 24))

    alike = [at for at, match in enumerate(matches[:-1]) if match and like(match) == like(matches[-1])]
    usual = found["copied_mean_0.99"]
    began = [float(made[at][0] == tokens[at + 1]) for at in alike]
    judged = [at for at in alike if at + LONGEST_COUNTED < len(tokens)]
    lengths = [
        in_common(made[at][:LONGEST_COUNTED], tokens[at + 1 : at + 1 + LONGEST_COUNTED]) / LONGEST_COUNTED
        for at in judged
    ]
    for name, values in (("right_by_match", began), ("length_by_match", lengths)):
        weight = sum(0.95**age for age in range(len(values)))
        total = mean(values, 0.95) * weight if values else 0.0
        assert found[name] == pytest.approx((total + 2 * usual) / (weight + 2))


@pytest.mark.parametrize("seed", range(6))
def test_scalars_of_the_hits_by_searching_all_of_them(seed: int) -> None:
    tokens, hits = text_of(seed)
    known = knowledge(tokens, hits, len(tokens))
    found = named(known)
    for decay in DECAYS:
        assert found[f"hit_mean_{decay:g}"] == pytest.approx(mean(hits, decay))
    usual = found["hit_mean_0.99"]
    assert found["hits"] == in_common(hits[::-1], [1.0] * 32)
    for count in (1, 2, 3, 4):
        end = tokens[len(tokens) - count :]
        after = [hit for at, hit in enumerate(hits, START) if at >= count and tokens[at - count : at] == end]
        assert found[f"hit_after_{count}"] == pytest.approx((sum(after) + 2 * usual) / (len(after) + 2))
        if count == 1:
            assert found["seen_after"] == min(MOST_SEEN, len(after))
    source = known.text.index.source
    if source >= START:
        after = hits[source + 1 - START : source + 1 - START + 8]
        assert found["source_hit_8"] == pytest.approx(sum(after) / len(after))
        assert found["source_hits"] == in_common(hits[source + 1 - START :], [1.0] * LONGEST_LOOKUP)
    said = known.text.foretold_N[START:]
    for name, of in (("hits_of_copied", 1), ("hits_of_others", 0)):
        own = [hit for hit, foretold in zip(hits, said, strict=True) if foretold == of]
        weight = sum(0.95**age for age in range(len(own)))
        assert found[name] == pytest.approx((mean(own, 0.95) * weight + 2 * usual) / (weight + 2))


@pytest.mark.parametrize("step", [2, 5, 17])
def test_steps_of_any_size_give_the_same_numbers(step: int) -> None:
    tokens, hits = text_of(3, 1400)  # tables grow on the way
    for end in (60, 700, 1400):
        one, other = (knowledge(tokens, hits, end, each) for each in (1, step))
        assert np.array_equal(one.scalars(DRAFTER), other.scalars(DRAFTER))
        again = one.scalars(DRAFTER)
        assert np.array_equal(again, other.scalars(DRAFTER)), "asking changes nothing"
        assert np.array_equal(one.keys(), other.keys())


def test_nothing_that_comes_later_is_seen() -> None:
    tokens, hits = text_of(5)
    other = [*tokens[:60], *reversed(tokens[60:])]
    assert np.array_equal(knowledge(tokens, hits, 60).scalars(DRAFTER), knowledge(other, hits, 60).scalars(DRAFTER))


def test_token_ids_alone_are_the_beginning_of_what_the_drafter_level_holds() -> None:
    tokens, hits = text_of(2)
    known = knowledge(tokens, hits, 80)
    assert known.scalars(TEXT).tolist() == known.scalars(DRAFTER)[: LOG.first].tolist()


def test_what_the_network_sees_is_bounded_however_long_the_text() -> None:
    known = DrafterKnowledge([1, 2], GREEDY, TokenStatistics.empty())
    known.committed([3] * 4000, [1.0] * 4000)
    seen = [value for name, value in named(known).items() if name not in ("context_length", "batch")]
    assert max(seen) <= 32


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
