"""What a model says after tokens of a text; for engines, too, that have no transformers.

Legend: N consecutive tokens, V vocabulary, D hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor


class ModelRow(NamedTuple):
    """One model's outputs after a token."""

    probs_V: Tensor
    logits_V: Tensor
    hidden_D: Tensor


class ModelRows(NamedTuple):
    """One model's outputs after N consecutive tokens; `probs_NV` are the distributions that it
    samples from."""

    probs_NV: Tensor
    logits_NV: Tensor
    hidden_ND: Tensor

    def each(self) -> Iterator[ModelRow]:
        return map(ModelRow, *self)
