"""Functions that Numba compiles, for what is asked between two passes of a model.

There the processor's caches hold the model, and a call of torch or NumPy takes some ten microseconds whatever it
computes. One compiled function takes as long as one of the two dozen calls that it replaces.

Numba keeps compiled code on disk until its own file changes, and with it what it took from other files. So constants of
other files are arguments, and whoever changes `slot` or `selector.tables.place` removes the `__pycache__` folders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., object])

# sums may be taken in any order, which makes them fast; NaN and infinity keep their meaning
SUMS_IN_ANY_ORDER = {"reassoc", "contract", "nsz"}


def jit(function: F) -> F:
    """The function, compiled when it is first called, and kept on disk where that is possible."""
    try:
        made = numba.njit(cache=True, fastmath=SUMS_IN_ANY_ORDER)(function)
    except RuntimeError:  # neither the package's folder nor the user's can be written to
        made = numba.njit(fastmath=SUMS_IN_ANY_ORDER)(function)
    return cast(F, made)


@jit
def slot(keys_C: NDArray[np.uint64], key: np.uint64) -> np.uint64:
    """Where a key stands in a hash table, or would stand: open addressing, slots that hold 0 are free.

    Args:
        keys_C: C is a power of two, and at least one slot is free.
        key: not 0.
    """
    last = np.uint64(len(keys_C) - 1)
    mixed = key * np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing: its upper bits depend on all of the key's
    at = (mixed ^ (mixed >> np.uint64(32))) & last
    while keys_C[at] != np.uint64(0) and keys_C[at] != key:
        at = (at + np.uint64(1)) & last
    return at


@jit
def key_of(kind: int, one: int, other: int) -> np.int64:
    """Two small numbers of one kind as one key of 63 bits, mixed as in SplitMix64.

    With a million keys, two are equal with a probability of 10^-7; the means of both are then mixed.
    """
    mixed = np.uint64(0)
    for part in (kind, one, other):
        mixed = (mixed ^ np.uint64(part + 2)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(27)
    return np.int64(mixed >> np.uint64(1))
