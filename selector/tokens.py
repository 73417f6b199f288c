"""What usually follows a token: statistics of the training texts by the last token of a root.

How well a drafter does depends on the token it goes on from: after a comma it guesses, inside a word it knows. A few
means per token say most of what the last token's id says, and do so in texts of other kinds, where an embedding of the
token fails. A token that was seldom seen is drawn to the mean of all tokens.

Legend: N known tokens, K statistics (`STATISTICS`), R roots, X texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selector.plain import tensors
from selector.schema import MOST_COUNTED, STATISTICS

Array = NDArray[Any]
FILE = "tokens.safetensors"  # in the artefact directory
WEIGHT = 30.0  # observations that the mean of all tokens counts as


@dataclass(frozen=True)
class TokenStatistics:
    """Means by token.

    Attributes:
        ids_N: the known tokens, int64, ascending.
        counts_N: how often each was the last token of a training root, float32.
        sums_NK: of the numbers at these roots, float32.
        means_K: of all roots.
    """

    ids_N: Array
    counts_N: Array
    sums_NK: Array
    means_K: Array

    @classmethod
    def fit(cls, token_R: Array, values_RK: Array) -> TokenStatistics:
        """Of some roots, by their last tokens."""
        ids_N, at_R = np.unique(token_R, return_inverse=True)
        sums_NK = np.stack([np.bincount(at_R, values_R, len(ids_N)) for values_R in values_RK.T], axis=1)
        return cls(ids_N, np.bincount(at_R).astype(np.float32), sums_NK.astype(np.float32), values_RK.mean(0))

    @classmethod
    def empty(cls) -> TokenStatistics:
        """Of no roots."""
        K = len(STATISTICS)
        return cls(np.zeros(0, np.int64), np.zeros(0, np.float32), np.zeros((0, K), np.float32), np.zeros(K))

    def of(self, token: int) -> Array:
        """The scalars of one token, float64 [K + 1]: its means, and how often it was seen."""
        at = self._place.get(token)
        return self._unseen if at is None else self._scalars_NK[at]

    def without_own(self, token_R: Array, values_RK: Array, text_R: Array) -> Array:
        """The scalars at the very roots that these statistics are of, each without its own text's part: what a text says
        of itself must not be learned. Float64 [R, K + 1]."""
        at_R = np.searchsorted(self.ids_N, token_R)
        _, own_R = np.unique(np.stack([text_R, at_R]), axis=1, return_inverse=True)
        counts_R = self.counts_N[at_R] - np.bincount(own_R)[own_R]
        own_RK = np.stack([np.bincount(own_R, values_R)[own_R] for values_R in values_RK.T], axis=1)
        return _scalars(counts_R, self.sums_NK[at_R] - own_RK, self.means_K)

    @cached_property
    def _place(self) -> dict[int, int]:
        return {int(token): n for n, token in enumerate(self.ids_N)}

    @cached_property
    def _scalars_NK(self) -> Array:
        return _scalars(self.counts_N, self.sums_NK, self.means_K)

    @cached_property
    def _unseen(self) -> Array:
        return np.append(self.means_K, 0.0)

    def to_tensors(self) -> dict[str, Array]:
        """As the artefact holds it."""
        return {
            "ids_N": self.ids_N,
            "counts_N": self.counts_N.astype(np.float32),
            "sums_NK": self.sums_NK.astype(np.float32),
            "means_K": self.means_K.astype(np.float32),
        }

    @classmethod
    def load(cls, folder: Path) -> TokenStatistics:
        """From an artefact directory; of no roots where it has none."""
        path = folder / FILE
        return cls(**tensors(path.read_bytes())) if path.exists() else cls.empty()


def _scalars(counts_N: Array, sums_NK: Array, means_K: Array) -> Array:
    shares_NK = (sums_NK + WEIGHT * means_K) / (counts_N + WEIGHT)[:, None]
    return np.concatenate([shares_NK, np.minimum(counts_N, MOST_COUNTED)[:, None]], axis=1)
