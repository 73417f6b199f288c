"""Entropies of the rows of a pass: the features that cost the most, for each row of the vocabulary is read for them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from selector.jit import jit

LEAST_LOGIT = -1e4  # a masked token's logit is minus infinity, its probability 0


def entropies(logits_NV: Tensor, rows: Sequence[int] | None = None) -> list[float]:
    """Of each row, or of some, at temperature 1, in nats."""
    picked: slice | list[int] = slice(None)
    if rows is not None:  # those of a chain stand side by side, and need no copy
        first, end = rows[0], rows[-1] + 1
        picked = slice(first, end) if end - first == len(rows) else list(rows)
    if logits_NV.is_cuda:
        logits_NV = logits_NV[picked].float().clamp(min=LEAST_LOGIT)
        return cross_entropy(logits_NV, logits_NV.softmax(-1), reduction="none").tolist()  # with itself
    plain = logits_NV.dtype == torch.float32  # then slicing is cheaper in NumPy
    array_NV = logits_NV.numpy()[picked] if plain else logits_NV[picked].float().numpy()
    found: list[float] = _entropies(array_NV).tolist()
    return found


@jit
def _entropies(logits_NV: NDArray[Any]) -> NDArray[Any]:
    """Two walks over each row: its maximum, then `sum e^x` and `sum e^x x` of what lies below it."""
    entropies_N = np.empty(len(logits_NV))
    for n in range(len(logits_NV)):
        row_V = logits_NV[n]
        most = np.float32(LEAST_LOGIT)
        for v in range(len(row_V)):
            most = max(most, row_V[v])
        total, weighted = np.float32(0), np.float32(0)
        for v in range(len(row_V)):
            below = max(row_V[v], np.float32(LEAST_LOGIT)) - most
            share = _exp(below)
            total += share
            weighted += share * below
        entropies_N[n] = np.log(total) - weighted / total
    return entropies_N


@jit
def _exp(x: np.float32) -> np.float32:
    """e^x for x <= 0, to float32's precision, in operations that a processor does on eight numbers at once. The math
    library's function takes one number after another, which takes four times as long.

    e^x = 2^n e^r with n the nearest integer to x / ln 2; e^r by the polynomial of Cephes' `expf`; 2^n is a float of
    exponent n.
    """
    x = max(x, np.float32(-87))
    n = np.floor(x * np.float32(1 / np.log(2)) + np.float32(0.5))
    r = x - n * np.float32(0.693359375) + n * np.float32(2.12194440e-4)  # ln 2 in two parts
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    two_to_n = np.int32((np.int32(n) + np.int32(127)) << np.int32(23)).view(np.float32)
    return (p * r * r + r + np.float32(1)) * two_to_n
