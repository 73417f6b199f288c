"""What the histories of a text share: constants, growing arrays, running means, and keys and tables of runs of tokens.

Legend: N tokens, D decays of running means, C slots of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selector.jit import jit
from selector.schema import DECAYS, LONGEST_LOOKUP, LONGEST_MATCH, MOST_SEEN, PRECEDENT_LENGTHS, SOURCE_LENGTHS

Array = NDArray[Any]
ROOM = 512  # initial size of arrays and tables
# Numba caches compiled code until its own file changes, so constants of other files are arguments of compiled functions
DECAYS_D, SOURCES, PRECEDENTS = np.array(DECAYS), np.array(SOURCE_LENGTHS), np.array(PRECEDENT_LENGTHS)
CAPS = LONGEST_MATCH, LONGEST_LOOKUP, MOST_SEEN


class Numbers:
    """A growing array."""

    def __init__(self) -> None:
        self._room, self._count = np.zeros(ROOM), 0

    def add(self, new: Sequence[float] | Array) -> None:
        end = self._count + len(new)
        if end > len(self._room):
            self._room = np.concatenate([self._room[: self._count], np.zeros(end + ROOM)])
        self._room[self._count : end] = new
        self._count = end

    @property
    def array_N(self) -> Array:
        return self._room[: self._count]


def empty_table(entries: int) -> tuple[Array, Array]:
    """Keys and counts of an empty table, which is at most half full with `entries` entries."""
    slots = 1 << (2 * entries + 1).bit_length()
    return np.zeros(slots, np.uint64), np.zeros(slots, np.int32)


@jit
def averaged(sums_2D: Array, decays_D: Array, new_N: Array) -> Array:
    """Running means of a number at every decay, [D], or 0 before its first value.

    Args:
        sums_2D: sums of the values and of the weights, updated here.
        new_N: the newest values.
    """
    means_D = np.zeros(len(decays_D))
    for d in range(len(decays_D)):
        for n in range(len(new_N)):
            sums_2D[0, d] = decays_D[d] * sums_2D[0, d] + new_N[n]
            sums_2D[1, d] = decays_D[d] * sums_2D[1, d] + 1
        if sums_2D[1, d] > 0:
            means_D[d] = sums_2D[0, d] / sums_2D[1, d]
    return means_D


@jit
def longer(run: np.uint64, before: int) -> np.uint64:
    """The key of a run of tokens with one more before it: 64 bits, never 0, mixed as in SplitMix64."""
    run = (run ^ np.uint64(before + 1)) * np.uint64(0xBF58476D1CE4E5B9)
    run = (run ^ (run >> np.uint64(30))) * np.uint64(0x94D049BB133111EB)
    return max(run ^ (run >> np.uint64(27)), np.uint64(1))
