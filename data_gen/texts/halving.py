"""Out of memory: the work is done again with half as many rows at once, and so is all that follows in this process."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import TypeVar

import torch

from selector.schema import InputError

T = TypeVar("T")
MOST_HALVINGS = 12  # a block has no more than 4,096 rows
_halvings = 0


def fewer(rows: int) -> int:
    """How many rows are taken at once, where so many would be best."""
    return max(1, rows >> _halvings)


def halving(work: Callable[[], T]) -> T:
    """What `work` returns. It asks `fewer` how many rows it may take at once, and keeps nothing of a failed attempt.

    Warns the first time that memory runs out.

    Raises:
        InputError: memory runs out with one row at once, too.
    """
    global _halvings
    while True:
        try:
            return work()
        except RuntimeError as error:
            if not _out_of_memory(error):
                raise
            reason = str(error).splitlines()[0]
        if _halvings == 0:
            warnings.warn(f"blocks of rows are halved from here on: {reason}", RuntimeWarning, stacklevel=2)
        _halvings += 1  # after the failed attempt's tensors went with its traceback
        if _halvings > MOST_HALVINGS:
            raise InputError(f"the models leave no room for one row of a text, or for one text: {reason}")
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def _out_of_memory(error: RuntimeError) -> bool:
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
