from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessorList

from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling, generation_arguments, probabilities
from data_gen.verification.distributions import sample


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 1), (0.51, 2), (0.8, 2), (0.81, 3), (1.0, 4)])
def test_the_nucleus_is_the_smallest_set_that_reaches_its_mass(top_p: float, kept: int) -> None:
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
    probs = probabilities(logits, Sampling(1.0, top_p))
    assert int((probs > 0).sum()) == kept
    assert float(probs.sum()) == pytest.approx(1, abs=1e-6)


SETTINGS = [
    Sampling(0.5),
    Sampling(1.0, 0.9),
    Sampling(0.6, 0.95, top_k=20),  # as Qwen3 is deployed
    Sampling(1.3, 0.8, top_k=7, min_p=0.1),
    Sampling(0.7, min_p=0.05),
    *(Sampling(0.8, 0.9, top_k=k) for k in (1, 2, 49, 50, 51, 1000)),
    *(Sampling(1.0, top_p, min_p=share) for top_p in (0.5, 1.0) for share in (1e-9, 0.999, 1.0)),
]


@pytest.mark.parametrize("sampling", SETTINGS, ids=str)
def test_a_setting_is_what_transformers_makes_of_it(pair: ModelPair, sampling: Sampling) -> None:
    logits = 3 * torch.randn(40, 50, generator=torch.Generator().manual_seed(1))
    logits[:20] = logits[:20].bfloat16().float()  # ties
    config = GenerationConfig(**generation_arguments(sampling))
    processors = pair.target._get_logits_processor(config, logits_processor=LogitsProcessorList())
    theirs = processors(torch.zeros(40, 1, dtype=torch.int64), logits.clone()).softmax(-1)
    ours = probabilities(logits, sampling)
    # where tokens tie at the edge of a nucleus, which of them stands is the sort's choice: the
    # sorted rows agree
    assert torch.allclose(ours.sort(-1).values, theirs.sort(-1).values, atol=1e-6)
    assert torch.allclose(ours[20:], theirs[20:], atol=1e-6)
    assert probabilities(logits.bfloat16(), sampling).dtype == torch.float32
    assert torch.allclose(
        probabilities(logits.double(), sampling)[20:], ours[20:].double(), atol=1e-6
    )


def test_rows_are_filtered_alike_whatever_their_number_and_shape(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = torch.randn(3, 5, 50, generator=torch.Generator().manual_seed(1))
    sampling = Sampling(0.9, 0.8, top_k=30, min_p=0.02)
    whole = probabilities(logits, sampling)
    monkeypatch.setattr("data_gen.models.sampling.ELEMENTS", 100)
    assert torch.equal(probabilities(logits, sampling), whole)
    assert torch.equal(probabilities(logits[1:, 2:4], sampling), whole[1:, 2:4])
    assert torch.equal(probabilities(logits[2, 3], sampling), whole[2, 3])


def test_what_the_draft_is_sampled_with() -> None:
    sampling = Sampling(0.0, 0.9, 20, 0.1, 0.3)
    assert sampling.draft == Sampling(0.3, 0.9, 20, 0.1)
    assert sampling.draft.draft == sampling.draft
    assert str(sampling) == "T=0, top-k=20, top-p=0.9, min-p=0.1, draft T=0.3"


def test_rounding_at_the_top_of_the_distribution_stays_inside(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    probs = torch.tensor([1e-300, 1.0, 0.0], dtype=torch.float64)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor([1.0], dtype=torch.float64))
    assert sample(probs, 1, torch.Generator()).tolist() == [1]
