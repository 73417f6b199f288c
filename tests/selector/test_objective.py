from __future__ import annotations

import itertools

import pytest
import torch

from selector.baselines import best_static
from selector.objective import policy_loss, policy_ratios
from selector.runtime import best_gain


def test_the_policy_objective_is_equation_12() -> None:
    logits = torch.tensor([[0.0, 1.0], [2.0, -1.0], [0.5, 0.5]], dtype=torch.float64, requires_grad=True)
    efficiency = torch.tensor([[1.0, 3.0], [2.0, 4.0], [1.0, 1.5]], dtype=torch.float64)
    seconds = torch.tensor([[1.0, 2.0], [1.0, 3.0], [1.0, 2.0]], dtype=torch.float64)
    base = torch.tensor([1.2, 2.5, 1.0], dtype=torch.float64)
    loss = policy_loss(policy_ratios(logits, efficiency, seconds, base), worst_weight=0.7, worst_share=0.5)
    ratios = []
    exponentials = logits.detach().exp()
    for b in range(3):
        weights = (exponentials[b] / exponentials[b].sum()).tolist()
        tokens = sum(w * float(e) for w, e in zip(weights, efficiency[b], strict=True))
        time = sum(w * float(t) for w, t in zip(weights, seconds[b], strict=True))
        ratios.append(tokens / time / float(base[b]))
    worst = sorted((max(1 - r, 0) ** 2 for r in ratios), reverse=True)[:2]
    expected = -sum(torch.tensor(r).log().item() for r in ratios) / 3 + 0.7 * sum(worst) / 2
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    loss.backward()
    assert torch.isfinite(logits.grad).all() and logits.grad.abs().sum() > 0


def test_the_best_gain_maximises_total_tokens_over_total_time() -> None:
    generator = torch.Generator().manual_seed(1)
    efficiency = 1 + 4 * torch.rand(5, 4, generator=generator, dtype=torch.float64)
    seconds = 0.1 + torch.rand(5, 4, generator=generator, dtype=torch.float64)
    gain = best_gain(efficiency, seconds)
    rows = torch.arange(5)
    speeds = []
    for choice in itertools.product(range(4), repeat=5):
        index = torch.tensor(choice)
        speeds.append(float(efficiency[rows, index].sum() / seconds[rows, index].sum()))
    assert gain == pytest.approx(max(speeds), rel=1e-9)
    assert float((efficiency - gain * seconds).amax(-1).mean()) == pytest.approx(0, abs=1e-9)


def test_the_best_static_action_is_the_fastest_that_is_allowed() -> None:
    speed_A = torch.tensor([1.0, 0.9, 1.1])
    assert best_static(speed_A) == 2
    assert best_static(speed_A, torch.tensor([False, True, False])) == 1
