"""The features at a root that depend only on token ids, and those of a drafter's hits: tokens that
it predicted.

Legend: N new tokens, T tokens, D decays, L lengths, P lengths of runs, R runs, J keys, F scalars,
    S a share's count and total.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data_gen.drafting.lookup import (
    AGREED,
    MATCH,
    MATCH_END,
    PREDICTED,
    RUN,
    TIMES,
    TOKEN,
    TOKENS,
    LookupIndex,
    Repeats,
)
from data_gen.models.sampling import Sampling
from selector.files import Array
from selector.jit import jit
from selector.schema import (
    AFTER_MATCH_LENGTHS,
    DECAYS,
    HIT_LENGTHS,
    KEYS,
    LONGEST_COUNTED,
    LONGEST_LOOKUP,
    LONGEST_MATCH,
    MOST_SEEN,
    PRECEDENT_LENGTHS,
)

FADING = 0.95  # weight of a value of a share, relative to the next one
SIMILAR = (1, 2, 3, 4, 7, 12, 24)  # the least matches of the classes of similar ones
# Two factors that mix the bits of a key, as in SplitMix64
MIXING = np.array([0xBF58476D1CE4E5B9, 0x94D049BB133111EB], np.uint64)


class RunningMeans:
    """The means of some numbers, float64, with the weights `schema.DECAYS`."""

    def __init__(self) -> None:
        self._sums_D = np.zeros(len(DECAYS))
        self._count = 0

    def add(self, value: float) -> None:
        self._sums_D *= DECAYS
        self._sums_D += value
        self._count += 1

    def values(self) -> list[float]:
        means: list[float] = _means(self._sums_D, self._count).tolist()
        return means


class TextHistory:
    """The features of a text's token ids, from the prompt on; `start` is the prompt's length where
    the given tokens are not the whole of it."""

    def __init__(self, prompt: Sequence[int], start: int | None = None) -> None:
        self.index = LookupIndex(prompt)
        self.start = len(prompt) if start is None else start
        self._counted = 0  # tokens of the index
        # of predicted and of new tokens
        self._sums_2D = np.zeros((2, len(DECAYS)))
        # of lookups by class of match: whether their first token was right, and how many were
        # before a wrong one
        self._shares_2CS = np.zeros((2, len(SIMILAR) + 1, 2))

    def scalars(self, sampling: Sampling, batch: int = 1) -> Array:
        """The scalars at the newest token, float64, as `TEXT_SCALARS`; `batch` is the number of
        requests decoded together."""
        repeats = self.index.repeats
        known_F = _text_scalars(repeats, self._counted, self.start, self._sums_2D, self._shares_2CS)
        self._counted = len(self.index)
        known_F[:4] = self._counted, batch, sampling.temperature, sampling.top_p
        return known_F

    def keys(self) -> Array:
        """The keys that group training roots at the newest token, int64 [J], in the order of
        `schema.KEYS`."""
        return _keys(self.index.repeats)


class HitHistory:
    """A drafter's hits on the committed tokens after the prompt of `text`."""

    def __init__(self, text: TextHistory) -> None:
        self.text = text
        self._count = 0
        self._hits_T = np.zeros(0)
        self._sums_D = np.zeros(len(DECAYS))
        # of tokens that a lookup predicted, and of others
        self._shares_2S = np.zeros((2, 2))
        self._after_SR = np.zeros((2, 0))  # by run of a few tokens

    def add(self, hits: Sequence[float]) -> None:
        """Add, for each new token of the text, whether the drafter predicted it."""
        repeats = self.text.index.repeats
        if len(self._hits_T) < repeats.text_CT.shape[1]:
            self._hits_T = _widened(self._hits_T, repeats.text_CT)
            self._after_SR = _widened(self._after_SR, repeats.runs_CR)
        hits_N = np.array(hits, np.float64)
        here = self.text.start + self._count
        self._hits_T[self._count : self._count + len(hits_N)] = hits_N
        _add_hits(repeats, here, hits_N, self._sums_D, self._shares_2S, self._after_SR)
        self._count += len(hits_N)

    @property
    def key(self) -> int:
        """The key that groups training roots in addition to `TextHistory.keys`."""
        newest = int(self._hits_T[self._count - 1]) if self._count else -1
        last = int(self.text.index.tokens[-1])
        return int(_mixed(np.array([[len(KEYS), last, newest]]))[0])

    def scalars(self) -> Array:
        """The drafter's scalars at the newest token, float64, in the order of `DRAFTER_SCALARS` but
        for those by key. All tokens after the prompt must have been added."""
        return _hit_scalars(
            self.text.index.repeats,
            self.text.start,
            self._hits_T[: self._count],
            self._sums_D,
            self._shares_2S,
            self._after_SR,
        )


def _widened(own: Array, like: Array) -> Array:
    wider = np.zeros((*own.shape[:-1], like.shape[-1]))
    wider[..., : own.shape[-1]] = own
    return wider


@jit
def _text_scalars(
    repeats: Repeats, counted: int, start: int, sums_2D: Array, shares_2CS: Array
) -> Array:
    count = repeats.counts[TOKENS]
    for here in range(counted, count):
        _count(repeats, here, sums_2D, shares_2CS)
    predicted_T = repeats.text_CT[PREDICTED, :count]
    ends_T = repeats.text_CT[MATCH_END, :count]
    matches_T = repeats.text_CT[MATCH, :count]
    match, match_end = matches_T[-1], ends_T[-1]
    second = third = -1
    second_match = 0
    after_N = predicted_T[:0]
    if match_end >= 0:
        after_N = predicted_T[match_end + 1 : match_end + 1 + LONGEST_LOOKUP]
        # no earlier match is longer than `match`
        second_match = min(match, matches_T[match_end], LONGEST_MATCH)
        second = ends_T[match_end]
    if second >= 0:
        third = ends_T[second]
    tokens_T = repeats.text_CT[TOKEN, :count]
    agrees_second = _agreement(tokens_T, match_end, second)
    agrees_third = _agreement(tokens_T, match_end, third)
    copied_D = _means(sums_2D[0], count)
    similar = _similar(match)
    match_numbers = (
        min(_in_a_row(predicted_T[::-1]), LONGEST_MATCH),
        min(_steady(ends_T), LONGEST_MATCH),
        0 <= match_end < start - 1,
        _in_a_row(after_N),
    )
    return np.concatenate(
        (
            np.array([0.0, 0.0, 0.0, 0.0, min(match, LONGEST_MATCH)]),
            copied_D,
            np.array(match_numbers),
            _means_of_first(after_N, AFTER_MATCH_LENGTHS, 0.0),
            np.array([second_match, agrees_second, min(agrees_second, agrees_third)]),
            _precedents(repeats.precedents_CP),
            _means(sums_2D[1], count),
            np.array(
                [
                    _share(shares_2CS[0, similar], copied_D[-1]),
                    _share(shares_2CS[1, similar], copied_D[-1]),
                ]
            ),
        )
    )


@jit
def _count(repeats: Repeats, here: int, sums_2D: Array, shares_2CS: Array) -> None:
    tokens, predicted, ends, matches = repeats.text_CT[:RUN]
    _add(sums_2D[0], predicted[here])
    _add(sums_2D[1], matches[here] == 0)
    if here > 0 and matches[here - 1] > 0:
        _add_to_share(shares_2CS[0, _similar(matches[here - 1])], predicted[here], FADING)
    before = here - LONGEST_COUNTED  # the lookup there can be judged now
    if before >= 0 and matches[before] > 0:
        right = 0
        begin = ends[before] + 1
        while right < LONGEST_COUNTED and tokens[begin + right] == tokens[before + 1 + right]:
            right += 1
        _add_to_share(shares_2CS[1, _similar(matches[before])], right / LONGEST_COUNTED, FADING)


@jit
def _agreement(tokens_T: Array, one: int, other: int) -> int:
    # how many tokens the lookups after two places have in common
    if one < 0 or other < 0:
        return 0
    count = len(tokens_T)
    for number in range(LONGEST_LOOKUP):
        of_one = tokens_T[one + 1 + number % (count - one - 1)]
        of_other = tokens_T[other + 1 + number % (count - other - 1)]
        if of_one != of_other:
            return number
    return LONGEST_LOOKUP


@jit
def _similar(match: int) -> int:
    # the class of a match
    number = 0
    while number < len(SIMILAR) and SIMILAR[number] <= match:
        number += 1
    return number


@jit
def _steady(ends_T: Array) -> int:
    # the latest tokens in a row whose match moved by one
    here = len(ends_T) - 1
    while here > 0 and 0 <= ends_T[here - 1] == ends_T[here] - 1:
        here -= 1
    return len(ends_T) - 1 - here


@jit
def _in_a_row(values_N: Array) -> int:
    # how many values there are before the first 0
    for count in range(len(values_N)):
        if not values_N[count]:
            return count
    return len(values_N)


@jit
def _precedents(precedents_CP: Array) -> Array:
    numbers_P2 = np.zeros((len(PRECEDENT_LENGTHS), 2))
    for number in range(len(PRECEDENT_LENGTHS)):
        times = precedents_CP[TIMES, number]
        numbers_P2[number, 0] = min(times, MOST_SEEN)
        if times > 0:
            numbers_P2[number, 1] = precedents_CP[AGREED, number] / times
    return numbers_P2.ravel()


@jit
def _means_of_first(values_N: Array, lengths: tuple[int, ...], none: float) -> Array:
    # the means of the first so many values; `none` where there are no values
    means_L = np.full(len(lengths), none)
    for number in range(len(lengths)):
        if len(values_N) > 0:
            means_L[number] = values_N[: lengths[number]].mean()
    return means_L


@jit
def _add(sums_D: Array, value: float) -> None:
    for number in range(len(DECAYS)):
        sums_D[number] = DECAYS[number] * sums_D[number] + value


@jit
def _means(sums_D: Array, count: int) -> Array:
    means_D = np.zeros(len(DECAYS))
    for number in range(len(DECAYS)):
        decay = DECAYS[number]
        means_D[number] = sums_D[number] * (1 - decay) / (1 - decay ** max(count, 1))
    return means_D


@jit
def _add_to_share(share_S: Array, value: float, fading: float) -> None:
    share_S[0] = fading * share_S[0] + 1
    share_S[1] = fading * share_S[1] + value


@jit
def _share(share_S: Array, usual: float) -> float:
    # a mean that is shrunk towards a usual value, as if this had been seen twice
    return (share_S[1] + 2 * usual) / (share_S[0] + 2)


@jit
def _add_hits(
    repeats: Repeats,
    here: int,
    hits_N: Array,
    sums_D: Array,
    shares_2S: Array,
    after_SR: Array,
) -> None:
    for hit in hits_N:
        _add(sums_D, hit)
        _add_to_share(shares_2S[1 - repeats.text_CT[PREDICTED, here]], hit, FADING)
        for number in range(min(len(PRECEDENT_LENGTHS), here)):
            _add_to_share(after_SR[:, repeats.text_CT[RUN + number, here - 1]], hit, 1.0)
        here += 1


@jit
def _hit_scalars(
    repeats: Repeats,
    start: int,
    hits_T: Array,
    sums_D: Array,
    shares_2S: Array,
    after_SR: Array,
) -> Array:
    newest = repeats.counts[TOKENS] - 1
    means_D = _means(sums_D, len(hits_T))
    usual = means_D[-1]
    # the first token after the match, among the hits
    first = repeats.text_CT[MATCH_END, newest] + 1 - start
    after_N = hits_T[first : first + LONGEST_LOOKUP] if first > 0 else hits_T[:0]
    shares_P = np.full(len(PRECEDENT_LENGTHS), usual)
    seen = 0.0
    for number in range(len(PRECEDENT_LENGTHS)):
        run = repeats.text_CT[RUN + number, newest]
        if 0 < run < after_SR.shape[1]:
            shares_P[number] = _share(after_SR[:, run], usual)
            if number == 0:
                seen = after_SR[0, run]
    return np.concatenate(
        (
            means_D,
            np.array([min(_in_a_row(hits_T[::-1]), LONGEST_MATCH), _in_a_row(after_N)]),
            _means_of_first(after_N, HIT_LENGTHS, usual),
            shares_P,
            np.array(
                [
                    min(seen, MOST_SEEN),
                    _share(shares_2S[0], usual),
                    _share(shares_2S[1], usual),
                ]
            ),
        )
    )


@jit
def _keys(repeats: Repeats) -> Array:
    newest = repeats.counts[TOKENS] - 1
    last = repeats.text_CT[TOKEN, newest]
    before = repeats.text_CT[TOKEN, newest - 1] if newest > 0 else -1
    match_end = repeats.text_CT[MATCH_END, newest]
    first = repeats.text_CT[TOKEN, match_end + 1] if match_end >= 0 else -1
    match = min(repeats.text_CT[MATCH, newest], 3)
    seen = 2 * match + repeats.text_CT[PREDICTED, newest]
    return _mixed(
        np.array(
            [[0, last, -1], [1, before, last], [2, last, seen], [3, last, first], [4, first, -1]]
        )
    )


@jit
def _mixed(parts_J3: Array) -> Array:
    """Kinds and two numbers of each, at least -1, as keys of 63 bits, mixed as in SplitMix64.
    Artefacts hold keys."""
    mixed_J = np.zeros(len(parts_J3), np.uint64)
    for number in range(3):
        mixed_J = (mixed_J ^ (parts_J3[:, number] + 2).astype(np.uint64)) * MIXING[0]
        mixed_J = (mixed_J ^ (mixed_J >> np.uint64(30))) * MIXING[1]
        mixed_J = mixed_J ^ (mixed_J >> np.uint64(27))
    return (mixed_J >> np.uint64(1)).astype(np.int64)
