"""Functions that Numba compiles, because each call of torch or NumPy between two model passes costs microseconds.

Together they take a quarter of a minute to compile, so compiled code is kept on disk until the file of the function, or
of one that it calls, changes. Constants of other files are therefore passed as arguments.

Legend: C slots, F scalars, D some of them.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
import numpy as np
from numba.core.caching import FunctionCache
from numba.core.dispatcher import Dispatcher
from numba.core.serialize import dumps
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., object])

SUMS_IN_ANY_ORDER = {"reassoc", "contract", "nsz"}  # vectorises sums; NaN and infinity keep their meaning
CHECKSUM = 32  # bytes


def jit(function: F) -> F:
    """The function, compiled when it is first called, and kept on disk where that is possible."""
    compiled: Any = numba.njit(fastmath=SUMS_IN_ANY_ORDER)(function)
    with suppress(RuntimeError):  # neither the package's folder nor the user's can be written to
        compiled._cache = _Cache(function)
    return cast(F, compiled)


class _Cache(FunctionCache):
    """Numba's cache of a function, with files that are checked before their machine code is used."""

    def __init__(self, function: Any) -> None:
        super().__init__(function)
        impl = self._impl
        self._cache_file = _Files(Path(self._cache_path, impl.filename_base), function)

    def save_overload(self, signature: Any, compiled: Any) -> None:
        with suppress(OSError):  # a full disk only costs time
            super().save_overload(signature, compiled)


class _Files:
    """One file for each signature of a function: a checksum of what the code was compiled from and of the code.

    A file that was cut short, damaged or made from other code counts as missing, so it is compiled and written again.
    """

    def __init__(self, base: Path, function: Any) -> None:
        self._base, self._function = base, function

    @cached_property
    def _made_from(self) -> tuple[str, ...]:
        """The version of the compiler, and hashes of the files of the function and of those that it calls."""
        paths = sorted({Path(each.__code__.co_filename) for each in _called(self._function, {self._function})})
        return numba.__version__, *(sha256(path.read_bytes()).hexdigest() for path in paths)

    def _of(self, key: tuple[Any, ...]) -> tuple[Path, bytes]:
        """The file of a key (signature, processor, code), and what its checksum begins with."""
        name = sha256(repr(key[:2]).encode()).hexdigest()[:16]
        return self._base.with_name(f"{self._base.name}.{name}.nbc"), repr((self._made_from, key)).encode()

    def load(self, key: tuple[Any, ...]) -> Any:
        path, made_from = self._of(key)
        content = path.read_bytes() if path.is_file() else b""
        checksum, code = content[:CHECKSUM], content[CHECKSUM:]
        return pickle.loads(code) if checksum == sha256(made_from + code).digest() else None

    def save(self, key: tuple[Any, ...], value: Any) -> None:
        path, made_from = self._of(key)
        code = dumps(value)
        path.write_bytes(sha256(made_from + code).digest() + code)


def _called(function: Any, known: set[Any]) -> set[Any]:
    """`known`, with all compiled functions that a function calls, and that these call."""
    values = (function.__globals__.get(name) for name in function.__code__.co_names)
    for value in [value.py_func for value in values if isinstance(value, Dispatcher)]:
        if value not in known:
            known.add(value)
            _called(value, known)
    return known


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
