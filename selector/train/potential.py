"""An estimate, before anything is trained, of what a selector gains.

It is the replayed gain of a quick model, which is linear in the scalars and their squares, fitted in closed form on the
texts of some sources and judged on the others. It is compared with the best static tree and the tuned lookup rule.

Legend: R roots, F inputs, A actions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selector.schema import EARLY, LIGHT, PAIR
from selector.train.data import Timed
from selector.train.replay import Ratio, ratio_of_speeds
from selector.train.tuning import (
    Predictions,
    StaticTable,
    best_static,
    judge_mode,
    replay_mode,
    tune_lookup_rule,
    tune_mode,
)

RIDGE = 1e-2  # of the quick model, as a share of the inputs' variance


@dataclass(frozen=True)
class Potential:
    """The speed by replay, the time of decisions included, over the best static tree or the lookup rule, whichever is
    faster on the texts that the model was fitted on; and which of them that is."""

    gain: Ratio
    over: str


@torch.no_grad()
def potential(fitted_on: Timed, judged_on: Timed) -> Potential:
    """The quick model fitted on some texts and judged on others."""
    static = best_static(fitted_on, StaticTable.of(fitted_on))
    fixed, copying = (
        judge_mode(fitted_on, {}, mode, static.action) for mode in (static, tune_lookup_rule(fitted_on, static))
    )
    base, over = (copying, "lookup rule") if copying.is_ahead_of(fixed) else (fixed, "static tree")
    own, others = _predicted(fitted_on, judged_on)
    mode = tune_mode(fitted_on, own, static).mode
    mine, other = replay_mode(judged_on, others, mode), replay_mode(judged_on, {}, base.mode)
    return Potential(ratio_of_speeds(mine, other, judged_on.texts.source_number_X), over)


def _predicted(fitted_on: Timed, judged_on: Timed) -> tuple[Predictions, Predictions]:
    # Predictions of branches are noisy: they become 0, so that the model chooses among chains and lookups.
    space, known_R = fitted_on.space, ~fitted_on.texts.unknown_R
    labels_RA = space.efficiencies(fitted_on.survivals_RS)
    branches_A = torch.tensor([action.K > 1 for action in space])
    result: tuple[Predictions, Predictions] = {}, {}
    for level, scalars in ((EARLY, PAIR.first), (LIGHT, len(PAIR.scalars))):
        rows_RF = fitted_on.texts.scalars_RF[known_R, :scalars]
        scaling = rows_RF.mean(0), rows_RF.std(0).clamp(min=1e-6)
        both = [_inputs(timed.texts.scalars_RF[:, :scalars], *scaling) for timed in (fitted_on, judged_on)]
        weights_FA = _fitted(both[0], labels_RA, known_R)
        for predictions, inputs_RF in zip(result, both, strict=True):
            predictions[level] = (inputs_RF @ weights_FA).clamp(min=1).masked_fill(branches_A, 0)
    return result


def _inputs(scalars_RF: Tensor, mean_F: Tensor, scale_F: Tensor) -> Tensor:
    scaled_RF = ((scalars_RF - mean_F) / scale_F).clamp(-4, 4)
    return torch.cat([scaled_RF, scaled_RF.square(), torch.ones_like(scaled_RF[:, :1])], dim=-1)


def _fitted(inputs_RF: Tensor, labels_RA: Tensor, rows_R: Tensor) -> Tensor:
    inputs_RF, labels_RA = inputs_RF[rows_R].double(), labels_RA[rows_R].double()
    normal_FF = inputs_RF.T @ inputs_RF
    ridge_FF = RIDGE * len(inputs_RF) * torch.eye(len(normal_FF), dtype=torch.float64)
    ridge_FF[-1, -1] = 0
    return torch.linalg.solve(normal_FF + ridge_FF, inputs_RF.T @ labels_RA).float()
