"""Does a selector pay here? What can be said before anything is trained.

A selector gains where acceptance differs from place to place (autocorrelation: hard text stays hard for a while), where
what is known at a root tells it (explained variance), and where trees differ in time. The answer is the replayed gain
of a small quick model: linear in the scalars and their squares, fitted in closed form on the sources of one half of the
texts, and judged on the others.

Legend: R roots, F inputs, A actions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selector.actions import Action
from selector.decision import RHOS, Mode
from selector.schema import LIGHT, SCALAR_NAMES
from selector.train.data import Texts, Timed
from selector.train.replay import Ratio, ratio_of_speeds
from selector.train.tuning import StaticTable, best_static, replay_mode, sources, static_replay

EXAMPLE = Action(1, 8, 0)  # the tree whose block efficiency is explained
LONG_REPEAT = 8  # tokens
LAG = 4  # tokens
RIDGE = 1e-2  # of the quick model, as a share of the inputs' variance


@dataclass(frozen=True)
class Potential:
    """What was found under one sampling setting.

    Attributes:
        explained: share of the variance of the labels of a chain of 8 that the quick model explains on other sources;
            0 where the labels' mean says more.
        autocorrelation: of `min(1, q/p)` of the text's tokens, four tokens apart.
        repeats: share of the positions inside a repeat of 8 or more tokens.
        gain: speed over the best static tree by replay, decisions paid for.
    """

    explained: float
    autocorrelation: float
    repeats: float
    gain: Ratio


def potential(fitted_on: Timed, judged_on: Timed) -> Potential:
    """Of texts of some sources, judged on texts of others."""
    space = fitted_on.space
    static = _static(fitted_on)
    inputs = _Inputs(fitted_on.texts)
    labels_RA = space.efficiencies(fitted_on.survivals_RS)
    rows_R = ~fitted_on.texts.unknown_R
    weights_FA = inputs.fit(fitted_on.texts, labels_RA, rows_R)
    scores = {id(timed): inputs.of(timed.texts) @ weights_FA for timed in (fitted_on, judged_on)}
    modes = [Mode(*fitted_on.setting, static.action, (LIGHT,), static.speed, rho, _chains(fitted_on)) for rho in RHOS]
    mode = max(modes, key=lambda mode: replay_mode(fitted_on, {LIGHT: scores[id(fitted_on)]}, mode).speed)
    gain = ratio_of_speeds(
        replay_mode(judged_on, {LIGHT: scores[id(judged_on)].clamp(min=1)}, mode),
        static_replay(judged_on, static.action),
        sources(judged_on.texts),
    )
    texts, at = judged_on.texts, space.index(EXAMPLE)
    kept_R = ~texts.unknown_R
    truth_R = space.efficiencies(judged_on.survivals_RS)[kept_R, at]
    error_R = truth_R - scores[id(judged_on)][kept_R, at]
    explained = max(0.0, 1 - float(error_R.square().mean() / truth_R.var(unbiased=False).clamp(min=1e-12)))
    match_R = texts.scalars_RF[kept_R, SCALAR_NAMES.index("match")]
    repeats = float((match_R >= LONG_REPEAT).float().mean())
    return Potential(explained, _autocorrelation(judged_on), repeats, gain)


def _static(timed: Timed) -> Mode:
    """The best static tree."""
    return best_static(timed, StaticTable.of(timed), timed.setting)


def _chains(timed: Timed) -> tuple[int, ...]:
    """Chains, and the best static tree's own kind of tree: a quick model should not be led astray by noisy branches."""
    space = timed.space
    return tuple(sorted({space.index(space.chain(length)) for length in range(space.depth + 1)}))


class _Inputs:
    """Scalars and their squares, standardised, and a one."""

    def __init__(self, texts: Texts) -> None:
        rows_RF = texts.scalars_RF[~texts.unknown_R]
        self.mean_F, self.scale_F = rows_RF.mean(0), rows_RF.std(0).clamp(min=1e-6)

    def of(self, texts: Texts) -> Tensor:
        """[R, inputs]."""
        scaled_RF = ((texts.scalars_RF - self.mean_F) / self.scale_F).clamp(-4, 4)
        return torch.cat([scaled_RF, scaled_RF.square(), torch.ones_like(scaled_RF[:, :1])], dim=-1)

    def fit(self, texts: Texts, labels_RA: Tensor, rows_R: Tensor) -> Tensor:
        """Ridge regression, [inputs, A]."""
        inputs_RF, labels_RA = self.of(texts)[rows_R].double(), labels_RA[rows_R].double()
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
