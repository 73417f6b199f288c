"""Functions that Numba compiles: loops over numbers that no array operation expresses."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from numba import njit

F = TypeVar("F", bound=Callable[..., object])
# vectorises sums; NaN and infinity keep their meaning
SUMS_IN_ANY_ORDER = {"reassoc", "contract", "nsz"}


def jit(function: F, kept: bool = True) -> F:
    """The function, compiled when it is first called, and kept on disk where that is possible.

    Numba compiles anew when the function's own file changes, but not when that of a compiled
    function which it calls does. So such functions stand in one file, or are not `kept`.
    """
    try:
        return cast(F, njit(cache=kept, fastmath=SUMS_IN_ANY_ORDER)(function))
    except RuntimeError:  # neither the package's folder nor the user's can be written to
        return cast(F, njit(fastmath=SUMS_IN_ANY_ORDER)(function))
