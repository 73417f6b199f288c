"""Running means, growing arrays, and tables of runs of tokens: what all histories are made of.

Legend: N tokens, D decays of running means, C slots of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selector.jit import jit, slot

Array = NDArray[Any]
ROOM = 512  # numbers, at first


class Numbers:
    """Numbers that are added step by step, as one array."""

    def __init__(self) -> None:
        self._room, self._count = np.zeros(ROOM), 0

    def add(self, new: Sequence[float]) -> None:
        end = self._count + len(new)
        if end > len(self._room):
            self._room = np.concatenate([self._room[: self._count], np.zeros(end + ROOM)])
        self._room[self._count : end] = new
        self._count = end

    @property
    def array_N(self) -> Array:
        return self._room[: self._count]


def empty_table(entries: int) -> tuple[Array, Array]:
    """Keys and counts, of which at most half are taken."""
    slots = 1 << (2 * entries + 1).bit_length()
    return np.zeros(slots, np.uint64), np.zeros(slots, np.int32)


@jit
def averaged(sums_2D: Array, decays_D: Array, new_N: Array) -> Array:
    """Running means of a number at every decay, [D]; 0 where there was none yet.

    Args:
        sums_2D: its sums and those of the weights, brought up to date here.
        new_N: its newest values.
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
def count_runs(tokens_N: Array, begin: int, end: int, keys_C: Array, counts_C: Array, longest: int) -> None:
    """Counts the runs of up to `longest` tokens that end at the tokens from `begin` to `end`."""
    for last in range(begin, end):
        run = np.uint64(0)
        for n in range(min(longest, last + 1)):
            run = longer(run, tokens_N[last - n])
            at = slot(keys_C, run)
            keys_C[at] = run
            counts_C[at] += 1


@jit
def longer(run: np.uint64, before: int) -> np.uint64:
    """The key of a run of tokens with one more before it, never 0: 64 bits, mixed as in SplitMix64.

    Two runs of a text of 100,000 tokens have the same key in one text of 10^8, where a count is then too high.
    """
    run = (run ^ np.uint64(before + 1)) * np.uint64(0xBF58476D1CE4E5B9)
    run = (run ^ (run >> np.uint64(30))) * np.uint64(0x94D049BB133111EB)
    return max(run ^ (run >> np.uint64(27)), np.uint64(1))
