"""An estimate, before anything is trained, of what a selector gains.

It is the replayed gain of a quick model, which is linear in the scalars and their squares, fitted in closed form on the
texts of some sources and judged on the others.

Legend: R roots, F inputs, A actions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selector.actions import Action
from selector.decision import RHOS, Mode
from selector.schema import LIGHT, MATCH_AT
from selector.train.data import Texts, Timed
from selector.train.replay import Ratio
from selector.train.tuning import StaticTable, best_static, judge_mode, replay_mode

EXAMPLE = Action(1, 8, 0)  # the tree whose block efficiency is explained
LONG_REPEAT = 8  # tokens
LAG = 4  # tokens
RIDGE = 1e-2  # of the quick model, as a share of the inputs' variance


@dataclass(frozen=True)
class Potential:
    """What was found under one sampling setting.

    Attributes:
        explained: share of the variance of a chain of 8's labels that the quick model explains on other sources; 0
            where their mean predicts better.
        autocorrelation: of the acceptance `min(1, q/p)` of the text's tokens, four tokens apart.
        repeats: share of the positions inside a repeat of 8 or more tokens.
        gain: speed over the best static tree by replay, the time of decisions included.
    """

    explained: float
    autocorrelation: float
    repeats: float
    gain: Ratio


@torch.no_grad()
def potential(fitted_on: Timed, judged_on: Timed) -> Potential:
    """The quick model fitted on some texts and judged on others. It chooses among chains, since its predictions of
    branches are noisy."""
    space = fitted_on.space
    static = best_static(fitted_on, StaticTable.of(fitted_on))
    rows_RF = fitted_on.texts.scalars_RF[~fitted_on.texts.unknown_R]
    scaling = rows_RF.mean(0), rows_RF.std(0).clamp(min=1e-6)
    inputs_RF, others_RF = (_inputs(timed.texts, *scaling) for timed in (fitted_on, judged_on))
    weights_FA = _fitted(inputs_RF, space.efficiencies(fitted_on.survivals_RS), ~fitted_on.texts.unknown_R)
    own_RA, scores_RA = inputs_RF @ weights_FA, others_RF @ weights_FA
    modes = [
        Mode(*fitted_on.setting, static.action, (LIGHT,), static.speed, rho, space.chain_positions) for rho in RHOS
    ]
    mode = max(modes, key=lambda mode: replay_mode(fitted_on, {LIGHT: own_RA}, mode).speed)
    texts, at = judged_on.texts, space.index(EXAMPLE)
    gain = judge_mode(judged_on, {LIGHT: scores_RA.clamp(min=1)}, mode, static.action).ratio
    known_R = ~texts.unknown_R
    truth_R = space.efficiencies(judged_on.survivals_RS)[known_R, at]
    error_R = truth_R - scores_RA[known_R, at]
    explained = max(0.0, 1 - float(error_R.square().mean() / truth_R.var(unbiased=False).clamp(min=1e-12)))
    match_R = texts.scalars_RF[known_R, MATCH_AT]
    return Potential(explained, _autocorrelation(judged_on), float((match_R >= LONG_REPEAT).float().mean()), gain)


def _inputs(texts: Texts, mean_F: Tensor, scale_F: Tensor) -> Tensor:
    """Scalars and their squares, standardised, and a constant 1, [R, F]."""
    scaled_RF = ((texts.scalars_RF - mean_F) / scale_F).clamp(-4, 4)
    return torch.cat([scaled_RF, scaled_RF.square(), torch.ones_like(scaled_RF[:, :1])], dim=-1)


def _fitted(inputs_RF: Tensor, labels_RA: Tensor, rows_R: Tensor) -> Tensor:
    """Ridge regression on some rows, [F, A]."""
    inputs_RF, labels_RA = inputs_RF[rows_R].double(), labels_RA[rows_R].double()
    normal_FF = inputs_RF.T @ inputs_RF
    ridge_FF = RIDGE * len(inputs_RF) * torch.eye(len(normal_FF), dtype=torch.float64)
    ridge_FF[-1, -1] = 0
    return torch.linalg.solve(normal_FF + ridge_FF, inputs_RF.T @ labels_RA).float()


def _autocorrelation(timed: Timed) -> float:
    """Of the first survival of a chain, which is `min(1, q/p)` of the text's next token."""
    accepted_R = timed.survivals_RS[:, 0].double()
    accepted_R = accepted_R - accepted_R.mean()
    same_R = timed.texts.text_R[LAG:] == timed.texts.text_R[:-LAG]
    products_R = (accepted_R[LAG:] * accepted_R[:-LAG])[same_R]
    return float(products_R.mean() / accepted_R.square().mean().clamp(min=1e-12)) if bool(same_R.any()) else 0.0
