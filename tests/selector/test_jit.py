"""Compiled functions, also where nothing can be kept on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numba
import numpy as np
import pytest

from selector.jit import jit, slot


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


def test_damaged_code_is_compiled_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut short, with flipped bits, or of another source. Where nothing can be kept, this costs time alone."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))

    def reused() -> bool:
        found: Any = jit(cast(Any, slot).py_func)
        keys_C = np.array([0, 7, 0, 0], np.uint64)
        assert keys_C[found(keys_C, np.uint64(7))] == 7
        return bool(found.stats.cache_hits)

    assert not reused()
    (file,) = tmp_path.rglob("*.nbc")
    whole = file.read_bytes()
    assert reused()
    middle = len(whole) // 2
    flipped = bytes(byte ^ 1 for byte in whole[middle : middle + 200])
    for damaged in (b"", whole[:middle], whole[:middle] + flipped + whole[middle + 200 :]):
        file.write_bytes(damaged)
        assert not reused()
        assert reused()
    file.unlink()
    file.mkdir()
    assert not reused()
