"""Seconds on grids of two sizes, and what they are in between.

Legend: L lengths, A actions, B roots, S tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Table:
    """Seconds on a grid of two sizes, linear in between and constant beyond."""

    lengths: list[int]
    sizes: list[int]
    seconds: list[list[float]]  # [length][size]

    def at(self, length: float, size: float) -> float:
        if (length, size) not in self._known:
            column = [np.interp(size, self.sizes, row) for row in self.seconds]
            self._known[length, size] = float(np.interp(length, self.lengths, column))
        return self._known[length, size]

    def along(self, length: float, size: float, stepped: bool) -> float:
        """As the function `along`, over the sizes."""
        seconds = [self.at(length, timed_size) for timed_size in self.sizes]
        return along(self.sizes, seconds, size, stepped)

    @classmethod
    def constant(cls, seconds: float) -> Table:
        return cls([0], [0], [[seconds]])

    @cached_property
    def _known(self) -> dict[tuple[float, float], float]:
        return {}  # earlier answers: hundreds of actions share a few forward passes


FREE = Table.constant(0.0)


def along(grid: Sequence[float], values: Sequence[float], x: float, stepped: bool) -> float:
    """A value at any size, linear between the timed ones and extrapolated beyond the largest. With
    `stepped`, a size in between costs what the next larger one does, because engines capture graphs
    at a few sizes and pad."""
    if x > grid[-1]:
        rise = 0.0
        if len(grid) > 1:
            rise = (values[-1] - values[-2]) / (grid[-1] - grid[-2])
        return values[-1] + max(0.0, rise) * (x - grid[-1])
    if stepped:
        return next(value for size, value in zip(grid, values, strict=True) if x <= size)
    return float(np.interp(x, grid, values))


def interpolated_at(table_SLA: Tensor, lengths_L: Tensor, at_B: Tensor, length_B: Tensor) -> Tensor:
    """Tables `at_B` (int64) at other lengths, linear in between and constant beyond, [B, A].
    Scriptable."""
    upper_B, share_B = places(lengths_L, length_B)
    share_B1 = share_B.unsqueeze(-1)
    return table_SLA[at_B, upper_B - 1] * (1 - share_B1) + table_SLA[at_B, upper_B] * share_B1


def places(lengths_L: Tensor, length_B: Tensor) -> tuple[Tensor, Tensor]:
    """Positions of the upper neighbours of some lengths on the grid, int64 [B], and the shares of
    the way to them from the lower ones, [B]. Scriptable."""
    length_B = length_B.to(lengths_L.dtype).clamp(lengths_L[0], lengths_L[-1])
    upper_B = torch.searchsorted(lengths_L, length_B.contiguous()).clamp(1, lengths_L.size(0) - 1)
    low_B, high_B = lengths_L[upper_B - 1], lengths_L[upper_B]
    return upper_B, (length_B - low_B) / (high_B - low_B)
