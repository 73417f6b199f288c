from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from selector.actions import ActionSpace
from selector.train.module import policy_loss, policy_ratios, survival_loss

SPACE = ActionSpace(3, 2, 2, (1, 3))


def test_the_policy_objective_is_equation_12() -> None:
    logits = torch.tensor(
        [[0.0, 1.0], [2.0, -1.0], [0.5, 0.5]], dtype=torch.float64, requires_grad=True
    )
    efficiency = torch.tensor([[1.0, 3.0], [2.0, 4.0], [1.0, 1.5]], dtype=torch.float64)
    seconds = torch.tensor([[1.0, 2.0], [1.0, 3.0], [1.0, 2.0]], dtype=torch.float64)
    base = torch.tensor([1.2, 2.5, 1.0], dtype=torch.float64)
    loss = policy_loss(
        policy_ratios(logits, efficiency, seconds, base), worst_weight=0.7, worst_share=0.5
    )
    weights = logits.detach().exp() / logits.detach().exp().sum(-1, keepdim=True)
    ratios = ((weights * efficiency).sum(-1) / (weights * seconds).sum(-1) / base).tolist()
    worst = sorted((max(1 - r, 0) ** 2 for r in ratios), reverse=True)[:2]
    expected = -sum(map(math.log, ratios)) / 3 + 0.7 * sum(worst) / 2
    assert loss.item() == pytest.approx(expected, abs=1e-6)
    loss.backward()
    assert torch.isfinite(logits.grad).all() and logits.grad.abs().sum() > 0


def survivals(count: int, seed: int) -> Tensor:
    return 0.02 + 0.96 * torch.rand(
        count,
        len(SPACE.sums_SA),
        generator=torch.Generator().manual_seed(seed),
        dtype=torch.float64,
    )


def test_the_survival_loss_is_a_cross_entropy_and_a_squared_error() -> None:
    """Mean over chains, mean over branches and mean over lookups, one number after the other; and
    of what the survivals add up to, over trees and over lookups. Labels above 1 or below 0 count as
    they are: their mean is right."""
    predicted_BS, labels_BS = survivals(3, 1), 3 * survivals(3, 2) - 1
    cross_BS = -labels_BS * predicted_BS.log() - (1 - labels_BS) * (1 - predicted_BS).log()
    square_BA = (SPACE.efficiencies(predicted_BS) - SPACE.efficiencies(labels_BS)).square()
    copies_A = torch.tensor([action.copies for action in SPACE])
    assert (SPACE.depth, SPACE.tree_survivals, int(copies_A.sum())) == (4, 4 + 12, 2)
    parts = *cross_BS.split([4, 12, 3], dim=-1), square_BA[:, copies_A], square_BA[:, ~copies_A]
    expected = sum(float(part.mean()) for part in parts)
    assert float(survival_loss(predicted_BS.log(), labels_BS, SPACE)) == pytest.approx(
        expected, abs=1e-6
    )


@pytest.mark.parametrize("value", [0.0, -1e-12, -80.0])
def test_certain_predictions_have_a_finite_loss_and_gradient(value: float) -> None:
    log_BS = torch.full((2, len(SPACE.sums_SA)), value).requires_grad_()
    loss = survival_loss(log_BS, torch.full((2, len(SPACE.sums_SA)), 0.3), SPACE)
    loss.backward()
    assert bool(loss.isfinite())
    assert log_BS.grad is not None and bool(log_BS.grad.isfinite().all())
