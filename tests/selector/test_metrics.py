from __future__ import annotations

import pytest
import torch

from selector.metrics import CrossFittedRegret, SpeedRatio, WorstShare

TOKENS = torch.tensor([1.0, 4.0])
SECONDS = torch.tensor([1.0, 2.0])
BASE_TOKENS = torch.tensor([2.0, 2.0])
BASE_SECONDS = torch.tensor([1.0, 3.0])


def test_the_ratio_is_of_sums_over_batches() -> None:
    metric = SpeedRatio()
    for b in range(2):
        metric.update(TOKENS[b : b + 1], SECONDS[b : b + 1], BASE_TOKENS[b : b + 1], BASE_SECONDS[b : b + 1])
    assert float(metric.compute()) == pytest.approx((5 / 3) / (4 / 4))


def test_the_worst_share_averages_the_smallest_ratios() -> None:
    metric = WorstShare(share=0.5)
    metric.update(TOKENS, SECONDS, BASE_TOKENS, BASE_SECONDS)
    assert float(metric.compute()) == pytest.approx(0.5)  # ratios are 0.5 and 3


def test_regret_is_cross_fitted() -> None:
    first, second = torch.tensor([[1.0, 3.0]]), torch.tensor([[2.0, 1.0]])
    seconds = torch.ones(1, 2)
    metric = CrossFittedRegret()
    metric.update(torch.tensor([0]), (first, second), seconds, gain=1.0)
    # the first half picks action 1, worth 1 on the second; the second picks 0, worth 1 on the first; ours: 2 and 1
    assert float(metric.compute()) == pytest.approx(1 - 3 / 2)
