"""95% intervals of ratios over *sources* (files that prompts come from): the prompts of one file are not independent.

Of ratios of sums, the jackknife over sources gives the standard error of the logarithm, and Student's t the bounds,
with one degree of freedom less than the effective number of sources (Kish). With six sources or more, such intervals
contain the true ratio in 92 to 98% of cases. Clock noise, the training seed and the choice of the pair are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from scipy import stats
from torch import Tensor

from selector.train.replay import jackknifed, speed_ratio

LEVEL = 0.95


def speed(sums_2: Tensor) -> Tensor:
    """Tokens per second."""
    return sums_2[..., 0] / sums_2[..., 1]


def with_interval(
    sums_XC: Tensor, source_X: Tensor, figure: Callable[[Tensor], Tensor] = speed_ratio
) -> tuple[float, list[float]]:
    """A positive figure of sums of columns, and the bounds of its 95% interval: 0 and infinity for a single source,
    unless the figure is exactly 1.

    Args:
        sums_XC: positive columns, one row for each prompt or source.
        source_X: the source of each row, int64.
    """
    value = float(figure(sums_XC.double().sum(0)))
    names, group_X = source_X.unique(return_inverse=True)
    if len(names) == 1:
        return value, [value, value] if value == 1 else [0.0, math.inf]
    log = jackknifed(sums_XC, source_X, lambda sums_C: figure(sums_C).log())
    shares_X = (sums_XC.double() / sums_XC.double().sum(0)).mean(-1)
    shares_G = torch.zeros(len(names), dtype=torch.float64).index_add_(0, group_X, shares_X)
    width = float(stats.t.isf((1 - LEVEL) / 2, 1 / float(shares_G.square().sum()) - 1)) * log.error
    return value, (value * torch.tensor([-width, width], dtype=torch.float64).exp()).tolist()


def paired(logs_XR: Tensor, source_X: Tensor) -> tuple[float, list[float]]:
    """The geometric mean of ratios that were each measured on one prompt in one round, and its 95% interval: a
    t-interval of the mean logarithm over sources. The bounds of a single source are as in `with_interval`.

    Args:
        logs_XR: the ratios' logarithms by prompt and round. A prompt counts with the mean of its rounds, and a source
            with the mean of its prompts.
        source_X: the source of each prompt, int64.
    """
    names, group_X = source_X.unique(return_inverse=True)
    sums_G = torch.zeros(len(names), dtype=torch.float64).index_add_(0, group_X, logs_XR.double().mean(-1))
    means_G = sums_G / group_X.bincount()
    mean = float(means_G.mean())
    if len(names) == 1:
        return math.exp(mean), [1.0, 1.0] if mean == 0 else [0.0, math.inf]
    error = float(means_G.std()) / math.sqrt(len(names))
    width = float(stats.t.isf((1 - LEVEL) / 2, len(names) - 1)) * error
    return math.exp(mean), [math.exp(mean - width), math.exp(mean + width)]
