"""Validation metrics of a selector at roots as they were recorded: total tokens over total time. What pays over whole
texts is found in `selector.modes`.

Legend: B roots.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from selector.objective import policy_loss


class SpeedRatio(Metric):
    """Tokens per second of the chosen actions over those of another choice."""

    higher_is_better = True
    full_state_update = False
    tokens: Tensor
    seconds: Tensor
    base_tokens: Tensor
    base_seconds: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("tokens", "seconds", "base_tokens", "base_seconds"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, tokens_B: Tensor, seconds_B: Tensor, base_tokens_B: Tensor, base_seconds_B: Tensor) -> None:
        self.tokens += tokens_B.double().sum()
        self.seconds += seconds_B.double().sum()
        self.base_tokens += base_tokens_B.double().sum()
        self.base_seconds += base_seconds_B.double().sum()

    def compute(self) -> Tensor:
        return (self.tokens / self.seconds) / (self.base_tokens / self.base_seconds)


class WorstShare(Metric):
    """Mean ratio to the baseline's speed over the worst 5% of the roots."""

    higher_is_better = True
    full_state_update = False
    ratios: list[Tensor]

    def __init__(self, share: float = 0.05) -> None:
        super().__init__()
        self.share = share
        self.add_state("ratios", [], dist_reduce_fx="cat")

    def update(self, tokens_B: Tensor, seconds_B: Tensor, base_tokens_B: Tensor, base_seconds_B: Tensor) -> None:
        self.ratios.append((tokens_B / seconds_B) / (base_tokens_B / base_seconds_B))

    def compute(self) -> Tensor:
        ratios = dim_zero_cat(self.ratios)
        return ratios.sort().values[: max(1, math.ceil(self.share * len(ratios)))].mean()


class PolicyLoss(Metric):
    """DDTE eq. 12 over all roots at once: its worst share is that of the split, not of whichever batch or process."""

    higher_is_better = False
    full_state_update = False
    ratios: list[Tensor]

    def __init__(self, worst_weight: float, worst_share: float) -> None:
        super().__init__()
        self.worst_weight, self.worst_share = worst_weight, worst_share
        self.add_state("ratios", [], dist_reduce_fx="cat")

    def update(self, ratio_B: Tensor) -> None:
        self.ratios.append(ratio_B)

    def compute(self) -> Tensor:
        return policy_loss(dim_zero_cat(self.ratios), self.worst_weight, self.worst_share)


class CrossFittedRegret(Metric):
    """One minus the speed of the chosen actions over that of each root's best action.

    The best action is found on one half of the samples, and both are scored on the other; then the halves change
    places. Without that, the best of 233 noisy labels looks better than any action is.
    """

    higher_is_better = False
    full_state_update = False
    tokens: Tensor
    seconds: Tensor
    best_tokens: Tensor
    best_seconds: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("tokens", "seconds", "best_tokens", "best_seconds"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, chosen_B: Tensor, halves: tuple[Tensor, Tensor], seconds_BA: Tensor, gain: float) -> None:
        """Args:
        chosen_B: action indices.
        halves: block efficiencies from either half of the samples, [B, A] each.
        gain: tokens per second at which time is charged (`best_gain`).
        """
        for fitted_BA, scored_BA in (halves, halves[::-1]):
            best_B = (fitted_BA - gain * seconds_BA).argmax(-1)
            for name, action_B in (("", chosen_B), ("best_", best_B)):
                index_B1 = action_B.unsqueeze(-1)
                setattr(self, f"{name}tokens", getattr(self, f"{name}tokens") + _total(scored_BA, index_B1))
                setattr(self, f"{name}seconds", getattr(self, f"{name}seconds") + _total(seconds_BA, index_B1))

    def compute(self) -> Tensor:
        return 1 - (self.tokens / self.seconds) / (self.best_tokens / self.best_seconds)


def _total(values_BA: Tensor, index_B1: Tensor) -> Tensor:
    return values_BA.gather(-1, index_B1).sum(dtype=torch.float64)
