"""Counts the readings that wait for a device, which a CPU makes as well, without waiting.

On a GPU every reading (`.item()`, `.tolist()`, `bool()`, `nonzero`) waits until all work before it
is done.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

METHODS = (Tensor.tolist, Tensor.numpy, Tensor.cpu)  # which do not show as operators
# `bool(x)`, `x[i]`, ..
OPERATORS = ("item", "_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select")


class Operators(TorchDispatchMode):
    """`reads`: calls of operators whose outcome Python needs."""

    reads = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.reads += func.overloadpacket.__name__ in OPERATORS
        return func(*args, **(kwargs or {}))


class Readings(TorchFunctionMode):
    """`count`: calls of methods that read numbers back."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in METHODS
        return func(*args, **(kwargs or {}))
