"""Tables of seconds on a grid of two sizes, and for passes over several requests together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from math import isfinite

import numpy as np


@dataclass(frozen=True)
class Table:
    """Seconds on a grid of two sizes, linear in between and constant beyond; ValueError or TypeError for other data."""

    lengths: list[int]
    sizes: list[int]
    seconds: list[list[float]]  # [length][size]

    def __post_init__(self) -> None:
        check_grid(self.lengths)
        check_grid(self.sizes)
        rows = [list(map(number, row)) for row in self.seconds]
        if [len(row) for row in rows] != [len(self.sizes)] * len(self.lengths) or min(map(min, rows)) < 0:
            raise ValueError("every length and size needs a time, and none may be below 0")

    def at(self, length: float, size: float) -> float:
        if (length, size) not in self._known:
            column = [np.interp(size, self.sizes, row) for row in self.seconds]
            self._known[length, size] = float(np.interp(length, self.lengths, column))
        return self._known[length, size]

    @cached_property
    def _known(self) -> dict[tuple[float, float], float]:
        return {}  # earlier answers: the steps of hundreds of actions consist of the same few passes


def check_grid(grid: Sequence[int]) -> None:
    if not grid or any(b <= a for a, b in pairwise([-1, *grid])):
        raise ValueError("sizes must ascend, from 0 on")


def number(value: object) -> float:
    """The value itself if it is a finite number; TypeError or ValueError for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    if not isfinite(value):
        raise ValueError(f"{value} is not finite")
    return value


FREE = Table([1], [1], [[0.0]])  # zero seconds


def along(grid: Sequence[int], values: Sequence[float], x: float, stepped: bool) -> float:
    """A value between and beyond timed sizes.

    With `stepped`, a size in between costs what the next larger one does, because engines capture graphs at a few sizes
    and pad to the next one. Otherwise values are linear in between. Beyond the largest size they are extrapolated.
    """
    if x > grid[-1]:
        rise = (values[-1] - values[-2]) / (grid[-1] - grid[-2]) if len(grid) > 1 else 0.0
        return values[-1] + max(0.0, rise) * (x - grid[-1])
    if stepped:
        return next(value for size, value in zip(grid, values, strict=True) if x <= size)
    return float(np.interp(x, grid, values))


@dataclass(frozen=True)
class Batches:
    """Times of passes over several requests together; ValueError or TypeError for other data."""

    sizes: list[int]  # batch sizes, ascending
    draft: list[Table]  # for each size, one draft pass, by context length and width: a step's first one has 2
    target: list[Table]  # for each size, the rest of a step, by context length and verified tokens with the root
    stepped: bool  # as in `along`, for requests and for tokens

    def __post_init__(self) -> None:
        check_grid(self.sizes)
        if not self.sizes[0] or not len(self.sizes) == len(self.draft) == len(self.target):
            raise ValueError("every number of requests needs two tables")
        if not isinstance(self.stepped, bool):
            raise TypeError("stepped must be true or false")

    def at(self, batch: int, tokens: int) -> tuple[Table, Table]:
        """The draft pass and the rest of a step for a batch size, the latter for 1 to `tokens` tokens."""
        lengths = sorted({length for table in self.target for length in table.lengths})
        every = list(range(1, tokens + 1))
        return (
            Table(lengths, [1, 2], [self._seconds(self.draft, length, batch, [1, 2]) for length in lengths]),
            Table(lengths, every, [self._seconds(self.target, length, batch, every) for length in lengths]),
        )

    def _seconds(self, tables: list[Table], length: int, batch: int, sizes: list[int]) -> list[float]:
        timed = [(table.sizes, [table.at(length, size) for size in table.sizes]) for table in tables]
        each = ([along(*own, size, self.stepped) for own in timed] for size in sizes)
        return [along(self.sizes, values, batch, self.stepped) for values in each]
