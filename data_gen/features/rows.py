"""Features of the models' rows along a text: entropies, and the histories of the target's and the draft's rows.

Legend: N tokens, V vocabulary, F scalars, D decays of running means.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from data_gen.features.numbers import DECAYS_D, SOURCES, Array, Numbers, averaged
from data_gen.features.text import TextHistory
from selector.jit import jit
from selector.schema import DECAYS, LONGEST_MATCH, TARGET_SCALARS

LEAST_LOGIT = -1e4  # replaces minus infinity, the logit of a masked token, whose probability is 0
USUAL = DECAYS.index(0.8)  # the running mean that replaces unknown entropies


def entropies(logits_NV: Tensor, rows: Sequence[int] | None = None) -> list[float]:
    """The entropies of all rows or of some, at temperature 1, in nats."""
    picked: slice | list[int] = slice(None)
    if rows is not None:  # the rows of a chain are adjacent, and a slice of them needs no copy
        first, end = rows[0], rows[-1] + 1
        picked = slice(first, end) if end - first == len(rows) else list(rows)
    if logits_NV.is_cuda:
        logits_NV = logits_NV[picked].float().clamp(min=LEAST_LOGIT)
        return cross_entropy(logits_NV, logits_NV.softmax(-1), reduction="none").tolist()  # with itself
    plain = logits_NV.dtype == torch.float32  # slicing is cheaper in NumPy
    array_NV = logits_NV.numpy()[picked] if plain else logits_NV[picked].float().numpy()
    found: list[float] = _entropies(array_NV).tolist()
    return found


@jit
def _entropies(logits_NV: Array) -> Array:
    """Two passes over each row: the maximum, then `sum e^x` and `sum e^x x` of the differences to it."""
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
    """e^x for x <= 0, to float32's precision; unlike the math library's function, it is vectorised.

    e^x = 2^n e^r with n the nearest integer to x / ln 2; e^r by the polynomial of Cephes' `expf`.
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


class TargetHistory:
    """The target's rows along the text, from the last prompt token on."""

    def __init__(self, text: TextHistory) -> None:
        self.text = text
        self._entropies = Numbers()  # of the target before each token after the prompt
        self._sums_2D, self._done = np.zeros((2, len(DECAYS_D))), 0

    def add(self, entropies: Sequence[float]) -> None:
        """Add the target's entropy before each new committed token."""
        self._entropies.add(entropies)

    def scalars(self) -> Array:
        """The target's scalars at the newest token, float64 [F]. At least one token must have been added."""
        found_F, entropies_N = np.empty(len(TARGET_SCALARS)), self._entropies.array_N
        means_D = averaged(self._sums_2D, DECAYS_D, entropies_N[self._done :])
        self._done = len(entropies_N)
        found_F[0], found_F[1 : 1 + len(means_D)] = entropies_N[-1], means_D
        place = self.text.start, self.text.index.source, 1 + len(means_D)
        source_entropies(found_F, entropies_N, place, SOURCES, means_D[USUAL])
        return found_F


class DraftHistory:
    """The draft's rows along the text, from the last prompt token on."""

    def __init__(self) -> None:
        self._sums_2D = np.zeros((2, 2, len(DECAYS_D)))
        self._means: list[float] = []
        self._agreed, self._newest_entropy = 0, 0.0

    def add(self, accepted: Sequence[float], draft_entropies: Sequence[float]) -> None:
        """Add, for each new committed token, `min(1, q/p)` and the draft's entropy before it."""
        pairs = zip(self._sums_2D, (accepted, draft_entropies), strict=True)
        means = [averaged(sums_2D, DECAYS_D, np.array(values)) for sums_2D, values in pairs]
        self._means = np.concatenate(means).tolist()
        for share in accepted:
            self._agreed = self._agreed + 1 if share >= 1 else 0
        self._newest_entropy = draft_entropies[-1]

    def scalars(self, draft_entropy_root: float) -> list[float]:
        """The scalars that need the draft's rows, at the newest token."""
        return [self._newest_entropy, draft_entropy_root, *self._means, min(self._agreed, LONGEST_MATCH)]


@jit
def source_entropies(
    found_F: Array, entropies_N: Array, place: tuple[int, int, int], lengths: Array, usual: float
) -> None:
    """Write means of the target's entropies before a lookup's first few tokens, and how many of these are known.

    Args:
        entropies_N: before each token after the prompt.
        place: tokens of the prompt, the source, the position of the first scalar.
        usual: the mean where no entropy is known.
    """
    start, source, at = place
    distance, total, known, number = start + len(entropies_N) - 1 - source, 0.0, 0, 0
    for n in range(lengths[-1]):
        copied = source + 1 + n % distance - start
        if source >= 0 and copied >= 0:
            total += entropies_N[copied]
            known += 1
        if n + 1 == lengths[number]:
            found_F[at + number] = total / known if known > 0 else usual
            number += 1
    found_F[at + number] = known / lengths[-1]
