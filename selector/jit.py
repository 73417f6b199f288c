"""Functions that Numba compiles: for what is asked between two passes of a model, where every call counts.

There the processor's caches hold the model, and a call of torch or NumPy takes some ten microseconds whatever it
computes. One compiled function in place of two dozen calls takes as long as one of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

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
