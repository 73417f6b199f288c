"""Compiled functions, also where nothing can be kept on disk."""

from __future__ import annotations

import importlib
import sys
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


def test_a_change_of_a_called_functions_file_compiles_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that is called through another function, too."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "kept"))
    sources = {
        "lowest": "@jit\ndef lowest(x: float) -> float:\n    return x + 1\n",
        "middle": "from lowest import lowest\n@jit\ndef middle(x: float) -> float:\n    return lowest(x)\n",
        "top": "from middle import middle\n@jit\ndef top(x: float) -> float:\n    return middle(x)\n",
    }
    for name, text in sources.items():
        (tmp_path / f"{name}.py").write_text(f"from selector.jit import jit\n{text}")
    monkeypatch.syspath_prepend(tmp_path)

    def loaded() -> Any:
        for name in sources:
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        return importlib.import_module("top").top

    for expected, reused in ((2.0, False), (2.0, True)):
        top = loaded()
        assert top(1.0) == expected and bool(top.stats.cache_hits) == reused
    (tmp_path / "lowest.py").write_text(f"from selector.jit import jit\n{sources['lowest']}".replace("x + 1", "x + 10"))
    top = loaded()
    assert top(1.0) == 11.0 and not top.stats.cache_hits
    for name in sources:
        sys.modules.pop(name)
