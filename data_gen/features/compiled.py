"""What the histories of a text share: growing arrays, running means, tables of runs of tokens, and lookups' sources.

Legend: N tokens, F scalars, D decays of running means, C slots of a table.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selector.jit import jit, slot
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
    """Keys and counts of an empty table, at most half full with so many entries."""
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
def count_runs(tokens_N: Array, begin: int, end: int, keys_C: Array, counts_C: Array, longest: int) -> None:
    """Count the runs of up to `longest` tokens whose last token is one of those from `begin` to `end`."""
    for last in range(begin, end):
        run = np.uint64(0)
        for n in range(min(longest, last + 1)):
            run = longer(run, tokens_N[last - n])
            at = slot(keys_C, run)
            keys_C[at] = run
            counts_C[at] += 1


@jit
def longer(run: np.uint64, before: int) -> np.uint64:
    """The key of a run of tokens with one more before it: 64 bits, never 0, mixed as in SplitMix64."""
    run = (run ^ np.uint64(before + 1)) * np.uint64(0xBF58476D1CE4E5B9)
    run = (run ^ (run >> np.uint64(30))) * np.uint64(0x94D049BB133111EB)
    return max(run ^ (run >> np.uint64(27)), np.uint64(1))


@jit
def in_a_row(right_N: Array, source: int, most: int) -> int:
    """How many tokens after the source were right before the first wrong one."""
    count = 0
    while source >= 0 and count < most and source + 1 + count < len(right_N) and right_N[source + 1 + count] > 0:
        count += 1
    return count


@jit
def shares(found_F: Array, at: int, right_N: Array, source: int, lengths: Array) -> int:
    """Write the shares of right tokens among the first few after the source; returns the position after them."""
    for number in range(len(lengths)):
        some_N = right_N[source + 1 : source + 1 + lengths[number]]
        found_F[at + number] = some_N.mean() if source >= 0 and len(some_N) > 0 else 0.0
    return at + len(lengths)


@jit
def alike_before(tokens_N: Array, end: int, most: int) -> int:
    """The length of the match of the text's end at position `end`."""
    count, last = 0, len(tokens_N) - 1
    while count < most and end - count >= 0 and tokens_N[end - count] == tokens_N[last - count]:
        count += 1
    return count


@jit
def alike_after(tokens_N: Array, one: int, other: int, most: int) -> int:
    """How many first tokens two lookups from different sources have in common."""
    count = 0
    if one >= 0 and other >= 0:
        while count < most and copied_token(tokens_N, one, count) == copied_token(tokens_N, other, count):
            count += 1
    return count


@jit
def copied_token(tokens_N: Array, source: int, n: int) -> int:
    """The n-th token of a lookup, which may continue into the tokens that it copied."""
    return tokens_N[source + 1 + n % (len(tokens_N) - 1 - source)]


@jit
def precedents(
    found_F: Array,
    at: int,
    tokens_N: Array,
    source: int,
    keys_C: Array,
    counts_C: Array,
    lengths: Array,
    most_seen: int,
) -> None:
    """Write how often the text's last tokens occurred before, and how often a lookup's first token followed them."""
    end, followed = np.uint64(0), longer(np.uint64(0), tokens_N[source + 1])
    number = 0
    for n in range(1, lengths[-1] + 1):
        before, agree = 0, 0
        if source >= 0 and n <= len(tokens_N):
            end, followed = longer(end, tokens_N[-n]), longer(followed, tokens_N[-n])
            before = counts_C[slot(keys_C, end)] - 1
            agree = counts_C[slot(keys_C, followed)]
        if n == lengths[number]:
            found_F[at] = min(before, most_seen)
            found_F[at + 1] = agree / before if before > 0 else 0.0
            at, number = at + 2, number + 1
