"""Tables of seconds: on a grid of two sizes, and of the passes of several requests together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise


@dataclass(frozen=True)
class Table:
    """Seconds on a grid of two sizes; linear in between, constant beyond: measure what you serve."""

    lengths: list[int]
    sizes: list[int]
    seconds: list[list[float]]  # [length][size]

    def __post_init__(self) -> None:
        """ValueError or TypeError where this is no grid of times."""
        for grid in (self.lengths, self.sizes):
            check_grid(grid)
        rows = [list(map(number, row)) for row in self.seconds]
        if [len(row) for row in rows] != [len(self.sizes)] * len(self.lengths) or min(map(min, rows)) < 0:
            raise ValueError("one time for every length and size, and none below 0")

    def at(self, length: float, size: float) -> float:
        if (length, size) not in self._known:
            columns = [_interpolate(self.sizes, row, size) for row in self.seconds]
            self._known[length, size] = _interpolate(self.lengths, columns, length)
        return self._known[length, size]

    @cached_property
    def _known(self) -> dict[tuple[float, float], float]:
        """What was asked for before: the steps of hundreds of actions consist of the same few passes."""
        return {}


def check_grid(grid: Sequence[int]) -> None:
    """ValueError unless the sizes ascend, from 0 on."""
    if not grid or any(b <= a for a, b in pairwise([-1, *grid])):
        raise ValueError("sizes ascend, from 0 on")


def number(value: object) -> float:
    """A finite number as it is; TypeError or ValueError where it is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    if not math.isfinite(value):
        raise ValueError(f"{value} is not finite")
    return value


FREE = Table([1], [1], [[0.0]])  # what takes no time of its own


def _interpolate(grid: Sequence[int], values: Sequence[float], x: float) -> float:
    x = min(max(x, grid[0]), grid[-1])
    if x == grid[-1]:
        return values[-1]
    i = next(i for i in range(len(grid)) if x < grid[i + 1])
    share = (x - grid[i]) / (grid[i + 1] - grid[i])
    return values[i] + share * (values[i + 1] - values[i])


def along(grid: Sequence[int], values: Sequence[float], x: float, stepped: bool) -> float:
    """A value between and beyond timed sizes.

    Engines capture a graph at a few sizes and pad to the next one, so with `stepped` a size in between costs what the
    next larger one does; otherwise it is linear in between. Beyond the largest size there is no graph, and the value
    rises as it did last.
    """
    if x > grid[-1]:
        rise = (values[-1] - values[-2]) / (grid[-1] - grid[-2]) if len(grid) > 1 else 0.0
        return values[-1] + max(0.0, rise) * (x - grid[-1])
    if stepped:
        return next(value for size, value in zip(grid, values, strict=True) if x <= size)
    return _interpolate(grid, values, x)


@dataclass(frozen=True)
class Batches:
    """Times of passes over several requests that an engine decodes together, each with its own chain or tree.

    Attributes:
        sizes: how many requests, ascending.
        draft: for each of them, one draft pass over one token of each request, by context length.
        target: for each of them, the rest of a step, by context length and verified tokens of a request, its root
            included.
        stepped: as in `along`, for requests and for tokens.
    """

    sizes: list[int]
    draft: list[Table]
    target: list[Table]
    stepped: bool

    def __post_init__(self) -> None:
        """ValueError where these are no tables of several requests."""
        check_grid(self.sizes)
        if not self.sizes[0] or not len(self.sizes) == len(self.draft) == len(self.target):
            raise ValueError("two tables for every number of requests")
        if not isinstance(self.stepped, bool):
            raise TypeError("stepped is no bool")

    def at(self, batch: int, tokens: int) -> tuple[Table, Table]:
        """One draft pass, and the rest of a step, for a number of requests; with a time for each of so many tokens."""
        lengths = sorted({length for table in self.target for length in table.lengths})
        every = list(range(1, tokens + 1))
        return (
            Table(lengths, [1], [self._seconds(self.draft, length, batch, [1]) for length in lengths]),
            Table(lengths, every, [self._seconds(self.target, length, batch, every) for length in lengths]),
        )

    def _seconds(self, tables: list[Table], length: int, batch: int, sizes: list[int]) -> list[float]:
        """At one context length, for each of some sizes."""
        timed = [(table.sizes, [table.at(length, size) for size in table.sizes]) for table in tables]
        each = ([along(*own, size, self.stepped) for own in timed] for size in sizes)
        return [along(self.sizes, values, batch, self.stepped) for values in each]
