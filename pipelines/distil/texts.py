"""The texts of a draft's training on disk: one safetensors file for each batch that the target wrote.

Legend: B sequences, T tokens of a sequence, V vocabulary, R tokens that the draft can say.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.utils.data import Dataset

from pipelines.distil.conversations import Written
from pipelines.distil.objective import Places
from selector.files import atomically
from selector.schema import InputError


def save(written: Written, path: Path) -> None:
    """Write a batch whole or not at all; InputError where the disk is full."""
    with atomically(path) as partial:
        save_file(written._asdict(), partial)


def is_whole(path: Path) -> bool:
    """Whether a file of texts is there and readable."""
    try:
        with safe_open(path, "pt") as file:
            return set(file.keys()) == set(Written._fields)
    except (OSError, SafetensorError):
        return False


class Sequences(Dataset[Places]):
    """The sequences of some files. Hidden states are read when they are asked for, the rest is kept in memory."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._files: list[Any] = []
        for path in paths:
            try:
                self._files.append(safe_open(path, "pt"))
            except (OSError, SafetensorError) as error:
                raise InputError(f"{path}: damaged or missing: remove it and run the distil stage again") from error
        parts = [[file.get_tensor(name) for file in self._files] for name in ("tokens_BT", "drawn_BT", "log_total_BT")]
        self.tokens_BT, self.drawn_BT, self._log_total_BT = map(torch.cat, parts)
        self._places = [(file, row) for file, own in zip(self._files, parts[0], strict=True) for row in range(len(own))]

    def __len__(self) -> int:
        return len(self._places)

    def __getitem__(self, index: int) -> Places:
        """One sequence. A place counts if its next token was drawn by the target, which then is no part of a prompt."""
        file, row = self._places[index]
        counted_T = torch.cat([self.drawn_BT[index, 1:], torch.zeros(1, dtype=torch.bool)])
        hidden_TD = file.get_slice("hidden_BTD")[row]
        return Places(self.tokens_BT[index].long(), hidden_TD, self._log_total_BT[index], counted_T)

    def most_frequent(self, count: int, vocabulary: int, always: Sequence[int]) -> Tensor:
        """The tokens that the target drew most often, int64 [R], ascending; of equals those with small numbers.

        Args:
            count: R; 0 or a number beyond V for all of them.
            always: tokens that are among them in any case.
        """
        if not 0 < count < vocabulary:
            return torch.arange(vocabulary)
        said_V = torch.bincount(self.tokens_BT[self.drawn_BT].long(), minlength=vocabulary)
        said_V[list(always)] = said_V.sum() + 1
        return said_V.argsort(descending=True, stable=True)[:count].sort().values
