"""The source of a lookup, the place that it copies from: what was right there, and what stood there alike.

Legend: N tokens, F scalars.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_gen.features.runs import longer
from selector.jit import jit, slot

Array = NDArray[Any]


@jit
def in_a_row(right_N: Array, source: int, most: int) -> int:
    """How many of the tokens after the source were right, from the first on."""
    count = 0
    while source >= 0 and count < most and source + 1 + count < len(right_N) and right_N[source + 1 + count] > 0:
        count += 1
    return count


@jit
def shares(found_F: Array, at: int, right_N: Array, source: int, lengths: Array) -> int:
    """Which share of the first few tokens after the source was right, of those that are there; the position after."""
    for number in range(len(lengths)):
        some_N = right_N[source + 1 : source + 1 + lengths[number]]
        found_F[at + number] = some_N.mean() if source >= 0 and len(some_N) > 0 else 0.0
    return at + len(lengths)


@jit
def alike_before(tokens_N: Array, end: int, most: int) -> int:
    """How many of the text's last tokens stand before and at a position, too."""
    count, last = 0, len(tokens_N) - 1
    while count < most and end - count >= 0 and tokens_N[end - count] == tokens_N[last - count]:
        count += 1
    return count


@jit
def alike_after(tokens_N: Array, one: int, other: int, most: int) -> int:
    """How many tokens two lookups from different sources have in common, from the first on."""
    count = 0
    if one >= 0 and other >= 0:
        while count < most and copied_token(tokens_N, one, count) == copied_token(tokens_N, other, count):
            count += 1
    return count


@jit
def copied_token(tokens_N: Array, source: int, n: int) -> int:
    """The n-th token of a lookup from a source, which may run on into what it has copied itself."""
    return tokens_N[source + 1 + n % (len(tokens_N) - 1 - source)]


@jit
def source_entropies(
    found_F: Array, entropies_N: Array, place: tuple[int, int, int], lengths: Array, usual: float
) -> None:
    """Means of the target's entropies before the first few tokens that a lookup would copy, and which share of the most
    of them is known.

    Args:
        entropies_N: of each token after the prompt.
        place: tokens of the prompt, the source, the position of the first scalar.
        usual: what stands where none is known.
    """
    start, source, at = place
    distance, total, known, number = start + len(entropies_N) - 1 - source, 0.0, 0, 0
    for n in range(lengths[-1]):
        copied = source + 1 + n % distance - start
        if source >= 0 and copied >= 0:
            total += entropies_N[copied]
            known += 1
        if n + 1 == lengths[number]:
            found_F[at + number] = total / known if known > 0 else usual
            number += 1
    found_F[at + number] = known / lengths[-1]


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
    """How often the text's last tokens stood in it before, and which share of these the token followed that a lookup
    would copy first."""
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
