"""The ceiling that labels can support: the speed of choosing every root's tree by its own labels.

A root's best action by all its samples would look better than it is, for the best of 233 noisy labels was lucky. So it
is chosen by one half of the samples and scored by the other, and the halves change places. Labels that err a lot choose
badly, and then this stands below what a selector could reach, even below the best static tree: a ceiling of what these
labels can show, of decisions at the root, that cost no time.

Legend: B roots, A actions, 2 halves.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from selector.data import Roots, TracesModule, met_in_decoding, of_setting
from selector.deciding import Played
from selector.modes import jackknife_error, ratios, settled


@dataclass(frozen=True)
class Oracle:
    """Under one sampling setting, on the validation split.

    Attributes:
        ratio, error: speed over that of the best static tree, and its standard error over prompts.
    """

    ratio: float
    error: float

    def gap_closed(self, ratio: float) -> float | None:
        """A selector's gain over the best static tree as a share of the oracle's.

        None where the oracle is not ahead by a standard error: label noise leaves no ceiling above the static tree. (To
        decide takes two, for then something is at stake.)
        """
        return (ratio - 1) / (self.ratio - 1) if self.ratio - self.error > 1 else None


def oracles(traces: TracesModule) -> list[Oracle]:
    """For every sampling setting of the training split, in the order of `modes.judge`."""
    result = []
    for setting in traces.train.setting_B.unique().tolist():
        train, validation = (met_in_decoding(of_setting(split, setting)) for split in (traces.train, traces.validation))
        result.append(cross_fitted(train, validation))
    return result


def cross_fitted(train: Roots, validation: Roots) -> Oracle:
    """The oracle of the validation roots; the static tree and the speed g are those of the training roots."""
    static, speed = train.best_static()
    gain = settled(lambda g: _chosen(train, g), speed)
    ratio, without = ratios(_chosen(validation, gain), _always(validation, static))
    return Oracle(ratio, jackknife_error(ratio, without))


def _halves(roots: Roots) -> tuple[Tensor, Tensor]:
    """Block efficiencies from either half of the samples, [B, A] each."""
    return roots.half_BA, 2 * roots.mean_BA - roots.half_BA


def _chosen(roots: Roots, gain: float) -> Played:
    """Each root's best action by one half when time is charged at `gain` tokens per second, scored by the other."""
    first_BA, second_BA = _halves(roots)
    costs_BA = gain * roots.static_seconds_BA
    return _scored(roots, torch.stack([(half_BA - costs_BA).argmax(-1) for half_BA in (second_BA, first_BA)], dim=-1))


def _always(roots: Roots, action: int) -> Played:
    return _scored(roots, torch.full((len(roots), 2), action))


def _scored(roots: Roots, action_B2: Tensor) -> Played:
    """What an action for each half yields by the labels of that half."""
    tokens_B2A = torch.stack(_halves(roots), dim=1)
    tokens_B2 = tokens_B2A.gather(-1, action_B2.unsqueeze(-1))[..., 0]
    weight_B1 = roots.weight_B.unsqueeze(-1)
    seconds_B2 = roots.static_seconds_BA.gather(-1, action_B2)
    return Played(action_B2, weight_B1 * tokens_B2, weight_B1 * seconds_B2, roots.prompt_B)
