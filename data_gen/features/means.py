"""Means that grow with the text: running ones, and shares that few values do not sway."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import compress, count
from operator import not_

from selector.schema import DECAYS

FADING = 0.95  # weight of a value of a share, relative to the next one


class RunningMeans:
    """The running means of a number at each of `DECAYS`."""

    def __init__(self) -> None:
        self._sums, self._count = [0.0] * len(DECAYS), 0

    def add(self, value: float) -> None:
        self._sums = [decay * total + value for decay, total in zip(DECAYS, self._sums, strict=True)]
        self._count += 1

    def values(self) -> list[float]:
        """The means, 0 before the first value."""
        weights = _weights(max(self._count, 1))
        return [total / weight for total, weight in zip(self._sums, weights, strict=True)]


@lru_cache(maxsize=16)  # several numbers have the same count
def _weights(count: int) -> list[float]:
    return [(1 - decay**count) / (1 - decay) for decay in DECAYS]


class Share:
    """A mean that is shrunk towards a usual value, as if this had been seen twice."""

    __slots__ = ("_total", "count")

    def __init__(self) -> None:
        self.count = self._total = 0.0

    def add(self, value: float, fading: float = FADING) -> None:
        self.count = fading * self.count + 1
        self._total = fading * self._total + value

    def value(self, usual: float) -> float:
        return (self._total + 2 * usual) / (self.count + 2)


def means_of_first(values: Sequence[float], counts: Sequence[int], none: float) -> list[float]:
    """The means of the first so many values; `none` where there are no values."""
    if not values:
        return [none] * len(counts)
    return [sum(values[:most]) / min(most, len(values)) for most in counts]


def in_a_row(values: Sequence[float]) -> int:
    """How many values there are before the first 0."""
    return next(compress(count(), map(not_, values)), len(values))
