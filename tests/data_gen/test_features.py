"""What a selector may know at a root: the same while decoding and along the finished text; and each part by itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from data_gen.decoding.decoder import Decoder
from data_gen.decoding.loop import Decoded, Features, FixedTree, Random
from data_gen.drafting.lookup import LookupIndex
from data_gen.features.recorded import ROW_NUMBERS, row_numbers, scalars_along
from data_gen.features.root import Accepted, RootKnowledge
from data_gen.features.rows import LEAST_LOGIT, DraftHistory, TargetHistory, entropies
from data_gen.features.text import TextHistory
from data_gen.models.pair import ModelPair, ModelRow, ModelRows
from data_gen.models.sampling import Sampling
from data_gen.texts.recorded import texts_of
from data_gen.texts.written import Text, finished, rows_along
from data_gen.verification import get_verifier
from selector.actions import EMPTY, Action, Choice, Lookup
from selector.schema import (
    DECAYS,
    DRAFT_SCALARS,
    EARLY,
    FEATURES,
    FULL,
    HIDDEN_STATES,
    LIGHT,
    LONGEST_LOOKUP,
    LONGEST_MATCH,
    MOST_SEEN,
    PAIR,
    SCALARS_KEY,
    TEXT_SCALARS,
)
from tests.data_gen.test_lookup import longest_match, proposed

PROMPT = [5, 17, 203, 44, 91]
SAMPLINGS = [
    Sampling(0.0),
    Sampling(0.2),
    Sampling(1.0),
    Sampling(1.0, 0.9),
    Sampling(0.7, draft_temperature=1.3),
    Sampling(0.2, draft_temperature=0.0),
]
MIXED = [
    *(EMPTY, Action(1, 1, 0), Action(1, 4, 0), Action(1, 8, 2)),
    *(Action(3, 1, 3), Action(4, 0, 2), Action(2, 2, 1), Lookup(4)),
]


def count_of(level: str) -> int:
    """How many scalars are known at a level."""
    return PAIR.first if level == EARLY else len(PAIR.names)


class Recorder:
    """A chooser that keeps the features it is given."""

    def __init__(self, actions: list[Choice], level: str) -> None:
        self.own = Random(actions, torch.Generator().manual_seed(1))
        self.feature_levels = (level,)
        self.seen: list[Features | None] = []

    def select(self, features: Features | None) -> Choice:
        self.seen.append(features)
        return self.own.select(features)


def decoded(
    pair: ModelPair,
    sampling: Sampling,
    actions: list[Choice],
    level: str = FULL,
    prompt: list[int] = PROMPT,
    seed: int = 0,
) -> tuple[Decoded, list[Features | None]]:
    recorder = Recorder(actions, level)
    decoder = Decoder(pair, sampling, get_verifier("lifted_uniform"), recorder)
    return decoder.decode(prompt, 60, torch.Generator().manual_seed(seed)), recorder.seen


def recorded(pairs: Sequence[tuple[ModelRows, ModelRows]], text: Text, roots: int) -> dict[str, np.ndarray]:
    """The numbers of the first roots, as a trace holds them."""
    numbers: dict[str, list[float]] = {name: [] for name in ROW_NUMBERS}
    for target, draft in pairs:
        begin = text.start + len(numbers["target_entropy"]) + 1
        following = text.tokens[begin : begin + len(target.probs_NV)]
        for name, values in row_numbers(target, draft, following).items():
            numbers[name] += values
    return {name: np.array(values[:roots], np.float32) for name, values in numbers.items()}


def replayed(pair: ModelPair, text: Text, sampling: Sampling) -> tuple[Tensor, ModelRows, ModelRows]:
    """The scalars of all roots, and both models' rows."""
    (block,) = rows_along(pair, text, sampling)
    roots = len(text.tokens) - text.start
    rows = block.target, block.draft
    scalars_RF = scalars_along(text.tokens, text.start, sampling, recorded([rows], text, roots))
    assert scalars_RF.shape == (roots, len(PAIR.names))
    return torch.from_numpy(scalars_RF), *rows


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize(
    "actions",
    [MIXED, [EMPTY], [Action(1, 2, 0)], [Action(4, 0, 3)], [Action(1, 8, 8), EMPTY], [Lookup(8)]],
    ids=["mixed", "empty", "chain", "branches", "long or empty", "lookups"],
)
def test_a_decoder_knows_what_the_text_tells(pair: ModelPair, actions: list[Choice], sampling: Sampling) -> None:
    """At every root of every step: after full acceptance, where the draft lacks the newest tokens; after rejections;
    after steps in which nothing was drafted; after branches, of which the one accepted may be any."""
    result, seen = decoded(pair, sampling, actions)
    text = finished(pair, PROMPT, result.tokens)
    scalars_RF, target, draft = replayed(pair, text, sampling)
    assert len(seen) == len(result.steps)
    assert seen[0] is None
    assert scalars_RF[0].tolist() == [0] * len(PAIR.names)
    for step, features in zip(result.steps[1:], seen[1:], strict=True):
        assert features is not None
        assert set(features) == {SCALARS_KEY, *HIDDEN_STATES}
        n = step.length - 1 - text.start
        assert torch.allclose(features[SCALARS_KEY], scalars_RF[n], atol=2e-3, rtol=1e-4), n
        expected = target.hidden_ND[n - 1], draft.hidden_ND[n - 1], draft.hidden_ND[n]
        for name, state_D in zip(HIDDEN_STATES, expected, strict=True):
            assert torch.allclose(features[name], state_D, atol=2e-4), (n, name)


def test_the_cases_above_are_all_there(pair: ModelPair) -> None:
    """Chains and branches that are accepted whole, in part, and not at all; and no draft."""
    result, _ = decoded(pair, Sampling(0.7, draft_temperature=1.3), MIXED, seed=2)
    found = {
        (step.action.K > 1, step.accepted == step.action.L1 + step.action.L2)
        for step in result.steps
        if isinstance(step.action, Action)
    }
    assert found == {(False, False), (False, True), (True, False), (True, True)}
    assert any(step.action == EMPTY for step in result.steps)
    assert any(step.accepted == 0 for step in result.steps if isinstance(step.action, Action) and step.action.K > 1)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_light_features_are_the_scalars_alone(pair: ModelPair, sampling: Sampling) -> None:
    (full, of_full), *others = (decoded(pair, sampling, MIXED, level) for level in (FULL, LIGHT, EARLY))
    for level, (result, found) in zip((LIGHT, EARLY), others, strict=True):
        assert full.tokens == result.tokens
        for whole, scalars in zip(of_full[1:], found[1:], strict=True):
            assert set(scalars) == {SCALARS_KEY}
            assert torch.equal(scalars[SCALARS_KEY], whole[SCALARS_KEY][: count_of(level)])
            assert scalars[SCALARS_KEY].dtype == torch.float32


@pytest.mark.parametrize("level", FEATURES)
def test_a_prompt_of_one_token_has_no_features_at_first(pair: ModelPair, level: str) -> None:
    result, seen = decoded(pair, Sampling(), MIXED, level, prompt=[9])
    scalars_RF, _, _ = replayed(pair, finished(pair, [9], result.tokens), Sampling())
    assert seen[0] is None
    for step, features in zip(result.steps[1:], seen[1:], strict=True):
        if step.length <= len(scalars_RF):
            known_F = scalars_RF[step.length - 1, : count_of(level)]
            assert torch.allclose(features[SCALARS_KEY], known_F, atol=2e-3, rtol=1e-4)


def test_a_short_text_is_known_as_far_as_it_goes(pair: ModelPair) -> None:
    """The features at a root do not depend on what comes after it, nor on how the rows were cut into blocks."""
    result, _ = decoded(pair, Sampling(), [Action(1, 4, 0)])
    text = finished(pair, PROMPT, result.tokens)
    whole_RF, target, draft = replayed(pair, text, Sampling())
    short = Text(text.tokens[: text.start + 12], text.start)
    assert torch.allclose(replayed(pair, short, Sampling())[0], whole_RF[:12], atol=1e-3)
    blocks = [
        tuple(ModelRows(*(rows[begin : begin + 7] for rows in model)) for model in (target, draft))
        for begin in range(0, len(target.probs_NV), 7)
    ]
    numbers = recorded(blocks, text, len(whole_RF))
    assert np.array_equal(scalars_along(text.tokens, text.start, Sampling(), numbers), whole_RF)


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
@pytest.mark.parametrize("together", [1, 5], ids=["one by one", "five at once"])
def test_features_from_a_trace_are_those_of_a_decoder_bit_by_bit(
    pair: ModelPair, sampling: Sampling, together: int
) -> None:
    """Of the same rows, at every root whose step committed so many tokens."""
    result, _ = decoded(pair, sampling, [Action(1, 4, 0)])
    text = finished(pair, PROMPT, result.tokens)
    scalars_RF, target, draft = replayed(pair, text, sampling)
    known = RootKnowledge(PROMPT, sampling, (LIGHT,))
    known.passed([ModelRow(*(rows[0] for rows in draft))])
    compared = 0
    for begin in range(0, len(scalars_RF) - together, together):
        nodes = range(begin, begin + together)
        known.committed(Accepted(target, nodes), text.tokens[text.start + 1 :][nodes.start : nodes.stop])
        known.passed([ModelRow(*(rows[n + 1] for rows in draft)) for n in nodes])
        features = known.features(LIGHT)
        assert features is not None
        assert features[SCALARS_KEY].tolist() == scalars_RF[nodes.stop].tolist()
        compared += 1
    assert compared >= 50 // together


def test_a_scalar_that_is_not_finite_is_named() -> None:
    numbers = {name: [[0.5, 0.5]] for name in ROW_NUMBERS} | {"target_prob": [[0.0, 0.5]], "draft_prob": [[0.0, 0.5]]}
    row = {"tokens": [[5, 6, 7]], "start": [0], "temperature": [1.0], "top_p": [1.0], **numbers}
    with pytest.raises(ValueError, match=r"not finite: accepted_mean_0\.5, accepted_mean_0\.8"):
        texts_of(pa.table(row), [])


def common(one: list[int], other: list[int]) -> int:
    """How many elements two lists have in common, from the first on."""
    pairs = list(zip(one, other, strict=False))
    return next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))


def copied_from(known: list[int], source: int) -> list[int]:
    """A lookup from a place, which may run on into what it has copied itself."""
    whole = list(known)
    for n in range(LONGEST_LOOKUP if source >= 0 else 0):
        whole.append(whole[source + 1 + n])
    return whole[len(known) :]


def like(match: int) -> int:
    """Which lengths of matches count as alike."""
    return next(number for number, most in enumerate((0, 1, 2, 3, 6, 11, 23, math.inf)) if match <= most)


def faded(values: list[float]) -> tuple[float, float]:
    """Their sum and the sum of their weights: each is 0.95 of the next one's."""
    weights = [0.95**age for age in range(len(values))][::-1]
    return sum(w * v for w, v in zip(weights, values, strict=True)), sum(weights)


def text_by_hand(known: list[int], prompt: int) -> dict[str, float]:
    """What token ids alone say, by searching the text at every one of its tokens.

    Args:
        known: the text up to the root.
        prompt: tokens of the prompt.
    """
    foretold = [float(proposed(known[:n], 1) == known[n : n + 1]) for n in range(len(known))]
    new = [float(token not in known[:n]) for n, token in enumerate(known)]
    sources = [LookupIndex(known[: n + 1]).source for n in range(len(known))]
    matches = [longest_match(known[: n + 1]) for n in range(len(known))]
    source, match = sources[-1], matches[-1]
    copied, there = copied_from(known, source), foretold[source + 1 :] if source >= 0 else []
    second = sources[source] if source >= 0 else -1
    third = sources[second] if second >= 0 else -1
    agrees = common(copied, copied_from(known, second))
    moved = [now == before + 1 and before >= 0 for before, now in pairwise(sources)]
    result = {
        "context_length": len(known),
        "match": min(match, LONGEST_MATCH),
        "copied": min([*foretold[::-1], 0.0].index(0.0), LONGEST_MATCH),
        "source_steady": min([*moved[::-1], False].index(False), LONGEST_MATCH),
        "source_in_prompt": float(0 <= source < prompt - 1),
        "source_foretold": min([*there, 0.0].index(0.0), LONGEST_LOOKUP),
        "second_match": min(common(known[::-1], known[: second + 1][::-1]), LONGEST_MATCH),
        "second_agrees": agrees,
        "third_agrees": min(agrees, common(copied, copied_from(known, third))),
    }
    for count in (1, 2, 4, 8, 16):
        result[f"source_copied_{count}"] = sum(there[:count]) / len(there[:count]) if there else 0.0
    for count in (1, 2, 3, 4):
        places = [i for i in range(count, len(known)) if known[i - count : i] == known[-count:]]
        result[f"seen_{count}"] = min(len(places), MOST_SEEN) if copied else 0
        result[f"agree_{count}"] = sum(known[i] == copied[0] for i in places) / len(places) if copied and places else 0
    for decay in DECAYS:
        weights = [decay**age for age in range(len(known))][::-1]
        for name, values in (("copied", foretold), ("new", new)):
            mean = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
            result[f"{name}_mean_{decay:g}"] = mean
    usual = result[f"copied_mean_{DECAYS[-1]:g}"]  # of which as much is put in as of two lookups
    alike = [n for n, own in enumerate(matches) if own and like(own) == like(match)]
    began = [foretold[n + 1] for n in alike if n + 1 < len(known)]
    lengths = [
        common(copied_from(known[: n + 1], sources[n])[:8], known[n + 1 : n + 9]) / 8
        for n in alike
        if n + 8 < len(known)
    ]
    for name, values in (("right_by_match", began), ("length_by_match", lengths)):
        total, weight = faded(values)
        result[name] = (total + 2 * usual) / (weight + 2)
    return result


def source_by_hand(known: list[int], start: int, entropies_N: list[float], usual: float) -> dict[str, float]:
    """What the target's rows say of the place that a lookup would copy from.

    Args:
        known: the text up to the root.
        start: the last prompt token's position.
        entropies_N: of the target before each token after it.
        usual: entropy where none is known.
    """
    source = LookupIndex(known).source
    ats = [source + 1 + i % (len(known) - 1 - source) - start - 1 for i in range(16)] if source >= 0 else []
    result = {"source_known": sum(at >= 0 for at in ats) / 16}
    for count in (1, 2, 4, 8, 16):
        there = [entropies_N[at] for at in ats[:count] if at >= 0]
        result[f"source_entropy_{count}"] = sum(there) / len(there) if there else usual
    return result


def by_hand(text: Text, target: ModelRows, draft: ModelRows, sampling: Sampling, n: int) -> dict[str, float]:
    """The scalars at root n of a text, from their meanings in the schema."""
    tokens = text.tokens[text.start :]
    p_NV, q_NV = sampling.probabilities(target.logits_NV), sampling.draft.probabilities(draft.logits_NV)
    accepted = [min(1.0, float(q_NV[i, tokens[i + 1]] / p_NV[i, tokens[i + 1]])) for i in range(n)]
    plain = [
        [float(-(row * row.log()).nansum()) for row in model.logits_NV[: n + 1].double().softmax(-1)]
        for model in (target, draft)
    ]
    known = text.tokens[: text.start + n + 1]
    agreed = next((i for i, share in enumerate(accepted[::-1]) if share < 1), n)
    result = {
        **text_by_hand(known, text.start + 1),
        **source_by_hand(
            known,
            text.start,
            plain[0],
            sum(0.8**i * e for i, e in enumerate(plain[0][:n][::-1])) / sum(0.8**i for i in range(n)),
        ),
        "target_entropy_prev": plain[0][n - 1],
        "draft_entropy_prev": plain[1][n - 1],
        "draft_entropy_root": plain[1][n],
        "agreed": min(agreed, LONGEST_MATCH),
        "batch": 1,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
    }
    for decay in DECAYS:
        weights = [decay ** (n - 1 - i) for i in range(n)]
        means = ("accepted", accepted), ("draft_entropy", plain[1]), ("target_entropy", plain[0])
        for name, values in means:
            mean = sum(w * v for w, v in zip(weights, values, strict=False)) / sum(weights)
            result[f"{name}_mean_{decay:g}"] = mean
    return result


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=str)
def test_scalars_are_what_the_schema_says(pair: ModelPair, sampling: Sampling) -> None:
    result, _ = decoded(pair, sampling, [Action(1, 4, 0)])
    text = finished(pair, PROMPT, result.tokens)
    scalars_RF, target, draft = replayed(pair, text, sampling)
    for n in (1, 2, 7, 30, len(scalars_RF) - 1):
        expected = by_hand(text, target, draft, sampling, n)
        assert set(expected) == set(PAIR.names)
        found = dict(zip(PAIR.names, scalars_RF[n].tolist(), strict=True))
        assert found == pytest.approx(expected, abs=1e-4, rel=1e-5), n


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_entropies_are_those_of_the_distributions(dtype: torch.dtype) -> None:
    """Against `-sum p log p` in double precision, with masked tokens, whole and nearly certain rows."""
    logits_NV = 4 * torch.randn(7, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    logits_NV[1, ::2] = -torch.inf
    logits_NV[2, 1:] = -torch.inf  # certain
    logits_NV[3] = 0.0  # uniform
    logits_NV[4, 7] = 500.0
    logits_NV[5] += 1e3  # only differences count
    logits_NV = logits_NV.to(dtype)
    found = entropies(logits_NV)
    for row, entropy in zip(logits_NV.double(), found, strict=True):
        p_V = row.softmax(-1)
        p_V = p_V[p_V > 0]
        assert entropy == pytest.approx(float(-(p_V * p_V.log()).sum()), abs=2e-5)
    assert found[2] == pytest.approx(0, abs=1e-6)
    assert found[3] == pytest.approx(math.log(50), abs=1e-5)
    assert all(math.isfinite(entropy) for entropy in found)
    assert LEAST_LOGIT < -1e3


def test_row_numbers_are_those_of_the_next_tokens() -> None:
    """The last row's next token need not be known."""
    p_NV = torch.tensor([[0.5, 0.5, 0.0], [0.2, 0.8, 0.0], [0.9, 0.1, 0.0]])
    q_NV = torch.tensor([[0.4, 0.6, 0.0], [0.4, 0.3, 0.3], [0.0, 0.5, 0.5]])
    target, draft = (ModelRows(probs_NV, probs_NV.log(), probs_NV) for probs_NV in (p_NV, q_NV))
    found = row_numbers(target, draft, [0, 1])
    assert found["target_prob"] == pytest.approx([0.5, 0.8]) and found["draft_prob"] == pytest.approx([0.4, 0.3])
    entropy = {name: [float(-torch.xlogy(row, row).sum()) for row in rows] for name, rows in (("p", p_NV), ("q", q_NV))}
    assert found["target_entropy"] == pytest.approx(entropy["p"], abs=1e-6)
    assert found["draft_entropy"] == pytest.approx(entropy["q"], abs=1e-6)


HISTORY = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from([0.0, 0.25, 0.999, 1.0]), st.floats(0, 6), st.floats(0, 6)),
    min_size=1,
    max_size=60,
)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(HISTORY, st.lists(st.integers(0, 2), min_size=1, max_size=6), st.integers(1, 9))
def test_running_means_are_weighted_sums(
    known: list[tuple[int, float, float, float]], prompt: list[int], at_once: int
) -> None:
    """Against the sums written out, whether tokens come one by one or many at once."""
    text, of_draft = TextHistory(prompt), DraftHistory()
    of_target = TargetHistory(text)
    for begin in range(0, len(known), at_once):
        tokens, accepted, draft_entropies, target_entropies = map(
            list, zip(*known[begin : begin + at_once], strict=True)
        )
        text.add(tokens)
        of_target.add(target_entropies)
        of_draft.add([1.0] * len(accepted), accepted, draft_entropies)
    of_draft.add([], [], [2.5])
    parts = of_target.scalars(Sampling(0.5, 0.75), batch=6), of_draft.scalars()
    found = dict(zip(PAIR.names, np.concatenate(parts, axis=1)[0], strict=True))
    tokens, accepted, of_draft_, of_target_ = map(list, zip(*known, strict=True))
    ages = range(len(known) - 1, -1, -1)
    for decay in DECAYS:
        weights = [decay**age for age in ages]
        for name, values in (("accepted", accepted), ("draft_entropy", of_draft_), ("target_entropy", of_target_)):
            mean = sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)
            assert found[f"{name}_mean_{decay:g}"] == pytest.approx(mean, abs=1e-5, rel=1e-5)
    agreed = next((i for i, share in enumerate(accepted[::-1]) if share < 1), len(known))
    assert found["agreed"] == min(agreed, LONGEST_MATCH)
    whole, usual = [*prompt, *tokens], found["target_entropy_mean_0.8"]
    expected = {
        **text_by_hand(whole, len(prompt)),
        **source_by_hand(whole, len(prompt) - 1, of_target_, usual),
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected, abs=1e-9)
    assert found["draft_entropy_prev"] == of_draft_[-1]
    given_as_they_are = ("target_entropy_prev", "draft_entropy_root", "batch", "temperature", "top_p")
    assert [found[name] for name in given_as_they_are] == [of_target_[-1], 2.5, 6, 0.5, 0.75]


def test_long_runs_and_matches_count_as_the_longest() -> None:
    text, of_draft = TextHistory([3, 3]), DraftHistory()

    def found() -> dict[str, float]:
        names = [scalar.name for scalar in (*TEXT_SCALARS, *DRAFT_SCALARS)]
        return dict(zip(names, [*text.scalars(Sampling())[0], *of_draft.scalars()[0]], strict=True))

    of_draft.add([], [], [0.5])
    for _ in range(LONGEST_MATCH + 20):
        text.add([3])
        of_draft.add([1.0], [1.0], [0.5])
    before = found()
    longest = "agreed", "match", "copied", "source_steady", "second_match"
    assert [before[name] for name in longest] == [LONGEST_MATCH] * len(longest)
    assert before["second_agrees"] == before["third_agrees"] == LONGEST_LOOKUP
    assert [before[f"seen_{count}"] for count in (1, 2, 3, 4)] == [MOST_SEEN] * 4
    assert before["context_length"] == LONGEST_MATCH + 22  # which is for the decision alone
    text.add([4])
    of_draft.add([1.0], [0.5], [0.5])
    assert [found()[name] for name in longest] == [0] * len(longest)


def test_whoever_needs_no_features_gets_none(pair: ModelPair) -> None:
    """And nothing is kept for them."""
    seen: list[Features | None] = []

    class Blind(FixedTree):
        def select(self, features: Features | None) -> Choice:
            seen.append(features)
            return self.action

    Decoder(pair, Sampling(), get_verifier("block"), Blind(Action(1, 2, 0))).decode(PROMPT, 20, torch.Generator())
    assert len(seen) > 3 and set(seen) == {None}
