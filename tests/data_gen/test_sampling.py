from __future__ import annotations

import pytest
import torch

from data_gen.sampling import Sampling
from data_gen.verification.profile import sample


def test_temperature_divides_logits() -> None:
    logits = torch.tensor([[1.0, 2.0, 3.0]])
    expected = (logits.double() / 0.5).softmax(-1)
    assert torch.allclose(Sampling(0.5).probabilities(logits).double(), expected, atol=1e-7)
    assert torch.allclose(Sampling(0.5).probabilities(logits.double()), expected, atol=1e-15)
    assert Sampling(0.5).probabilities(logits.bfloat16()).dtype == torch.float32


def test_temperature_zero_is_greedy() -> None:
    assert Sampling(0).probabilities(torch.tensor([[0.1, 0.3, 0.2]])).tolist() == [[0.0, 1.0, 0.0]]


@pytest.mark.parametrize(("top_p", "kept"), [(0.5, 1), (0.51, 2), (0.8, 2), (0.81, 3), (1.0, 4)])
def test_the_nucleus_is_the_smallest_set_that_reaches_its_mass(top_p: float, kept: int) -> None:
    logits = torch.tensor([0.15, 0.5, 0.05, 0.3]).log()
    probs = Sampling(1.0, top_p).probabilities(logits)
    assert int((probs > 0).sum()) == kept
    assert float(probs.sum()) == pytest.approx(1, abs=1e-6)


def test_the_nucleus_agrees_with_transformers() -> None:
    from transformers import TopPLogitsWarper

    logits = 3 * torch.randn(20, 50, generator=torch.Generator().manual_seed(1))
    theirs = TopPLogitsWarper(0.9)(None, logits.clone()).softmax(-1)
    assert torch.allclose(Sampling(1.0, 0.9).probabilities(logits).float(), theirs, atol=1e-6)


def test_draws_never_have_probability_zero() -> None:
    probs = torch.tensor([[0.0, 0.5, 0.0, 0.5, 0.0]], dtype=torch.float64)
    drawn = sample(probs, 20_000, torch.Generator().manual_seed(1))
    assert set(drawn.flatten().tolist()) == {1, 3}
    share = (drawn == 1).double().mean()
    assert abs(float(share) - 0.5) < 4.9 * 0.5 / 20_000**0.5  # two-sided false-alarm rate 1e-6


def test_rounding_at_the_top_of_the_distribution_stays_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    probs = torch.tensor([1e-300, 1.0, 0.0], dtype=torch.float64)
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.tensor([1.0], dtype=torch.float64))
    assert sample(probs, 1, torch.Generator()).tolist() == [1]
