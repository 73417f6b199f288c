"""What the selector is trained on.

Legend: B roots, A actions. Block efficiencies are in tokens, times in seconds.
"""

from __future__ import annotations

import math

from torch import Tensor


def policy_ratios(logits_BA: Tensor, efficiency_BA: Tensor, seconds_BA: Tensor, base_speed_B: Tensor) -> Tensor:
    """Expected tokens over expected seconds of a policy, over the baseline's speed; [B].

    Args:
        base_speed_B: tokens per second of the static action tuned for the root's sampling setting.
    """
    policy_BA = logits_BA.softmax(-1)
    speed_B = (policy_BA * efficiency_BA).sum(-1) / (policy_BA * seconds_BA).sum(-1)
    return speed_B / base_speed_B


def policy_loss(ratio_B: Tensor, worst_weight: float, worst_share: float) -> Tensor:
    """DDTE eq. 12: mean log-ratio to the baseline's speed, and the squared loss of the worst roots; scalar.

    Args:
        worst_weight: lambda.
        worst_share: alpha; at least one root counts as worst.
    """
    worst = max(1, math.ceil(worst_share * len(ratio_B)))
    shortfall_B = (1 - ratio_B).clamp(min=0).square()
    return -ratio_B.log().mean() + worst_weight * shortfall_B.topk(worst).values.mean()


def regression_objective(predicted_BA: Tensor, labels_BA: Tensor, weights_BA: Tensor) -> Tensor:
    """Weighted mean squared error of predictions, in squared tokens; scalar.

    Args:
        weights_BA: broadcastable; 0 where there is no label.
    """
    weights_BA = weights_BA.expand_as(predicted_BA)
    return ((predicted_BA - labels_BA).square() * weights_BA).sum() / weights_BA.sum()
