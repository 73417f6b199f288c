"""Texts that follow the target's law, rows along them, and tokens that cannot be."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor

from data_gen.models.pair import ModelPair
from data_gen.models.rows import ModelRows
from data_gen.models.sampling import Sampling, probabilities
from data_gen.texts.generated import generated_by_target, rows_along
from data_gen.texts.possible import ImpossibleToken, check_possible
from tests.data_gen.decodes import generated

PROMPTS = [[5, 17, 203, 44, 91], [9], [3, 8], [250, 251, 17, 5]]
FALSE_ALARM = 1e-5
COLD = Sampling(0.5, 0.95)


@torch.inference_mode()
def target_law(pair: ModelPair, tokens: list[int], sampling: Sampling) -> Tensor:
    return probabilities(pair.target(torch.tensor([tokens])).logits[0, -1], sampling)


def chi_square(counts_V: Tensor, probs_V: Tensor) -> float:
    """How likely so large a deviation is; tokens that are too rare for the approximation are taken
    together."""
    assert int(counts_V[probs_V == 0].sum()) == 0
    expected_V = probs_V.double() * counts_V.sum()
    large_V = expected_V >= 5
    observed = torch.cat([counts_V[large_V], counts_V[~large_V].sum()[None]]).double()
    expected = torch.cat([expected_V[large_V], expected_V[~large_V].sum()[None]])
    assert len(expected) > 3
    if expected[-1] < 5:  # even those together
        observed, expected = (
            torch.cat([counts[:-2], counts[-2:].sum()[None]]) for counts in (observed, expected)
        )
    return float(
        stats.chi2.sf(float(((observed - expected) ** 2 / expected).sum()), len(expected) - 1)
    )


@pytest.mark.parametrize("sampling", [Sampling(0.7), COLD], ids=str)
def test_first_and_second_tokens_follow_the_target(pair: ModelPair, sampling: Sampling) -> None:
    """8,000 texts of two prompts of different lengths in one batch; the second token after the
    commonest first one. Four chi-squares a case, each with a false-alarm rate of 1e-5."""
    prompts = [PROMPTS[0], PROMPTS[2]]
    texts = generated_by_target(pair, prompts * 4000, 2, sampling, seed=1)
    for prompt in prompts:
        drawn = torch.tensor(
            [text.tokens[len(prompt) :] for text in texts if text.tokens[: len(prompt)] == prompt]
        )
        assert drawn.shape == (4000, 2)
        first_V = target_law(pair, prompt, sampling)
        assert chi_square(drawn[:, 0].bincount(minlength=300), first_V) > FALSE_ALARM
        top = int(drawn[:, 0].mode().values)
        after_top = drawn[drawn[:, 0] == top, 1]
        assert len(after_top) > 150
        second_V = target_law(pair, [*prompt, top], sampling)
        assert chi_square(after_top.bincount(minlength=300), second_V) > FALSE_ALARM


def test_greedy_texts_are_those_of_generate(pair: ModelPair) -> None:
    """Whatever stands beside them in the batch."""
    texts = generated_by_target(pair, PROMPTS, 30, Sampling(0.0), seed=1)
    for text, prompt in zip(texts, PROMPTS, strict=True):
        assert text.tokens == prompt + generated(pair.target, prompt, 30)
        assert (text.start, text.steps) == (len(prompt) - 1, [])


def test_the_seed_decides_and_nothing_else_moves(pair: ModelPair) -> None:
    """Nor is torch's own generator moved."""
    torch.manual_seed(7)
    state = torch.get_rng_state()
    one, same, other = (
        generated_by_target(pair, PROMPTS, 12, Sampling(), seed) for seed in (1, 1, 2**63 + 5)
    )
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(8)
    again = generated_by_target(pair, PROMPTS, 12, Sampling(), 1)
    assert one == same == again != other


@pytest.mark.parametrize(
    "setting",
    [{"repetition_penalty": 5.0}, {"min_p": 0.9}, {"no_repeat_ngram_size": 1}, {"num_beams": 3}],
    ids=str,
)
def test_what_a_models_own_config_adds_to_its_law_does_not_count(
    pair: ModelPair, monkeypatch: pytest.MonkeyPatch, setting: dict[str, float]
) -> None:
    """Many models come with a repetition penalty; labels are of the plain law."""

    def texts() -> list[object]:
        samplings = (Sampling(), Sampling(0.0))
        return [generated_by_target(pair, PROMPTS, 20, sampling, 1) for sampling in samplings]

    plain = texts()
    for name, value in setting.items():
        monkeypatch.setattr(pair.target.generation_config, name, value)
    assert texts() == plain


def test_a_text_ends_with_its_end_token(pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of a batch at its own; the others go on."""
    whole = generated_by_target(pair, PROMPTS, 30, Sampling(0.0), seed=1)
    ends = [whole[0].tokens[len(PROMPTS[0]) + 11], whole[2].tokens[len(PROMPTS[2]) + 3]]
    monkeypatch.setattr(pair.target.generation_config, "eos_token_id", ends)
    stopped = generated_by_target(pair, PROMPTS, 30, Sampling(0.0), seed=1)
    for text, unbounded, prompt in zip(stopped, whole, PROMPTS, strict=True):
        new = unbounded.tokens[len(prompt) :]
        end = next((n for n, token in enumerate(new, 1) if token in ends), None)
        assert text.tokens == [*prompt, *new[:end]]
        assert text.start == len(prompt) - 1
    assert stopped[0].tokens[-1] in ends and stopped[2].tokens[-1] in ends
    assert min(len(text.tokens) for text in stopped) < max(len(text.tokens) for text in stopped)


@pytest.mark.parametrize("start", [0, 4])
@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(0.7, 0.9, draft_temperature=1.3)], ids=str
)
@pytest.mark.parametrize("size", [1, 7, 64])
def test_rows_do_not_depend_on_the_blocks(
    pair: ModelPair, monkeypatch: pytest.MonkeyPatch, size: int, sampling: Sampling, start: int
) -> None:
    """They are those of one plain pass of each model; every token from the start on has one."""
    (text,) = generated_by_target(pair, [PROMPTS[0]], 30, Sampling(), seed=3)
    text.start = start
    monkeypatch.setattr("data_gen.texts.generated.block_rows", lambda vocabulary: size)
    blocks = list(rows_along(pair, text, sampling))
    count = len(text.tokens) - start
    sizes = [len(block.target.probs_NV) for block in blocks]
    assert sizes == [size] * (count // size) + ([count % size] if count % size else [])
    models = ((pair.target, sampling, 0), (pair.draft, sampling.draft, 1))
    for model, law, number in models:
        with torch.inference_mode():
            plain = model(torch.tensor([text.tokens]), output_hidden_states=True)
        logits_NV = torch.cat([block[number].logits_NV for block in blocks])
        hidden_ND = torch.cat([block[number].hidden_ND for block in blocks])
        probs_NV = torch.cat([block[number].probs_NV for block in blocks])
        assert torch.allclose(logits_NV, plain.logits[0, start:], atol=2e-4)
        assert torch.allclose(hidden_ND, plain.hidden_states[-1][0, start:], atol=2e-4)
        assert torch.equal(probs_NV, probabilities(logits_NV, law))


# --- tokens that cannot be ---


def rows_of(logits_NV: Tensor, sampling: Sampling) -> ModelRows:
    return ModelRows(probabilities(logits_NV, sampling), logits_NV, logits_NV)


def refused(
    logits_NV: Tensor, following: list[int], sampling: Sampling, begin: int = 10
) -> ImpossibleToken:
    with pytest.raises(ImpossibleToken) as error:
        check_possible(rows_of(logits_NV, sampling), begin, following, sampling)
    return error.value


def test_an_impossible_token_is_named_with_its_position() -> None:
    logits_NV = torch.tensor([[0.0, 1.0, -1.0], [2.0, 0.0, 1.0], [0.0, 1.0, 2.0]])
    for following, at, token in (([1, 1, 0], 1, 1), ([0, 0], 0, 0), ([1, 0, 1], 2, 1)):
        impossible = refused(logits_NV, following, Sampling(0.0))
        assert (impossible.position, impossible.at_a_tie) == (10 + at, False)
        assert f"token {10 + at} of the text ({token})" in str(impossible)


@pytest.mark.parametrize(
    ("dtype", "best", "gap", "tie"),
    [
        (torch.float32, 3.0, 5e-4, True),
        (torch.float32, 3.0, 5e-3, False),
        (torch.bfloat16, 3.0, 0.125, True),
        (torch.bfloat16, 3.0, 0.5, False),
        (torch.bfloat16, 20.0, 1.5, True),
        (torch.bfloat16, 20.0, 2.5, False),
    ],
)
def test_greedy_texts_may_differ_where_two_logits_tie(
    dtype: torch.dtype, best: float, gap: float, tie: bool
) -> None:
    """Ties are wider in short floats and of large logits: numbers of bfloat16 lie 0.125 apart at
    20, and two passes may differ by sixteen of them."""
    logits_NV = torch.tensor([[best, best - gap, 1.0]], dtype=dtype)
    assert refused(logits_NV, [1], Sampling(0.0)).at_a_tie == tie
    assert not refused(logits_NV, [2], Sampling(0.0)).at_a_tie


NUCLEUS = {"top_p": 0.9}
CLOSE = [4.9999, 1.0, math.exp(-5e-4), 1e-4]
FAR = [4.9999, 1.0, math.exp(-5e-3), 1e-4]


@pytest.mark.parametrize("temperature", [0.5, 1.0])
@pytest.mark.parametrize(
    ("kept", "weights", "tie"),
    [
        (NUCLEUS, [0.6, 0.3005, 0.0746, 0.0249], True),
        (NUCLEUS, [0.6, 0.305, 0.0713, 0.0237], False),
        ({"top_k": 2}, CLOSE, True),
        ({"top_k": 2}, FAR, False),
        ({"min_p": 0.2}, CLOSE, True),
        ({"min_p": 0.2}, FAR, False),
        ({"top_k": 2, "top_p": 0.99, "min_p": 0.1}, CLOSE, True),
        ({"top_k": 2, "top_p": 0.99, "min_p": 0.1}, FAR, False),
    ],
)
def test_the_edge_of_what_is_kept(
    temperature: float, kept: dict[str, Any], weights: list[float], tie: bool
) -> None:
    """Of the third token: rounding explains it where the mass before it all but reaches top-p, and
    where its logit is just below what top-k and min-p ask for."""
    sampling = Sampling(temperature, **kept)
    logits_NV = temperature * torch.tensor([weights]).log()
    assert (rows_of(logits_NV, sampling).probs_NV[0] > 0).tolist() == [True, True, False, False]
    assert refused(logits_NV, [2], sampling).at_a_tie == tie
    assert not refused(logits_NV, [3], sampling).at_a_tie
