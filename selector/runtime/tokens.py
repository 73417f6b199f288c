"""Statistics by token: means of accepted tokens over the training roots that share a key (`selector.schema.KEYS`).

The means of a rare key are shrunk to those of all roots.

Legend: N known keys, J keys of a root, K means (`MEANS`), R roots, F = J (K + 1) scalars.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selector.files import read_tensors
from selector.schema import MEANS, MOST_COUNTED

Array = NDArray[Any]
FILE = "tokens.safetensors"  # in the artefact directory
WEIGHT = 20.0  # of the mean of all roots, in observations
LEAST = 2  # occurrences of a key that is kept


@dataclass(frozen=True)
class TokenStatistics:
    """Means by key."""

    keys_N: Array  # int64, ascending
    counts_N: Array  # number of training roots, float64
    sums_NK: Array  # of the values at these roots, float64
    means_K: Array  # over all roots, float64

    @classmethod
    def fit(cls, keys_RJ: Array, values_RK: Array, text_R: Array) -> tuple[TokenStatistics, Array]:
        """The statistics of some roots, and the scalars of these roots, float64 [R, F]. The scalars leave out the
        root's own text, because its labels must not leak into its features."""
        (R, J), K = keys_RJ.shape, values_RK.shape[1]
        keys_N, at_RJ = np.unique(keys_RJ, return_inverse=True)
        at, values = at_RJ.reshape(-1), np.repeat(values_RK, J, axis=0)
        counts_N, sums_NK = _summed(at, values, len(keys_N))
        _, own = np.unique(np.repeat(text_R, J) * len(keys_N) + at, return_inverse=True)
        own_counts, own_sums = _summed(own, values, int(own.max()) + 1)
        means_K = values_RK.mean(0)
        counts, sums = counts_N[at] - own_counts[own], sums_NK[at] - own_sums[own]
        often_N = counts_N >= LEAST
        found = cls(keys_N[often_N], counts_N[often_N], sums_NK[often_N], means_K)
        return found, _shrunk(counts, sums, means_K).reshape(R, J * (K + 1))

    @classmethod
    def empty(cls) -> TokenStatistics:
        K = len(MEANS)
        return cls(np.zeros(0, np.int64), np.zeros(0), np.zeros((0, K)), np.zeros(K))

    def of(self, keys_J: Array) -> Array:
        """The scalars of some keys, float64 [F]: for each key its means, and its number of occurrences."""
        at_J = np.searchsorted(self.keys_N, keys_J)
        known_J = np.searchsorted(self.keys_N, keys_J, "right") > at_J
        counts_J, sums_JK = np.zeros(len(keys_J)), np.zeros((len(keys_J), len(self.means_K)))
        counts_J[known_J], sums_JK[known_J] = self.counts_N[at_J[known_J]], self.sums_NK[at_J[known_J]]
        return _shrunk(counts_J, sums_JK, self.means_K).ravel()

    def to_tensors(self) -> dict[str, Array]:
        numbers = {name: getattr(self, name).astype(np.float32) for name in ("counts_N", "sums_NK", "means_K")}
        return {"keys_N": self.keys_N, **numbers}

    @classmethod
    def load(cls, folder: Path) -> TokenStatistics:
        """The statistics in an artefact directory, or those of no roots where it has none."""
        path = folder / FILE
        if not path.exists():
            return cls.empty()
        read = read_tensors(path)
        return cls(read["keys_N"], *(read[name].astype(np.float64) for name in ("counts_N", "sums_NK", "means_K")))


def _summed(at: Array, values: Array, size: int) -> tuple[Array, Array]:
    sums = np.stack([np.bincount(at, column, size) for column in values.T], axis=1)
    return np.bincount(at, minlength=size).astype(np.float64), sums


def _shrunk(counts_J: Array, sums_JK: Array, means_K: Array) -> Array:
    means_JK = (sums_JK + WEIGHT * means_K) / (counts_J + WEIGHT)[:, None]
    return np.concatenate([means_JK, np.minimum(counts_J, MOST_COUNTED)[:, None]], axis=1)
