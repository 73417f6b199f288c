"""Whether predicted block efficiencies are those that were labelled.

Legend: B roots.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

GROUPS = 10


@dataclass(frozen=True)
class Group:
    """Roots of similar predictions: their number, and means in tokens.

    Attributes:
        error: standard error of `labelled`, over prompts, whose roots are not independent; None for a single prompt.
    """

    roots: int
    predicted: float
    labelled: float
    error: float | None


def calibration(predicted_B: Tensor, labelled_B: Tensor, prompt_B: Tensor, groups: int = GROUPS) -> list[Group]:
    """Groups of equally many roots, from the lowest predictions to the highest; fewer than asked for if roots are few.

    Args:
        predicted_B, labelled_B: block efficiencies of one action per root, in tokens.
        prompt_B: numbers of the roots' prompts.
    """
    order_B = predicted_B.argsort(stable=True)
    parts = [part for part in order_B.tensor_split(groups) if len(part)]
    return [_group(predicted_B[part].double(), labelled_B[part].double(), prompt_B[part]) for part in parts]


def expected_error(groups: list[Group]) -> float:
    """The expected calibration error: mean distance of predicted from labelled means, weighted by roots, in tokens."""
    return sum(g.roots * abs(g.predicted - g.labelled) for g in groups) / sum(g.roots for g in groups)


def _group(predicted_B: Tensor, labelled_B: Tensor, prompt_B: Tensor) -> Group:
    _, prompt_B = prompt_B.unique(return_inverse=True)
    prompts = int(prompt_B.max()) + 1
    residuals_P = torch.zeros(prompts, dtype=torch.float64).index_add_(0, prompt_B, labelled_B - labelled_B.mean())
    error = None
    if prompts > 1:
        error = math.sqrt(prompts / (prompts - 1) * float(residuals_P.square().sum())) / len(labelled_B)
    return Group(len(labelled_B), float(predicted_B.mean()), float(labelled_B.mean()), error)
