"""Functions that Numba compiles, where it is installed: loops over numbers that no array operation
expresses."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., object])
# vectorises sums; NaN and infinity keep their meaning
SUMS_IN_ANY_ORDER = {"reassoc", "contract", "nsz"}


class _Uncompiled:
    """Stands for a function until it is first called. Only then is Numba imported: vLLM walks
    through all modules when it starts, and fails at llvmlite's."""

    def __init__(self, function: Callable[..., object], kept: bool) -> None:
        self.py_func = function
        self._kept = kept
        self._compiled: Callable[..., object] | None = None
        update_wrapper(self, function)

    def __call__(self, *args: Any) -> Any:
        return self.compiled()(*args)

    def compiled(self) -> Callable[..., object]:
        """The compiled function, which calls compiled ones; without Numba the function itself."""
        if self._compiled is None:
            self._compiled = _compiled(self.py_func, self._kept)
            names = self.py_func.__globals__
            for name, value in list(names.items()):
                if isinstance(value, _Uncompiled):
                    names[name] = value.compiled()
        return self._compiled


def jit(function: F, kept: bool = True) -> F:
    """The function, compiled when it is first called, and kept on disk where that is possible.

    Numba compiles anew when the function's own file changes, but not when that of a compiled
    function which it calls does. So such functions stand in one file, or are not `kept`.
    """
    return cast(F, _Uncompiled(function, kept))


def _compiled(function: Callable[..., object], kept: bool) -> Callable[..., object]:
    try:
        from numba import njit
    except ImportError:
        return function
    try:
        return njit(cache=kept, fastmath=SUMS_IN_ANY_ORDER)(function)
    except RuntimeError:  # neither the package's folder nor the user's can be written to
        return njit(fastmath=SUMS_IN_ANY_ORDER)(function)
