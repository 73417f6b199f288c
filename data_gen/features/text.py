"""The features at a root that depend only on token ids, and those of a drafter's hits: tokens that
it predicted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from data_gen.drafting.lookup import LookupIndex, common, copied
from data_gen.models.sampling import Sampling
from selector import schema
from selector.files import Array


class RunningMeans:
    def __init__(self) -> None:
        self._sums = [0.0] * len(schema.DECAYS)
        self._count = 0

    def add(self, value: float) -> None:
        self._sums = [
            decay * total + value for decay, total in zip(schema.DECAYS, self._sums, strict=True)
        ]
        self._count += 1

    def values(self) -> list[float]:
        weights = _weights(max(self._count, 1))
        return [total / weight for total, weight in zip(self._sums, weights, strict=True)]


@lru_cache(maxsize=16)  # several numbers have the same count
def _weights(count: int) -> list[float]:
    return [(1 - decay**count) / (1 - decay) for decay in schema.DECAYS]


class Share:
    """A mean that is shrunk towards a usual value, as if this had been seen twice."""

    __slots__ = ("_total", "count")

    def __init__(self) -> None:
        self.count = self._total = 0.0

    def add(self, value: float) -> None:
        self.count += 1
        self._total += value

    def value(self, usual: float) -> float:
        return (self._total + 2 * usual) / (self.count + 2)


def means_of_first(values: Sequence[float], counts: Sequence[int]) -> list[float]:
    """The means of the first so many values; 0 where there are no values."""
    return [sum(values[:most]) / max(1, min(most, len(values))) for most in counts]


def in_a_row(values: Sequence[float]) -> int:
    """How many values there are before the first 0."""
    for count, value in enumerate(values):
        if not value:
            return count
    return len(values)


NOTHING = Share()


class TextHistory:
    """The features of a text's token ids, from the prompt on; `start` is the prompt's length where
    the given tokens are not the whole of it."""

    def __init__(self, prompt: Sequence[int], start: int | None = None) -> None:
        self.index = LookupIndex(prompt)
        self.start = len(prompt) if start is None else start
        self._predicted = RunningMeans()
        self._copied = 0  # the latest tokens in a row that were predicted
        self._steady = 0  # the latest tokens in a row whose match moved by one
        self._counted = 0  # tokens of the index

    def _count(self, here: int) -> None:
        match_ends = self.index.match_ends
        predicted = self.index.predicted[here]
        self._predicted.add(predicted)
        if predicted:
            self._copied += 1
        else:
            self._copied = 0
        if here > 0 and 0 <= match_ends[here - 1] == match_ends[here] - 1:
            self._steady += 1
        else:
            self._steady = 0

    def scalars(self, sampling: Sampling, batch: int = 1) -> list[float]:
        """The scalars at the newest token, as `TEXT_SCALARS`; `batch` is the number of requests
        decoded together."""
        for here in range(self._counted, len(self.index)):
            self._count(here)
        self._counted = len(self.index)
        tokens = self.index.tokens
        match_ends = self.index.match_ends
        match = self.index.matches[-1]
        match_end = match_ends[-1]
        second = third = -1
        predicted_after: list[int] = []
        second_match = 0
        if match_end >= 0:
            predicted_after = self.index.predicted[
                match_end + 1 : match_end + 1 + schema.LONGEST_LOOKUP
            ]
            # no earlier match is longer than `match`
            second_match = min(match, self.index.matches[match_end], schema.LONGEST_MATCH)
            second = match_ends[match_end]
        if second >= 0:
            third = match_ends[second]
        proposal = copied(tokens, match_end, schema.LONGEST_LOOKUP)
        agrees_second = common(proposal, copied(tokens, second, schema.LONGEST_LOOKUP))
        agrees_third = common(proposal, copied(tokens, third, schema.LONGEST_LOOKUP))
        return [
            len(tokens),
            batch,
            sampling.temperature,
            sampling.top_p,
            min(match, schema.LONGEST_MATCH),
            *self._predicted.values(),
            min(self._copied, schema.LONGEST_MATCH),
            min(self._steady, schema.LONGEST_MATCH),
            0 <= match_end < self.start - 1,
            in_a_row(predicted_after),
            *means_of_first(predicted_after, schema.AFTER_MATCH_LENGTHS),
            second_match,
            agrees_second,
            min(agrees_second, agrees_third),
        ]

    def pairs(self) -> list[tuple[int, int]]:
        """The pairs of numbers that group training roots at the newest token, in the order of
        `schema.KEYS`."""
        tokens = self.index.tokens
        match_end = self.index.match_end
        last = tokens[-1]
        before = tokens[-2] if len(tokens) > 1 else -1
        first = tokens[match_end + 1] if match_end >= 0 else -1
        seen = 2 * min(self.index.match, 3) + self.index.predicted[-1]
        return [(last, -1), (before, last), (last, seen), (last, first), (first, -1)]


class HitHistory:
    """A drafter's hits on the committed tokens after the prompt of `text`."""

    def __init__(self, text: TextHistory) -> None:
        self.text = text
        self._hits: list[float] = []
        self._means = RunningMeans()
        # by run of a few tokens
        self._after: defaultdict[tuple[int, ...], Share] = defaultdict(Share)

    def add(self, hits: Sequence[float]) -> None:
        """Add, for each new token of the text, whether the drafter predicted it."""
        index = self.text.index
        for hit in hits:
            here = self.text.start + len(self._hits)
            self._hits.append(hit)
            self._means.add(hit)
            run = index.tokens[max(here - schema.PRECEDENT_LENGTHS[-1], 0) : here]
            for first in range(len(run)):
                self._after[tuple(run[first:])].add(hit)

    def scalars(self) -> list[float]:
        """The drafter's scalars at the newest token, in the order of `DRAFTER_SCALARS`. All tokens
        after the prompt must have been added."""
        tokens = self.text.index.tokens
        means = self._means.values()
        after: list[Share] = []
        for count in schema.PRECEDENT_LENGTHS:
            after.append(self._after.get(tuple(tokens[-count:]), NOTHING))
        newest_first = self._hits[: -schema.LONGEST_MATCH - 1 : -1]
        return [
            *means,
            in_a_row(newest_first),
            *(share.value(means[-1]) for share in after),
            min(after[0].count, schema.MOST_SEEN),
        ]


def keys_of(pairs_RJ2: Array) -> Array:
    """Pairs of numbers from -1 on, int64 [R, J, 2], as one key of 63 bits each, int64 [R, J], mixed
    with their place as in SplitMix64. Artefacts hold keys."""
    parts_RJ2 = pairs_RJ2.astype(np.uint64) + TWO
    mixed_RJ = _mixed(PLACES ^ parts_RJ2[..., 0])
    keys_RJ: Array = (_mixed(mixed_RJ ^ parts_RJ2[..., 1]) >> ONE).view(np.int64)
    return keys_RJ


def _mixed(bits: Array) -> Array:
    bits = bits * FIRST_FACTOR
    bits = (bits ^ (bits >> FIRST_SHIFT)) * SECOND_FACTOR
    return bits ^ (bits >> SECOND_SHIFT)


ONE, TWO = np.uint64(1), np.uint64(2)
FIRST_FACTOR, SECOND_FACTOR = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
FIRST_SHIFT, SECOND_SHIFT = np.uint64(30), np.uint64(27)
PLACES = _mixed(np.arange(len(schema.KEYS)).astype(np.uint64) + TWO)
