"""Loops of replay that Numba compiles if it is installed; without it they are plain Python, with the same results.

Replay needs it for its speed. Decisions do not: they are a few dozen calls of NumPy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

try:
    from numba import njit
except ModuleNotFoundError:
    njit = None  # type: ignore[assignment]

F = TypeVar("F", bound=Callable[..., object])
SUMS_IN_ANY_ORDER = {"reassoc", "contract", "nsz"}  # vectorises sums; NaN and infinity keep their meaning


def jit(function: F, kept: bool = True) -> F:
    """The function, compiled when it is first called, and kept on disk where that is possible.

    Numba compiles anew when the function's own file changes, but not when that of a compiled function which it calls
    does. So such functions stand in one file, or are not `kept`.
    """
    if njit is None:
        return function
    try:
        return cast(F, njit(cache=kept, fastmath=SUMS_IN_ANY_ORDER)(function))
    except RuntimeError:  # neither the package's folder nor the user's can be written to
        return cast(F, njit(fastmath=SUMS_IN_ANY_ORDER)(function))
