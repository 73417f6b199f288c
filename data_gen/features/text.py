"""The features at a root that depend only on token ids, and those of a drafter's hits: tokens that
it predicted."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from operator import truediv
from typing import NamedTuple

import numpy as np

from data_gen.drafting.lookup import LookupIndex
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
        return list(map(truediv, self._sums, weights))


@lru_cache(maxsize=4096)  # several numbers have the same count
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


NOTHING = Share()
NO_WINDOW = bytes(schema.LONGEST_LOOKUP * array("q").itemsize)
ONES = array("q", [1] * schema.LONGEST_LOOKUP).tobytes()
COMPARED = np.array([3, 4, 4])  # the windows with which the first three are compared
AFTER_MATCH_LENGTHS = np.array(schema.AFTER_MATCH_LENGTHS)
# of `TextState.keyed`, two for each of `schema.KEYS`
KEYED = np.array([(2, 0), (1, 2), (2, 4), (2, 3), (3, 0)])


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

    def state(self, sampling: Sampling, batch: int = 1) -> TextState:
        """What the features at the newest token follow from; `batch` is the number of requests
        decoded together."""
        index = self.index
        for here in range(self._counted, len(index)):
            self._count(here)
        self._counted = len(index)
        tokens = index.tokens
        match = index.matches[-1]
        match_end = index.match_ends[-1]
        second = third = first_token = -1
        second_match = 0
        if match_end >= 0:
            first_token = tokens[match_end + 1]
            # no earlier match is longer than `match`
            second_match = min(match, index.matches[match_end], schema.LONGEST_MATCH)
            second = index.match_ends[match_end]
            if second >= 0:
                third = index.match_ends[second]
        before = tokens[-2] if len(tokens) > 1 else -1
        seen = 2 * min(match, 3) + index.predicted[-1]
        return TextState(
            before_match=(
                len(tokens),
                batch,
                sampling.temperature,
                sampling.top_p,
                min(match, schema.LONGEST_MATCH),
                *self._predicted.values(),
                min(self._copied, schema.LONGEST_MATCH),
                min(self._steady, schema.LONGEST_MATCH),
                0 <= match_end < self.start - 1,
                second_match,
            ),
            ends=(match_end, second, third),
            keyed=(-1, before, tokens[-1], first_token, seen),
            windows=(
                _window(index.predicted, match_end, may_repeat=False),
                _window(tokens, second),
                _window(tokens, third),
                ONES,
                _window(tokens, match_end),
            ),
        )


def _window(column: array[int], end: int, may_repeat: bool = True) -> bytes:
    """What stands after a position of a column, which may continue into its own copy; zeros where
    that is -1, and after the column's end."""
    if end < 0:
        return NO_WINDOW
    window = column[end + 1 : end + 1 + schema.LONGEST_LOOKUP]
    while may_repeat and len(window) < schema.LONGEST_LOOKUP:
        window += window[: schema.LONGEST_LOOKUP - len(window)]
    return window.tobytes().ljust(len(NO_WINDOW), b"\0")


class TextState(NamedTuple):
    """What the features of one text at its newest token follow from."""

    before_match: tuple[float, ...]  # the scalars that do not depend on what follows matches
    ends: tuple[int, int, int]  # of the match, its own match and that one's; -1 for none
    keyed: tuple[int, ...]  # of which keys are made
    # predicted after the match, and the tokens after the other two matches; with what these are
    # compared: ones, and the tokens after the match
    windows: tuple[bytes, ...]


class TextStates:
    """The features of the token ids of many texts, each at its newest token.

    Legend: R roots, W tokens of a window, A after-match lengths, J keys, F scalars.
    """

    def __init__(self, states: Sequence[TextState]) -> None:
        self._states = states

    def scalars(self) -> Array:
        """The scalars of `TEXT_SCALARS`, float64 [R, F]."""
        numbers_RM = np.array([state.before_match for state in self._states])
        ends_R3 = np.array([state.ends for state in self._states])
        windows = b"".join([window for state in self._states for window in state.windows])
        windows_R5W = np.frombuffer(windows, np.int64).reshape(len(ends_R3), 5, -1)
        same_R3W = windows_R5W[:, :3] == windows_R5W[:, COMPARED]
        # how many are the same before the first one that is not
        same_R3 = np.add.reduce(np.logical_and.accumulate(same_R3W, axis=-1), axis=-1)
        agrees_R2 = same_R3[:, 1:]
        agrees_R2[ends_R3[:, 1:] < 0] = 0
        known_R1 = numbers_RM[:, :1] - 1 - ends_R3[:, :1]  # tokens after the match
        counted_RA = np.maximum(np.minimum(known_R1, AFTER_MATCH_LENGTHS), 1)
        sums_RA = windows_R5W[:, 0].cumsum(-1)[:, AFTER_MATCH_LENGTHS - 1]
        parts = [
            numbers_RM[:, :-1],
            same_R3[:, :1],
            sums_RA / counted_RA,
            numbers_RM[:, -1:],
            np.minimum.accumulate(agrees_R2, axis=-1),
        ]
        return np.concatenate(parts, axis=1)

    def keys(self) -> Array:
        """The keys that group training roots, in the order of `schema.KEYS`, int64 [R, J]."""
        return keys_of(np.array([state.keyed for state in self._states])[:, KEYED])


class HitHistory:
    """A drafter's hits on the committed tokens after the prompt of `text`."""

    def __init__(self, text: TextHistory) -> None:
        self.text = text
        self._count = 0  # tokens
        self._row = 0  # the latest hits in a row
        self._means = RunningMeans()
        # by run of a few tokens
        self._after: defaultdict[tuple[int, ...], Share] = defaultdict(Share)

    def add(self, hits: Sequence[float]) -> None:
        """Add, for each new token of the text, whether the drafter predicted it."""
        tokens = self.text.index.tokens
        for hit in hits:
            here = self.text.start + self._count
            self._count += 1
            if hit:
                self._row += 1
            else:
                self._row = 0
            self._means.add(hit)
            run = tuple(tokens[max(here - schema.PRECEDENT_LENGTHS[-1], 0) : here])
            for first in range(len(run)):
                self._after[run[first:]].add(hit)

    def scalars(self) -> list[float]:
        """The drafter's scalars at the newest token, in the order of `DRAFTER_SCALARS`. All tokens
        after the prompt must have been added."""
        means = self._means.values()
        run = tuple(self.text.index.tokens[-schema.PRECEDENT_LENGTHS[-1] :])
        after: list[Share] = []
        for count in schema.PRECEDENT_LENGTHS:
            after.append(self._after.get(run[-count:], NOTHING))
        return [
            *means,
            min(self._row, schema.LONGEST_MATCH),
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
