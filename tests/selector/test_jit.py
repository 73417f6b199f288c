"""Compiled functions, also where nothing can be kept on disk."""

from __future__ import annotations

import numpy as np
import pytest

from selector.jit import jit


def test_a_function_without_a_file_is_compiled_all_the_same() -> None:
    """As where neither the package's folder nor the user's may be written to: Numba has no place to keep it."""
    names: dict = {}
    exec("def total(values):\n    sum = 0.0\n    for v in values:\n        sum += v\n    return sum", names)
    assert jit(names["total"])(np.arange(5.0)) == 10.0


def test_not_a_number_stays_one() -> None:
    @jit
    def finite(values: np.ndarray) -> bool:
        return bool(np.isfinite(values).all())

    assert finite(np.ones(3))
    assert not finite(np.array([1.0, np.nan]))
    assert not finite(np.array([np.inf, 1.0]))


@pytest.mark.parametrize("count", [1, 3, 8, 1000])
def test_sums_are_right_in_any_order(count: int) -> None:
    @jit
    def total(values: np.ndarray) -> float:
        result = 0.0
        for value in values:
            result += value
        return result

    assert total(np.arange(count) / 8) == sum(n / 8 for n in range(count))  # sums of eighths have no rounding
