"""The features at a root that depend only on token ids.

Legend: N tokens, R roots, F scalars, D decays of running means, M kinds of matches, C slots of a table, J keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data_gen.drafting.lookup import LookupIndex
from data_gen.features.numbers import CAPS, DECAYS_D, PRECEDENTS, ROOM, SOURCES, Array, averaged, empty_table, longer
from data_gen.models.sampling import Sampling
from selector.jit import jit, key_of, put, slot
from selector.schema import PRECEDENT_LENGTHS, TEXT_SCALARS

GIVEN = 4  # scalars before the match: context length, requests, sampling setting
MATCHES = 8  # classes of matches, see `_like`
AHEAD = 8  # tokens of a lookup that are judged
FADING = 0.95  # weight of a lookup relative to the next one with a match of its class
DONE, COPIED, STEADY = range(3)  # of `Text.state`
LONGEST = 1 + PRECEDENT_LENGTHS[-1]  # tokens of a run that is counted


class Text(NamedTuple):
    """The state of a text's history, as compiled functions take it."""

    tokens_N: Array
    found_3N: Array  # `LookupIndex.found_3N`
    sums_22D: Array  # weighted sums and weights, for the running means of foretold tokens and of new ones
    by_match_4M: Array  # by class of match, sums and weights of foretold tokens and of how far lookups were right
    state: Array  # tokens that are counted (`DONE`), were foretold in a row (`COPIED`), had moving sources (`STEADY`)
    keys_C: Array  # table of all runs of a few tokens
    counts_C: Array


class TextHistory:
    """The features of a text's token ids, from the prompt on."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.index = LookupIndex()
        self.start = len(prompt)
        self._sums = np.zeros((2, 2, len(DECAYS_D))), np.zeros((4, MATCHES)), np.zeros(3, np.int64)
        self._make_table(0)
        self.add(prompt)

    def add(self, tokens: Sequence[int]) -> None:
        """Add committed tokens."""
        self.index.extend(list(tokens))
        if len(self.index) > self._room:
            self._make_table(len(self.index))

    def _make_table(self, tokens: int) -> None:
        """Make a table with room for twice as many tokens, and count the runs of tokens anew."""
        self._room = 2 * tokens + ROOM
        self._table = empty_table(self._room * LONGEST)
        count_runs(self.index.tokens_N, 0, int(self._sums[2][DONE]), *self._table, LONGEST)

    def scalars(self, sampling: Sampling, batch: int = 1, roots: int = 1) -> Array:
        """The text's scalars at its newest `roots` tokens, float64 [roots, F]. Only those at the first of these tokens
        may have been asked for before. `batch` requests are decoded together."""
        found_RF = np.empty((roots, len(TEXT_SCALARS)))
        found_RF[:, 1:GIVEN] = batch, sampling.temperature, sampling.top_p
        _text(found_RF, *self.known, self.start, DECAYS_D, SOURCES, PRECEDENTS, CAPS)
        return found_RF

    @property
    def known(self) -> Text:
        """The history's state."""
        return Text(self.index.tokens_N, self.index.found_3N, *self._sums, *self._table)

    @property
    def foretold_N(self) -> Array:
        """For each token, whether a lookup foretold it."""
        return self.index.found_3N[0, : len(self.index)]

    def keys(self) -> Array:
        """The keys that group training roots at the newest token, int64 [J], in the order of `schema.KEYS`."""
        found: Array = _keys(self.index.tokens_N, self.index.source, self.index.match, self.foretold_N[-1] > 0)
        return found


@jit
def _text(
    found_RF: Array,
    tokens_N: Array,
    found_3N: Array,
    sums_22D: Array,
    by_match_4M: Array,
    state: Array,
    keys_C: Array,
    counts_C: Array,
    start: int,
    decays_D: Array,
    source_lengths: Array,
    precedent_lengths: Array,
    caps: tuple[int, int, int],
) -> None:
    """`TextHistory.scalars`. The fields of `Text` come one by one, because Numba takes twice as long to read a named
    tuple."""
    known = Text(tokens_N, found_3N, sums_22D, by_match_4M, state, keys_C, counts_C)
    for r in range(len(found_RF)):
        N = len(tokens_N) - len(found_RF) + 1 + r
        text_scalars(found_RF[r], known, N, start, decays_D, source_lengths, precedent_lengths, caps)


@jit
def text_scalars(
    found_F: Array,
    known: Text,
    N: int,
    start: int,
    decays_D: Array,
    source_lengths: Array,
    precedent_lengths: Array,
    caps: tuple[int, int, int],
) -> None:
    """Write the scalars of a text's first N tokens, but for those that are given, and update `known`.

    Args:
        known: also of further tokens, which are not read.
        start: tokens of the prompt.
        caps: the largest match or run, the longest lookup, the largest count.
    """
    (longest_match, longest_lookup, most_seen), at = caps, GIVEN
    tokens_N, state = known.tokens_N[:N], known.state
    foretold_N, sources_N, matches_N = known.found_3N
    means_D = averaged(known.sums_22D[0], decays_D, foretold_N[state[DONE] : N])
    new_D = averaged(known.sums_22D[1], decays_D, _read_on(tokens_N, known, 1 + precedent_lengths[-1]))
    source, match = sources_N[N - 1], matches_N[N - 1]
    found_F[0], found_F[at] = N, min(match, longest_match)
    at = put(found_F, at + 1, means_D)
    found_F[at] = min(state[COPIED], longest_match)
    found_F[at + 1] = min(state[STEADY], longest_match)
    found_F[at + 2] = 1.0 if 0 <= source < start - 1 else 0.0
    found_F[at + 3] = in_a_row(foretold_N[:N], source, longest_lookup)
    at = shares(found_F, at + 4, foretold_N[:N], source, source_lengths, 0.0)
    second = sources_N[source] if source >= 0 else -1
    found_F[at] = alike_before(tokens_N, second, longest_match)
    found_F[at + 1] = alike_after(tokens_N, source, second, longest_lookup)
    third = sources_N[second] if second >= 0 else -1
    found_F[at + 2] = min(found_F[at + 1], alike_after(tokens_N, source, third, longest_lookup))
    precedents(found_F, at + 3, tokens_N, source, known.keys_C, known.counts_C, precedent_lengths, most_seen)
    at, like = put(found_F, at + 3 + 2 * len(precedent_lengths), new_D), _like(match)
    for part in range(2):  # shrunk to what is usual in this text
        total, weight = known.by_match_4M[2 * part, like], known.by_match_4M[2 * part + 1, like]
        found_F[at + part] = (total + 2 * means_D[-1]) / (weight + 2)


@jit
def _read_on(tokens_N: Array, known: Text, longest: int) -> Array:
    """Count the tokens that are not counted yet; returns for each of these whether it was new in the text."""
    state, N = known.state, len(tokens_N)
    foretold_N, sources_N, matches_N = known.found_3N
    new_N = np.zeros(N - state[DONE])
    for n in range(state[DONE], N):
        state[COPIED] = state[COPIED] + 1 if foretold_N[n] > 0 else 0
        moved = n > 0 and 0 <= sources_N[n - 1] == sources_N[n] - 1
        state[STEADY] = state[STEADY] + 1 if moved else 0
        count_runs(tokens_N, n, n + 1, known.keys_C, known.counts_C, longest)
        new_N[n - state[DONE]] = known.counts_C[slot(known.keys_C, longer(np.uint64(0), tokens_N[n]))] == 1
        if n > 0 and matches_N[n - 1] > 0:
            _note(known.by_match_4M, 0, matches_N[n - 1], foretold_N[n])
        before = n - AHEAD  # the lookup at this position can be judged now
        if before >= 0 and matches_N[before] > 0:
            source, right = sources_N[before], 0
            while right < AHEAD and copied_token(tokens_N[: before + 1], source, right) == tokens_N[before + 1 + right]:
                right += 1
            _note(known.by_match_4M, 2, matches_N[before], right / AHEAD)
    state[DONE] = N
    return new_N


@jit
def _note(by_match_4M: Array, row: int, match: int, value: float) -> None:
    """Add a value to the fading sums of a class of matches."""
    like = _like(match)
    by_match_4M[row, like] = FADING * by_match_4M[row, like] + value
    by_match_4M[row + 1, like] = FADING * by_match_4M[row + 1, like] + 1


@jit
def _like(match: int) -> int:
    """The class of a match's length: 0, 1, 2, 3, up to 6, up to 11, up to 23, longer."""
    if match < 4:
        return match
    return 4 + int(match >= 7) + int(match >= 12) + int(match >= 24)


@jit
def _keys(tokens_N: Array, source: int, match: int, foretold: bool) -> Array:
    """`TextHistory.keys`."""
    last, before = tokens_N[-1], tokens_N[-2] if len(tokens_N) > 1 else -1
    copied = tokens_N[source + 1] if source >= 0 else -1
    seen = key_of(2, last, 2 * min(match, 3) + int(foretold))
    return np.array(
        [key_of(0, last, -1), key_of(1, before, last), seen, key_of(3, last, copied), key_of(4, copied, -1)]
    )


@jit
def count_runs(tokens_N: Array, begin: int, end: int, keys_C: Array, counts_C: Array, longest: int) -> None:
    """Count the runs of up to `longest` tokens whose last token is one of those from `begin` to `end`."""
    for last in range(begin, end):
        run = np.uint64(0)
        for n in range(min(longest, last + 1)):
            run = longer(run, tokens_N[last - n])
            at = slot(keys_C, run)
            keys_C[at] = run
            counts_C[at] += 1


@jit
def in_a_row(right_N: Array, source: int, most: int) -> int:
    """How many tokens after the source were right before the first wrong one."""
    count = 0
    while source >= 0 and count < most and source + 1 + count < len(right_N) and right_N[source + 1 + count] > 0:
        count += 1
    return count


@jit
def shares(found_F: Array, at: int, right_N: Array, source: int, lengths: Array, usual: float) -> int:
    """Write the shares of right tokens among the first few after the source, `usual` where there are none; returns the
    position after them."""
    for number in range(len(lengths)):
        some_N = right_N[source + 1 : source + 1 + lengths[number]]
        found_F[at + number] = some_N.mean() if source >= 0 and len(some_N) > 0 else usual
    return at + len(lengths)


@jit
def alike_before(tokens_N: Array, end: int, most: int) -> int:
    """The length of the match of the text's end at position `end`."""
    count, last = 0, len(tokens_N) - 1
    while count < most and end - count >= 0 and tokens_N[end - count] == tokens_N[last - count]:
        count += 1
    return count


@jit
def alike_after(tokens_N: Array, one: int, other: int, most: int) -> int:
    """How many first tokens two lookups from different sources have in common."""
    count = 0
    if one >= 0 and other >= 0:
        while count < most and copied_token(tokens_N, one, count) == copied_token(tokens_N, other, count):
            count += 1
    return count


@jit
def copied_token(tokens_N: Array, source: int, n: int) -> int:
    """The n-th token of a lookup, which may continue into the tokens that it copied."""
    return tokens_N[source + 1 + n % (len(tokens_N) - 1 - source)]


@jit
def precedents(
    found_F: Array,
    at: int,
    tokens_N: Array,
    source: int,
    keys_C: Array,
    counts_C: Array,
    lengths: Array,
    most_seen: int,
) -> None:
    """Write how often the text's last tokens occurred before, and how often a lookup's first token followed them."""
    end, followed = np.uint64(0), longer(np.uint64(0), tokens_N[source + 1])
    number = 0
    for n in range(1, lengths[-1] + 1):
        before, agree = 0, 0
        if source >= 0 and n <= len(tokens_N):
            end, followed = longer(end, tokens_N[-n]), longer(followed, tokens_N[-n])
            before = counts_C[slot(keys_C, end)] - 1
            agree = counts_C[slot(keys_C, followed)]
        if n == lengths[number]:
            found_F[at] = min(before, most_seen)
            found_F[at + 1] = agree / before if before > 0 else 0.0
            at, number = at + 2, number + 1
