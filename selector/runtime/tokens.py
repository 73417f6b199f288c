"""What the training texts say of tokens: means of accepted lengths by the last tokens of a root.

Legend: N known keys, J keys of a root, K means (`MEANS`), R roots, F = J (K + 1) scalars.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from selector import schema
from selector.files import Array, read_tensors

FILE = "tokens.safetensors"
WEIGHT = 20.0  # of the mean of all roots, in observations
LEAST = 2  # occurrences of a key that is kept


@dataclass(frozen=True)
class TokenStatistics:
    """Means of accepted tokens over the training roots that share a key (`selector.schema.KEYS`).
    Those of a rare key are shrunk to those of all roots."""

    keys_N: Array  # int64, ascending
    counts_N: Array  # number of training roots, float64
    sums_NK: Array  # of the values at these roots, float64
    means_K: Array  # over all roots, float64

    @classmethod
    def fit(
        cls, keys_RJ: Array, values_RK: Array, source_R: Array
    ) -> tuple[TokenStatistics, Array]:
        """The statistics of some roots, and the scalars of these roots, float64 [R, F]. The scalars
        leave out the root's own source: a held-out root knows none of its labels either."""
        R, J = keys_RJ.shape
        K = values_RK.shape[1]
        keys_N, at_RJ = np.unique(keys_RJ, return_inverse=True)
        at = at_RJ.reshape(-1)
        values = np.repeat(values_RK, J, axis=0)
        counts_N, sums_NK = _summed(at, values, len(keys_N))
        source_and_key = np.repeat(source_R, J) * len(keys_N) + at
        _, at_source = np.unique(source_and_key, return_inverse=True)
        source_counts, source_sums = _summed(at_source, values, int(at_source.max()) + 1)
        means_K = values_RK.mean(0)
        counts = counts_N[at] - source_counts[at_source]
        sums = sums_NK[at] - source_sums[at_source]
        scalars_RF = _shrunk(counts, sums, means_K).reshape(R, J * (K + 1))
        often_N = counts_N >= LEAST
        statistics = cls(keys_N[often_N], counts_N[often_N], sums_NK[often_N], means_K)
        return statistics, scalars_RF

    @classmethod
    def empty(cls) -> TokenStatistics:
        K = len(schema.MEANS)
        return cls(np.zeros(0, np.int64), np.zeros(0), np.zeros((0, K)), np.zeros(K))

    def of(self, keys_RJ: Array) -> Array:
        """The scalars of some roots' keys, float64 [R, F]: for each key its means, and its number
        of occurrences."""
        keys_N, rows_NF = self._by_key
        row_RJ = np.searchsorted(keys_N, keys_RJ)
        row_RJ[keys_N[row_RJ] != keys_RJ] = len(self.keys_N)
        scalars_RF: Array = rows_NF[row_RJ].reshape(len(keys_RJ), -1)
        return scalars_RF

    @cached_property
    def _by_key(self) -> tuple[Array, Array]:
        # the keys, and their rows of scalars; the last row is for unknown keys
        keys_N = np.append(self.keys_N, np.iinfo(np.int64).max)
        counts_N = np.append(self.counts_N, 0.0)
        sums_NK = np.append(self.sums_NK, 0.0 * self.means_K[None], axis=0)
        return keys_N, _shrunk(counts_N, sums_NK, self.means_K)

    def to_tensors(self) -> dict[str, Array]:
        return {
            "keys_N": self.keys_N,
            "counts_N": self.counts_N.astype(np.float32),
            "sums_NK": self.sums_NK.astype(np.float32),
            "means_K": self.means_K.astype(np.float32),
        }

    @classmethod
    def load(cls, folder: Path) -> TokenStatistics:
        """The statistics in an artefact directory; empty where it has none."""
        path = folder / FILE
        if not path.exists():
            return cls.empty()
        arrays = read_tensors(path)
        return cls(
            arrays["keys_N"],
            arrays["counts_N"].astype(np.float64),
            arrays["sums_NK"].astype(np.float64),
            arrays["means_K"].astype(np.float64),
        )


def _summed(at: Array, values: Array, size: int) -> tuple[Array, Array]:
    counts = np.bincount(at, minlength=size).astype(np.float64)
    sums = np.stack([np.bincount(at, column, size) for column in values.T], axis=1)
    return counts, sums


def _shrunk(counts_J: Array, sums_JK: Array, means_K: Array) -> Array:
    means_JK = (sums_JK + WEIGHT * means_K) / (counts_J + WEIGHT)[:, None]
    seen_J1 = np.minimum(counts_J, schema.MOST_COUNTED)[:, None]
    return np.concatenate([means_JK, seen_J1], axis=1)
