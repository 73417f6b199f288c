"""Drafts that are copied from the text: the tokens after the longest earlier match of its end.

In `a b c a b` the longest suffix that occurs earlier is `a b`, of length 2. A `c` followed it
there, so the proposal is `c a b c ..`, which may continue into its own copy. Engines call this
prompt lookup or n-gram speculation.

Legend: N new tokens, T tokens, S states, E edges, R runs, P lengths of runs; C columns, which are
named below.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress, count
from operator import ne
from typing import NamedTuple, TypeVar

import numpy as np

from selector import schema
from selector.files import Array
from selector.jit import jit

T = TypeVar("T")
LONGEST_RUN = 1 + schema.PRECEDENT_LENGTHS[-1]  # tokens of a run that is counted
LEAST_ROOM = 64  # tokens
TOKEN_BITS = (1 << 32) - 1
# The numbers below are compiled into `data_gen.features.text`, too: after a change of them, change
# that file for Numba to compile it anew.
# of `Repeats.counts`; `NEWEST` is the state of the whole text
TOKENS, STATES, EDGES, RUNS, NEWEST = range(5)
# columns of a text: the token, whether it was predicted, where the match after it ends, how long
# that is, and from `RUN` on the runs of 1, 2, .. tokens that end there, 0 where the text is shorter
TOKEN, PREDICTED, MATCH_END, MATCH, RUN = range(5)
# of the automaton's states: the suffix link, the longest string's length, where it was last a
# match, and its newest edge
LINK, LONGEST, END, EDGE = range(4)
# of edges: the state and the token, where it leads, and the state's edge before; runs have a key,
# of the run without its last token and that token, too, and how often they were seen
KEY, TO, BEFORE = range(3)
SEEN = 1
# of the text's newest runs
TIMES, AGREED = range(2)


class Repeats(NamedTuple):
    """What repeats in a text, as arrays of int64 that compiled loops read and write.

    The edges and the runs are found by their keys in tables with open addressing, which hold their
    numbers plus 1, or 0.
    """

    counts: Array  # of the columns that are in use
    text_CT: Array
    states_CS: Array
    edges_CE: Array
    runs_CR: Array
    edge_table: Array  # int32; the sizes are powers of two
    run_table: Array
    # how often the newest runs of 1, 2, .. tokens occurred earlier, and how often the first token
    # of the proposal followed; 0 where there is no proposal
    precedents_CP: Array

    @classmethod
    def of(cls, room: int) -> Repeats:
        """Of no text; with room for so many tokens, a power of two."""
        states_CS = np.full((4, 2 * room), -1)
        states_CS[LONGEST, 0] = 0  # of the empty string
        return cls(
            np.array([0, 1, 0, 1, 0]),
            np.zeros((RUN + LONGEST_RUN, room), np.int64),
            states_CS,
            np.zeros((3, 3 * room), np.int64),
            np.zeros((2, LONGEST_RUN * room + 1), np.int64),
            np.zeros(8 * room, np.int32),
            np.zeros(16 * room, np.int32),
            np.zeros((2, LONGEST_RUN - 1), np.int64),
        )

    def widened(self, room: int) -> Repeats:
        """The same with room for more tokens."""
        wide = self.of(room)
        for own, wider in zip(self[:5], wide[:5], strict=True):
            wider[..., : own.shape[-1]] = own
        wide.precedents_CP[:] = self.precedents_CP
        _fill(wide.edge_table, wide.edges_CE[KEY, : self.counts[EDGES]], 0)
        _fill(wide.run_table, wide.runs_CR[KEY, : self.counts[RUNS]], 1)
        return wide


class LookupIndex:
    """The longest earlier match of a text's end, and the tokens after it. The text grows by
    `extend`.

    A suffix automaton (Blumer et al. 1985) grows by one token in amortised constant time. The
    longest suffix of the text that occurred earlier is the string of the newest state's suffix
    link. Each state stores where it was last such a match, so that recent occurrences are
    preferred.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.repeats = Repeats.of(LEAST_ROOM)
        self.extend(tokens)

    def __len__(self) -> int:
        return int(self.repeats.counts[TOKENS])

    @property
    def tokens(self) -> Array:
        """The text, int64 [T]; a view, as the other arrays are."""
        return self.repeats.text_CT[TOKEN, : len(self)]

    @property
    def predicted(self) -> Array:
        """For each token, 1 if it was the first one of the proposal before it, else 0."""
        return self.repeats.text_CT[PREDICTED, : len(self)]

    @property
    def match_ends(self) -> Array:
        """After each token, the position of the match's last token; -1 where the token is new."""
        return self.repeats.text_CT[MATCH_END, : len(self)]

    @property
    def matches(self) -> Array:
        """After each token, the match's length, which may overlap the text's end."""
        return self.repeats.text_CT[MATCH, : len(self)]

    @property
    def match(self) -> int:
        """Tokens of the longest earlier match of the text's end; 0 where there is none."""
        return int(self.matches[-1]) if len(self) else 0

    @property
    def match_end(self) -> int:
        """Position of that match's last token; -1 where there is none."""
        return int(self.match_ends[-1]) if len(self) else -1

    def extend(self, tokens: Iterable[int]) -> None:
        """Append committed tokens."""
        tokens_N = np.fromiter(tokens, np.int64)
        length = len(self) + len(tokens_N)
        if length > self.repeats.text_CT.shape[1]:
            self.repeats = self.repeats.widened(1 << (length - 1).bit_length())
        if len(tokens_N):
            _extend(self.repeats, tokens_N)

    def proposal(self, length: int) -> list[int]:
        """The next `length` tokens, if the text continues as after the match; none where there is
        no match."""
        begin = self.match_end + 1
        tokens: list[int] = self.tokens[begin : begin + length].tolist()
        return copied(tokens, length) if begin else []

    def agreement(self, following: Sequence[int]) -> int:
        """How many of the following tokens the proposal predicts, up to its first error."""
        return common(self.proposal(len(following)), following)


def copied(after: Sequence[T], length: int) -> list[T]:
    """So many values, which begin with those after a match and may continue into their own copy;
    none where there is none."""
    continuation = list(after)
    while 0 < len(continuation) < length:
        continuation += continuation[: length - len(continuation)]
    return continuation


def common(one: Sequence[T], other: Sequence[T]) -> int:
    # no loop in Python, as it runs at every root of a text
    differing = compress(count(), map(ne, one, other))
    return next(differing, min(len(one), len(other)))


@jit
def _extend(repeats: Repeats, tokens_N: Array) -> None:
    counts, text_CT = repeats.counts, repeats.text_CT
    for token in tokens_N:
        here = counts[TOKENS]
        before = text_CT[MATCH_END, here - 1] if here > 0 else -1
        match_end, match = _grow(repeats, token)
        text_CT[TOKEN, here] = token
        text_CT[PREDICTED, here] = before >= 0 and text_CT[TOKEN, before + 1] == token
        text_CT[MATCH_END, here] = match_end
        text_CT[MATCH, here] = match
        for length in range(min(LONGEST_RUN, here + 1)):
            shorter = text_CT[RUN + length - 1, here - 1] if length > 0 else 0
            run = _counted(repeats, shorter, token)
            text_CT[RUN + length, here] = run
        counts[TOKENS] = here + 1
    _find_precedents(repeats)


@jit
def _grow(repeats: Repeats, token: int) -> tuple[int, int]:
    # the next state of the automaton; the match after the token, as its end and its length
    link, longest, end, newest_edge = repeats.states_CS
    here = repeats.counts[TOKENS]
    state = repeats.counts[NEWEST]
    new = _add_state(repeats, 0, here + 1, here)
    repeats.counts[NEWEST] = new
    edge = _edge(repeats, state, token)
    while edge < 0 and state >= 0:
        _add_edge(repeats, state, token, new)
        state = link[state]
        edge = _edge(repeats, state, token)
    if state < 0:
        return -1, 0
    matched = repeats.edges_CE[TO, edge]
    if longest[matched] > longest[state] + 1:  # its shorter strings also end here: they split off
        short = _add_state(repeats, link[matched], longest[state] + 1, end[matched])
        copied_edge = newest_edge[matched]
        while copied_edge >= 0:
            key, to, before = repeats.edges_CE[:, copied_edge]
            _add_edge(repeats, short, key & TOKEN_BITS, to)
            copied_edge = before
        while edge >= 0 and repeats.edges_CE[TO, edge] == matched:
            repeats.edges_CE[TO, edge] = short
            state = link[state]
            edge = _edge(repeats, state, token)
        link[matched] = short
        matched = short
    link[new] = matched
    match_end = end[matched]
    end[matched] = here
    return match_end, longest[matched]


@jit
def _add_state(repeats: Repeats, link: int, longest: int, end: int) -> int:
    state = repeats.counts[STATES]
    repeats.counts[STATES] += 1
    repeats.states_CS[LINK, state] = link
    repeats.states_CS[LONGEST, state] = longest
    repeats.states_CS[END, state] = end
    return state


@jit
def _edge(repeats: Repeats, state: int, token: int) -> int:
    # the number of the state's edge; -1 where it has none, or is none
    if state < 0:
        return -1
    table, keys_E = repeats.edge_table, repeats.edges_CE[KEY]
    return table[_place(table, keys_E, _key(state, token))] - 1


@jit
def _add_edge(repeats: Repeats, state: int, token: int, to: int) -> None:
    key = _key(state, token)
    edge = repeats.counts[EDGES]
    repeats.counts[EDGES] += 1
    repeats.edge_table[_place(repeats.edge_table, repeats.edges_CE[KEY], key)] = edge + 1
    repeats.edges_CE[KEY, edge] = key
    repeats.edges_CE[TO, edge] = to
    repeats.edges_CE[BEFORE, edge] = repeats.states_CS[EDGE, state]
    repeats.states_CS[EDGE, state] = edge


@jit
def _counted(repeats: Repeats, shorter: int, token: int) -> int:
    # the run of a shorter one and a token, which is seen once more
    key = _key(shorter, token)
    place = _place(repeats.run_table, repeats.runs_CR[KEY], key)
    if not repeats.run_table[place]:
        repeats.run_table[place] = repeats.counts[RUNS] + 1
        repeats.runs_CR[KEY, repeats.counts[RUNS]] = key
        repeats.counts[RUNS] += 1
    run = repeats.run_table[place] - 1
    repeats.runs_CR[SEEN, run] += 1
    return run


@jit
def _find_precedents(repeats: Repeats) -> None:
    newest = repeats.counts[TOKENS] - 1
    first = repeats.text_CT[MATCH_END, newest] + 1
    repeats.precedents_CP[:] = 0
    for length in range(LONGEST_RUN - 1):
        run = repeats.text_CT[RUN + length, newest]
        if first > 0 and run > 0:
            key = _key(run, repeats.text_CT[TOKEN, first])
            longer = repeats.run_table[_place(repeats.run_table, repeats.runs_CR[KEY], key)]
            repeats.precedents_CP[TIMES, length] = repeats.runs_CR[SEEN, run] - 1
            repeats.precedents_CP[AGREED, length] = repeats.runs_CR[SEEN, max(longer - 1, 0)]


@jit
def _key(number: int, token: int) -> int:
    return number << 32 | (token & TOKEN_BITS)


@jit
def _place(table: Array, keys: Array, key: int) -> int:
    # where the table has the key's number, or has room for it
    mixed = int(key) * 0x2545F4914F6CDD1D  # the largest bits depend on all of the key
    place = (mixed ^ (mixed >> 32)) & (len(table) - 1)
    while table[place] and keys[table[place] - 1] != key:
        place = (place + 1) & (len(table) - 1)
    return place


@jit
def _fill(table: Array, keys: Array, first: int) -> None:
    for number in range(first, len(keys)):
        table[_place(table, keys, keys[number])] = number + 1
