"""Loops that Numba compiles if it is installed; without it they run as plain Python, with the same results.

Replay needs it for its speed. Decisions do not: they are a few dozen calls of NumPy.

Legend: C slots, F scalars, D some of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numpy as np
from numpy.typing import NDArray

try:
    from numba import njit
except ModuleNotFoundError:
    njit = None  # type: ignore[assignment]

F = TypeVar("F", bound=Callable[..., object])
SUMS_IN_ANY_ORDER = {"reassoc", "contract", "nsz"}  # vectorises sums; NaN and infinity keep their meaning


def jit(function: F) -> F:
    """The function, compiled when it is first called, and kept on disk where that is possible.

    Numba compiles anew when the function's own file changes, but not when that of a compiled function which it calls
    does. So such functions stand in one file.
    """
    if njit is None:
        return function
    try:
        return cast(F, njit(cache=True, fastmath=SUMS_IN_ANY_ORDER)(function))
    except RuntimeError:  # neither the package's folder nor the user's can be written to
        return cast(F, njit(fastmath=SUMS_IN_ANY_ORDER)(function))


@jit
def slot(keys_C: NDArray[np.uint64], key: np.uint64) -> np.uint64:
    """The slot of a key in a hash table with open addressing, or the free slot (0) where it belongs.

    C is a power of two, at least one slot is free, and the key is not 0.
    """
    last = np.uint64(len(keys_C) - 1)
    mixed = key * np.uint64(0x9E3779B97F4A7C15)  # Fibonacci hashing: its upper bits depend on all of the key's
    at = (mixed ^ (mixed >> np.uint64(32))) & last
    while keys_C[at] != np.uint64(0) and keys_C[at] != key:
        at = (at + np.uint64(1)) & last
    return at


@jit
def put(found_F: NDArray[Any], at: int, values_D: NDArray[Any]) -> int:
    """Write values from a position on; returns the one after them. Numba compiles assignments to slices for seconds."""
    for value in values_D:
        found_F[at] = value
        at += 1
    return at


@jit
def key_of(kind: int, one: int, other: int) -> np.int64:
    """Two small numbers of one kind as one key of 63 bits, mixed as in SplitMix64."""
    mixed = np.uint64(0)
    for part in (kind, one, other):
        mixed = (mixed ^ np.uint64(part + 2)) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(27)
    return np.int64(mixed >> np.uint64(1))
