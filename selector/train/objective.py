"""Training objectives.

Legend: B roots, S survivals, A actions. Block efficiencies are in tokens, times in seconds.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from selector.actions import ActionSpace


def survival_loss(
    log_survivals_BS: Tensor, labels_BS: Tensor, space: ActionSpace, squared_weight: float = 1.0
) -> Tensor:
    """A regressor's loss, scalar: the cross-entropy of survivals, in nats, and the squared error of the block
    efficiencies that they sum to, in squared tokens.

    Decisions need the sums; the cross-entropy keeps each survival calibrated. Chains, branches and lookups have equal
    weights, although there are far more branches.

    Labels are `P(tau >= t | text)`; NaN where unknown. Both terms are least at the labels' mean, so unbiased labels
    suffice, even where the draw of siblings puts one above 1.
    """
    known_BS = ~labels_BS.isnan()
    labels_BS = labels_BS.nan_to_num()
    log_S = log_survivals_BS.clamp(max=-1e-6)
    loss_BS = -(labels_BS * log_S + (1 - labels_BS) * torch.log(-torch.expm1(log_S))) * known_BS
    sizes = [space.depth, space.tree_survivals - space.depth, loss_BS.shape[-1] - space.tree_survivals]
    cross_entropy = sum(part.mean() for part in loss_BS.split(sizes, dim=-1) if part.shape[-1])
    known_BA = (~known_BS).to(log_S) @ space.sums_SA.to(log_S) == 0
    error_BA = (space.efficiencies(log_survivals_BS.exp()) - space.efficiencies(labels_BS)) * known_BA
    parts = error_BA.split([len(space.trees), len(space.lookups)], dim=-1)
    return cross_entropy + squared_weight * sum(part.square().mean() for part in parts if part.shape[-1])


def policy_ratios(logits_BA: Tensor, efficiency_BA: Tensor, seconds_BA: Tensor, base_speed_B: Tensor) -> Tensor:
    """Expected tokens over expected seconds of a policy (DDTE eq. 4), over `base_speed_B`, the tokens per second of the
    sampling setting's static tree at the same root; [B]."""
    policy_BA = logits_BA.softmax(-1)
    return (policy_BA * efficiency_BA).sum(-1) / (policy_BA * seconds_BA).sum(-1) / base_speed_B


def policy_loss(ratio_B: Tensor, worst_weight: float = 1.0, worst_share: float = 0.05) -> Tensor:
    """DDTE eq. 12: mean log-ratio to the baseline's speed, and the squared loss of the worst roots, at least one;
    scalar. `worst_weight` is lambda, `worst_share` alpha; the paper gives no values."""
    worst = max(1, math.ceil(worst_share * len(ratio_B)))
    shortfall_B = (1 - ratio_B).clamp(min=0).square()
    return -ratio_B.log().mean() + worst_weight * shortfall_B.topk(worst).values.mean()
