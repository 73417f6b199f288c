"""Compiled functions, also where nothing can be kept on disk."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from types import FunctionType

import numpy as np

import selector
from selector.train.replay import jit


def test_a_function_without_a_file_is_compiled_all_the_same() -> None:
    """As where neither the package's folder nor the user's may be written to: Numba has no place to keep it."""
    names: dict = {}
    exec("def total(values):\n    sum = 0.0\n    for v in values:\n        sum += v\n    return sum", names)
    assert jit(names["total"])(np.arange(5.0)) == 10.0


def test_not_a_number_stays_one() -> None:
    finite = jit(lambda values: np.isfinite(values).all())
    assert [bool(finite(np.array([1.0, last]))) for last in (1.0, np.nan, np.inf)] == [True, False, False]


def test_compiled_functions_call_only_those_of_their_own_file() -> None:
    """Because Numba's cache does not see that another file has changed."""
    modules = [importlib.import_module(found.name) for found in pkgutil.walk_packages(selector.__path__, "selector.")]
    plain = {value: value.py_func for each in modules for value in vars(each).values() if hasattr(value, "py_func")}
    assert len(plain) > 3
    for dispatcher, caller in plain.items():
        assert isinstance(caller, FunctionType)
        if type(dispatcher._cache).__name__ == "NullCache":
            continue
        called = [plain.get(caller.__globals__.get(name)) for name in caller.__code__.co_names]
        assert {each.__module__ for each in called if each} <= {caller.__module__}


def test_what_decides_imports_no_numba() -> None:
    """An engine may patch what Numba would find: vLLM, imported after Numba, fails."""
    program = "import sys, data_gen.engines.vllm, selector.runtime.selector; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
