"""Features of the models' rows along a text: entropies, and the histories of the target's and the draft's rows.

Legend: N tokens, V vocabulary, R roots, F scalars, D decays of running means.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from data_gen.features.numbers import CAPS, DECAYS_D, PRECEDENTS, SOURCES, Array, Numbers, averaged
from data_gen.features.text import Text, TextHistory, text_scalars
from data_gen.models.sampling import Sampling
from selector.jit import jit, put
from selector.schema import DRAFT_SCALARS, EARLY_SCALARS, LONGEST_MATCH, TEXT_SCALARS

Numeric = Sequence[float] | Array
LEAST_LOGIT = -1e4  # replaces minus infinity, the logit of a masked token, whose probability is 0
USUAL = 1  # of `DECAYS`, 0.8: the running mean that replaces unknown entropies


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
    entropies_N = np.empty(len(array_NV))
    _entropies(entropies_N, array_NV)
    found: list[float] = entropies_N.tolist()
    return found


@jit
def _entropies(entropies_N: Array, logits_NV: Array) -> None:
    """Write the entropy of each row from two passes: the maximum, then `sum e^x` and `sum e^x x` of the differences."""
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
        self._sums_2D, self._done = np.zeros((2, len(DECAYS_D))), np.zeros(1, np.int64)

    def add(self, entropies: Numeric) -> None:
        """Add the target's entropy before each new committed token."""
        self._entropies.add(entropies)

    def scalars(self, sampling: Sampling, batch: int = 1, roots: int = 1) -> Array:
        """The early scalars at the newest tokens of the text, which are the text's and then the target's, float64
        [roots, F]; arguments as those of `TextHistory.scalars`. At least one token must have been added before the
        first of these roots."""
        found_RF = np.empty((roots, len(EARLY_SCALARS)))
        known = *self.text.known, self._entropies.array_N, self._sums_2D, self._done
        given = batch, sampling.temperature, sampling.top_p, self.text.start, len(TEXT_SCALARS)
        _early(found_RF, *known, *given, DECAYS_D, SOURCES, PRECEDENTS, CAPS)
        return found_RF


class DraftHistory:
    """The draft's rows along the text, from the last prompt token on."""

    def __init__(self) -> None:
        self._p, self._q, self._entropies = Numbers(), Numbers(), Numbers()
        self._sums_22D, self._state = np.zeros((2, 2, len(DECAYS_D))), np.zeros(2, np.int64)

    @property
    def knows_root(self) -> bool:
        """Whether the entropy at the newest token was added."""
        return len(self._entropies.array_N) > len(self._p.array_N)

    def add(self, p: Numeric, q: Numeric, entropies: Numeric) -> None:
        """Add, for each new committed token, its probabilities by the target and by the draft, and the draft's entropy
        before it; finally the entropy after the newest one."""
        for numbers, new in zip((self._p, self._q, self._entropies), (p, q, entropies), strict=True):
            numbers.add(new)

    def scalars(self, roots: int = 1) -> Array:
        """The draft's scalars at the newest tokens, float64 [roots, F], as `TargetHistory.scalars`."""
        found_RF = np.full((roots, len(DRAFT_SCALARS)), np.nan)
        known = self._p.array_N, self._q.array_N, self._entropies.array_N
        _draft(found_RF, *known, self._sums_22D, self._state, DECAYS_D, LONGEST_MATCH)
        return found_RF


@jit
def _early(
    found_RF: Array,
    tokens_N: Array,
    found_3N: Array,
    sums_22D: Array,
    by_match_4M: Array,
    state: Array,
    keys_C: Array,
    counts_C: Array,
    entropies_N: Array,
    of_target_2D: Array,
    done: Array,
    batch: float,
    temperature: float,
    top_p: float,
    start: int,
    at: int,
    decays_D: Array,
    source_lengths: Array,
    precedent_lengths: Array,
    caps: tuple[int, int, int],
) -> None:
    """`TargetHistory.scalars`, in the schema's order.

    Args:
        tokens_N to counts_C: `TextHistory.known`.
        entropies_N: before each token after the prompt.
        of_target_2D: the running means' sums and weights.
        done: how many entropies are in the running means.
        start: tokens of the prompt.
        at: the position of the target's first scalar.
    """
    text = Text(tokens_N, found_3N, sums_22D, by_match_4M, state, keys_C, counts_C)
    for r in range(len(found_RF)):
        known = len(entropies_N) - len(found_RF) + 1 + r
        found_F = found_RF[r]
        found_F[1], found_F[2], found_F[3] = batch, temperature, top_p
        text_scalars(found_F, text, start + known, start, decays_D, source_lengths, precedent_lengths, caps)
        means_D = averaged(of_target_2D, decays_D, entropies_N[done[0] : known])
        done[0] = known
        found_F[at] = entropies_N[known - 1]
        rest_F, source = found_F[put(found_F, at + 1, means_D) :], found_3N[1, start + known - 1]
        source_entropies(rest_F, entropies_N[:known], start, source, source_lengths, means_D[USUAL])


@jit
def source_entropies(found_F: Array, entropies_N: Array, start: int, source: int, lengths: Array, usual: float) -> None:
    """Write means of the target's entropies before a lookup's first few tokens, and how many of these are known.

    Args:
        entropies_N: before each token after the prompt, which has `start` tokens.
        usual: the mean where no entropy is known.
    """
    distance, total, known, number = start + len(entropies_N) - 1 - source, 0.0, 0, 0
    for n in range(lengths[-1]):
        copied = source + 1 + n % distance - start
        if source >= 0 and copied >= 0:
            total += entropies_N[copied]
            known += 1
        if n + 1 == lengths[number]:
            found_F[number] = total / known if known > 0 else usual
            number += 1
    found_F[number] = known / lengths[-1]


@jit
def _draft(
    found_RF: Array,
    p_N: Array,
    q_N: Array,
    entropies_N: Array,
    sums_22D: Array,
    state: Array,
    decays_D: Array,
    longest: int,
) -> None:
    """`DraftHistory.scalars`, in the schema's order; `state` counts tokens in the running means, and the latest tokens
    in a row with `q >= p`."""
    for r in range(len(found_RF)):
        known = len(p_N) - len(found_RF) + 1 + r
        new = slice(state[0], known)
        for n in range(state[0], known):
            state[1] = state[1] + 1 if q_N[n] >= p_N[n] else 0
        found_RF[r, 0], found_RF[r, 1] = entropies_N[known - 1], entropies_N[known]
        at = put(found_RF[r], 2, averaged(sums_22D[0], decays_D, np.minimum(q_N[new] / p_N[new], 1.0)))
        at = put(found_RF[r], at, averaged(sums_22D[1], decays_D, entropies_N[new]))
        found_RF[r, at] = min(state[1], longest)
        state[0] = known
