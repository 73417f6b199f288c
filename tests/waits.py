"""Counts what a decoding step asks of the machine: calls of operators, and readings that wait for the device.

On a GPU every reading (`.item()`, `.tolist()`, `bool()`, `nonzero`) waits until all work before it is done. On a CPU
nothing waits, but the readings are the same ones, so they can be counted, and forbidden, without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

METHODS = (Tensor.tolist, Tensor.numpy, Tensor.cpu)  # which do not show as operators
OPERATORS = ("item", "_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select")  # `bool(x)`, `x[i]`, ..


class Operators(TorchDispatchMode):
    """Counts calls of operators, views and allocations apart; and those that have to wait for the device.

    Attributes:
        calls: of operators that do work.
        reads: of operators whose outcome Python needs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.reads = 0, 0

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        self.calls += not func.is_view
        self.reads += func.overloadpacket.__name__ in OPERATORS
        return func(*args, **(kwargs or {}))


class Readings(TorchFunctionMode):
    """Counts the calls of methods that read numbers back, beside the operators that do."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        self.count += func in METHODS
        return func(*args, **(kwargs or {}))
