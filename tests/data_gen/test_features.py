"""What a selector may know at a root: by definition, and the same while decoding, from a trace and
in any steps."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from itertools import product

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from data_gen.decoding.loop import Decoded, Features, FixedTree, Random
from data_gen.features.root import (
    ROW_NUMBERS,
    DrafterKnowledge,
    RootKnowledge,
    entropies,
    features_of,
    row_numbers,
    scalars_along,
)
from data_gen.features.text import TextStates
from data_gen.models.pair import ModelPair
from data_gen.models.rows import ModelRow, ModelRows
from data_gen.models.sampling import Sampling
from data_gen.texts.generated import GeneratedText, finished, rows_along
from data_gen.traces import texts_of
from selector.actions import EMPTY, Action
from selector.runtime.tokens import TokenStatistics
from selector.schema import (
    DRAFTER,
    EARLY,
    FULL,
    HIDDEN_STATES,
    KEYS,
    LIGHT,
    LOG,
    LONGEST_MATCH,
    MATCH,
    PAIR,
    SCALARS_KEY,
    TEXT,
    TOKEN_SCALARS,
)
from tests.data_gen import by_definition
from tests.data_gen.decodes import decode

PROMPT = [5, 17, 203, 44, 91]
SHARP = Sampling(0.7, draft_temperature=1.3)
SAMPLINGS = [
    Sampling(0.0),
    Sampling(0.2),
    Sampling(1.0, 0.9),
    SHARP,
    Sampling(0.2, draft_temperature=0.0),
]
MIXED = [
    *(EMPTY, Action(1, 1, 0), Action(1, 4, 0), Action(1, 8, 2)),
    *(Action(3, 1, 3), Action(4, 0, 2), Action(2, 2, 1), Action.copy(4)),
]


def decoded(
    pair: ModelPair,
    sampling: Sampling,
    actions: Sequence[Action],
    level: str = FULL,
    prompt: list[int] = PROMPT,
) -> tuple[Decoded, list[Features | None]]:
    """A text, and the features at each of its steps."""
    random_actions, seen = (
        Random(actions, torch.Generator().manual_seed(1)),
        list[Features | None](),
    )

    class Recorder(FixedTree):
        def select(self, features: Features | None) -> Action:
            seen.append(features)
            return random_actions.select(features)

    return decode(pair, Recorder(EMPTY, (level,)), prompt, 60, sampling, "lifted_uniform"), seen


def replayed(
    pair: ModelPair, text: GeneratedText, sampling: Sampling
) -> tuple[torch.Tensor, ModelRows, ModelRows]:
    """The scalars of all roots from the numbers of a trace, and both models' rows."""
    (block,) = rows_along(pair, text, sampling)
    roots = len(text.tokens) - text.start
    numbers = row_numbers(block.target, block.draft, text.tokens[text.start + 1 :])
    arrays = {name: np.array(values[:roots], np.float32) for name, values in numbers.items()}
    return (
        torch.from_numpy(scalars_along(text.tokens, text.start, sampling, arrays)),
        block.target,
        block.draft,
    )


NUMBERS = st.tuples(
    st.integers(0, 2),
    *[st.sampled_from([0.25, 0.5, 0.999, 1.0])] * 2,
    st.floats(0, 6, width=32),
)


@settings(max_examples=50, deadline=None, derandomize=True)
@given(
    st.lists(NUMBERS, min_size=2, max_size=40), st.lists(st.integers(0, 2), min_size=1, max_size=6)
)
@example([(0, 1.0, 1.0, 1.0)] * (LONGEST_MATCH + 20), [0])  # the longest runs
def test_scalars_are_what_the_schema_says(
    committed: list[tuple[int, float, float, float]], prompt: list[int]
) -> None:
    """At the second root, one inside and the last one of a text. The token after a root is not
    known there."""
    following, p, q, of_draft = map(list, zip(*committed, strict=True))
    tokens = prompt + following[:-1]
    numbers = dict(zip(ROW_NUMBERS, map(np.array, (of_draft, p, q)), strict=True))
    scalars_RF = scalars_along(tokens, len(prompt) - 1, Sampling(0.5, 0.75), numbers)
    assert not scalars_RF[0].any()
    for n in {1, len(committed) // 2, len(committed) - 1}:
        text = tokens[: len(prompt) + n]
        expected = {
            **by_definition.of_text(text, len(prompt)),
            **by_definition.of_draft(p[:n], q[:n], of_draft[: n + 1]),
            **{"batch": 1, "temperature": 0.5, "top_p": 0.75},
        }
        assert dict(zip(PAIR.names, scalars_RF[n].tolist(), strict=True)) == pytest.approx(
            expected, rel=1e-6, abs=1e-6
        )


@pytest.mark.parametrize(
    ("sampling", "actions"),
    [(sampling, MIXED) for sampling in SAMPLINGS]
    + [(SHARP, [Action(1, 8, 8), EMPTY]), (SHARP, [Action.copy(8)])],
)
def test_a_decoder_knows_what_the_text_tells(
    pair: ModelPair, sampling: Sampling, actions: list[Action]
) -> None:
    """At every root of every step: after full acceptance, where the draft lacks the newest tokens;
    after rejections; after steps in which nothing was drafted; after branches, of which the one
    accepted may be any."""
    result, seen = decoded(pair, sampling, actions)
    text = finished(pair, PROMPT, result.tokens)
    scalars_RF, target, draft = replayed(pair, text, sampling)
    assert len(seen) == len(result.steps) and seen[0] is None
    for step, features in zip(result.steps[1:], seen[1:], strict=True):
        assert features is not None and set(features) == {SCALARS_KEY, *HIDDEN_STATES}
        n = step.length - 1 - text.start
        assert torch.allclose(features[SCALARS_KEY], scalars_RF[n], atol=2e-3, rtol=1e-4), n
        expected = target.hidden_ND[n - 1], draft.hidden_ND[n - 1], draft.hidden_ND[n]
        for name, state_D in zip(HIDDEN_STATES, expected, strict=True):
            assert torch.allclose(features[name], state_D, atol=2e-4), (n, name)


@pytest.mark.parametrize("prompt", [PROMPT, [9]], ids=["prompt", "one token"])
def test_lower_levels_have_the_first_of_the_scalars_alone(
    pair: ModelPair, prompt: list[int]
) -> None:
    full, of_full = decoded(pair, SHARP, MIXED, FULL, prompt)
    for level, count in ((LIGHT, len(PAIR.names)), (EARLY, PAIR.first)):
        result, of_level = decoded(pair, SHARP, MIXED, level, prompt)
        assert result.tokens == full.tokens and of_level[0] is None
        for whole, scalars in zip(of_full[1:], of_level[1:], strict=True):
            assert whole is not None and scalars is not None
            expected_F = whole[SCALARS_KEY][:count]
            assert scalars.keys() == {SCALARS_KEY}
            assert torch.equal(scalars[SCALARS_KEY], expected_F)


@pytest.mark.parametrize("together", [1, 5, 70], ids=str)
def test_features_from_a_trace_are_those_of_a_decoder_bit_by_bit(
    pair: ModelPair, together: int
) -> None:
    """Of the same rows, at every root whose step committed so many tokens; more of them than are
    kept at once, too."""
    result, _ = decoded(pair, SHARP, [Action(1, 4, 0)])
    text = finished(pair, PROMPT, result.tokens * 3)
    scalars_RF, target, draft = replayed(pair, text, SHARP)
    knowledge = RootKnowledge(PROMPT, SHARP, (LIGHT,))
    knowledge.passed([ModelRow(*(rows[0] for rows in draft))])
    for begin in range(0, len(scalars_RF) - together, together):
        for n in range(begin, begin + together):  # steps without a decision in between
            knowledge.committed(target, [n], [text.tokens[text.start + 1 + n]])
            knowledge.passed([ModelRow(*(rows[n + 1] for rows in draft))])
        features = knowledge.features(LIGHT)
        assert (
            features is not None
            and features[SCALARS_KEY].tolist() == scalars_RF[begin + together].tolist()
        )


def test_a_scalar_that_is_not_finite_is_named() -> None:
    numbers = {name: [[0.5, 0.5]] for name in ROW_NUMBERS} | {"draft_prob": [[math.nan, 0.5]]}
    row = {"tokens": [[5, 6, 7]], "start": [0], "temperature": [1.0], "top_p": [1.0], **numbers}
    with pytest.raises(ValueError, match=r"not finite: accepted_mean_0\.5, accepted_mean_0\.8"):
        texts_of(pa.table(row), [])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_entropies_are_those_of_the_distributions(dtype: torch.dtype) -> None:
    """Against `-sum p log p` in double precision, with masked tokens, whole and nearly certain
    rows."""
    logits_NV = 4 * torch.randn(6, 50, generator=torch.Generator().manual_seed(1))
    logits_NV[1, ::2] = -torch.inf
    logits_NV[2, 1:] = -torch.inf  # certain
    logits_NV[3] = 0.0  # uniform
    logits_NV[4, 7] = 500.0
    logits_NV[5] += 1e3  # only differences count
    logits_NV = logits_NV.to(dtype)
    expected_N = torch.special.entr(logits_NV.double().softmax(-1)).sum(-1)
    assert entropies(logits_NV) == pytest.approx(expected_N.tolist(), abs=2e-5)


GREEDY = Sampling(0.0)
START = 7
BY_KEY = [scalar.name for scalar in TOKEN_SCALARS]


def text_of(seed: int, length: int = 120, vocabulary: int = 6) -> tuple[list[int], list[float]]:
    """Tokens that repeat themselves, and the drafter's hits on those after the prompt."""
    random_ = random.Random(seed)
    phrases = [
        [random_.randrange(vocabulary) for _ in range(random_.randrange(2, 7))] for _ in range(4)
    ]
    tokens: list[int] = []
    while len(tokens) < length:
        tokens += random_.choice(phrases)
    return tokens[:length], [float(random_.random() < 0.6) for _ in range(length - START)]


def knowledge(tokens: list[int], hits: list[float], end: int, step: int = 1) -> DrafterKnowledge:
    """Of the text up to a token, in steps of so many."""
    root_knowledge = DrafterKnowledge(tokens[:START], GREEDY, TokenStatistics.empty(), batch=3)
    for at in range(START, end, step):
        root_knowledge.committed(
            tokens[at : min(at + step, end)], hits[at - START : min(at + step, end) - START]
        )
    return root_knowledge


def scalars_of(request: DrafterKnowledge, level: str) -> NDArray[np.float32]:
    values: NDArray[np.float32] = request.features(level)[SCALARS_KEY].numpy()
    return values


def keys_at(request: DrafterKnowledge) -> NDArray[np.int64]:
    """The keys at the newest token, [1, J]."""
    return TextStates([request.state()]).keys()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("end", [START, START + 1, 40, 120])
def test_scalars_by_definition(seed: int, end: int) -> None:
    tokens, hits = text_of(seed, vocabulary=2 + 2 * seed)
    root_knowledge = knowledge(tokens, hits, end)
    scalars = dict(zip(LOG.names, scalars_of(root_knowledge, DRAFTER).tolist(), strict=True))
    assert sum(scalars.pop(name) for name in BY_KEY) == 0  # there are no statistics
    expected = by_definition.of_text(tokens[:end], START) | {
        "batch": 3,
        "temperature": 0.0,
        "top_p": 1.0,
    }
    expected |= by_definition.of_hits(tokens[:end], START, hits[: end - START])
    assert scalars == pytest.approx(expected, rel=1e-6, abs=1e-6)


def test_statistics_by_token_are_those_of_the_keys() -> None:
    root_knowledge = knowledge(*text_of(1), 80)
    keys_RJ = np.repeat(keys_at(root_knowledge), 3, axis=0)
    values_RK = np.array([[1.0, 2.0], [3.0, 1.0], [0.0, 5.0]])
    root_knowledge.tokens, _ = TokenStatistics.fit(keys_RJ, values_RK, np.arange(3))
    scalars = dict(zip(LOG.names, scalars_of(root_knowledge, DRAFTER), strict=True))
    of_keys = root_knowledge.tokens.of(keys_at(root_knowledge))[0].astype(np.float32)
    assert [scalars[name] for name in BY_KEY] == of_keys.tolist()
    assert scalars["last_known"] == 3


@pytest.mark.parametrize("step", [2, 17])
def test_steps_of_any_size_give_the_same_numbers(step: int) -> None:
    text = text_of(3, 700)
    one, other = knowledge(*text, 700), knowledge(*text, 700, step)
    for _ in range(2):  # asking changes nothing
        scalars_F = scalars_of(one, DRAFTER)
        assert np.array_equal(scalars_of(other, DRAFTER), scalars_F)
    assert np.array_equal(keys_at(one), keys_at(other))
    assert np.array_equal(scalars_of(other, TEXT), scalars_F[: LOG.first])


def test_requests_together_have_the_features_of_each() -> None:
    requests = []
    for seed, end in product(range(4), (START, 40, 120)):
        requests.append(knowledge(*text_of(seed, vocabulary=2 + 2 * seed), end))
    for level in (TEXT, DRAFTER, MATCH):
        for name, values_R in features_of(requests, level).items():
            of_each = [request.features(level)[name] for request in requests]
            assert torch.equal(values_R, torch.stack(of_each))


def test_keys_are_those_of_equal_places() -> None:
    """And those that artefacts hold: a change of these would make the statistics of every artefact
    meaningless without an error."""
    keys = keys_at(knowledge([1, 2, 3, 1, 2, 3, 4, 2, 3], [1.0, 1.0], 9))[0].tolist()
    assert keys == [
        *(3698634717145261875, 2567005027096588903, 3316454189254552019),
        *(2787508183354919297, 6199581249243900810),
    ]
    others = keys_at(knowledge([9, 9, 9, 9, 9, 9, 9, 2, 3], [1.0, 1.0], 9))[0]
    equal = [key == other for key, other in zip(keys, others, strict=True)]
    expected = {**dict.fromkeys(KEYS, False), "last": True, "two": True}
    assert dict(zip(KEYS, equal, strict=True)) == expected
