"""Functions that Numba compiles: for what is asked between two passes of a model, where every call counts.

There the processor's caches hold the model, and a call of torch or NumPy takes some ten microseconds whatever it
computes. One compiled function in place of two dozen calls takes as long as one of them.

Numba keeps compiled code on disk until its own file changes, and in it what it took from other files. So constants of
other files are arguments, and whoever changes `slot` removes the `__pycache__` folders.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., object])

# sums may be taken in any order, which is what makes them fast; NaN and infinity keep their meaning
SUMS_IN_ANY_ORDER = {"reassoc", "contract", "nsz"}


def jit(function: F) -> F:
    """The function, compiled when it is first called, and kept on disk where there is a place for it."""
    try:
        made = numba.njit(cache=True, fastmath=SUMS_IN_ANY_ORDER)(function)
    except RuntimeError:  # neither the package's folder nor the user's can be written to
        made = numba.njit(fastmath=SUMS_IN_ANY_ORDER)(function)
    return cast(F, made)


@jit
def slot(keys_C: NDArray[np.uint64], key: np.uint64) -> np.uint64:
    """Where a key stands in a table, or would stand: open addressing, a power of two of slots, free where they hold 0.

    Args:
        keys_C: at least one slot is free.
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
    """Two small numbers of one kind as one key: 63 bits, mixed as in SplitMix64.

    Two of a million keys are the same in one case of 10^7, where the means of both are mixed.
    """
    mixed = np.uint64(0)
    for part in (kind, one, other):
        mixed = (mixed ^ np.uint64(part + 2)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(27)
    return np.int64(mixed >> np.uint64(1))
