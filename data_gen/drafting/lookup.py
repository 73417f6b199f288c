"""Drafts that are copied from the text: the tokens after the longest earlier match of its end.

In `a b c a b` the longest end that occurs earlier is `a b`, of length 2. A `c` followed it there, so the proposal is
`c a b c ..`, which may continue into its own copy. Engines call this prompt lookup or n-gram speculation.

A suffix automaton (Blumer et al. 1985) represents all substrings of the text and grows by one token in amortised
constant time. The longest end of the text that occurred earlier is the string of the newest state's suffix link. Each
state stores where it was last such a match, so that late occurrences are preferred to early ones.

Legend: N tokens, S states, E slots of the hash table of edges.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from selector.jit import jit, slot

Array = NDArray[Any]
ROOM = 512  # tokens, at first
STATES, LAST, MATCH, SOURCE = range(4)  # of `LookupIndex._now`


class LookupIndex:
    """The longest earlier match of a text's end, and the tokens after it. The text grows by `extend`.

    Attributes:
        found_3N: for each token, whether it was the first one of the proposal before it, and the source and the length
            of the match after it, int64; what follows the text's end has no meaning.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._make_room(0)
        self.extend(list(tokens))

    def _make_room(self, count: int) -> None:
        """Allocate an empty automaton for twice as many tokens; n tokens make at most 2n states and 3n edges."""
        self._most = 2 * count + ROOM
        slots = 1 << (6 * self._most).bit_length()  # at most half of them are taken
        self.found_3N = np.zeros((3, self._most), np.int64)
        self._tokens_N = np.zeros(self._most, np.int64)
        self._now = np.array([1, 0, 0, -1])
        states_4S = np.full((4, 2 * self._most), -1)  # link, length of the longest string, an end of it, newest edge
        states_4S[1, 0] = 0
        self._automaton = states_4S, np.zeros(slots, np.uint64), np.zeros((2, slots), np.int64)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def tokens_N(self) -> Array:
        """The tokens as an array, int64."""
        return self._tokens_N[: len(self.tokens)]

    @property
    def match(self) -> int:
        """The match's length in tokens; it may overlap the end. 0 where the last token is new."""
        return int(self._now[MATCH])

    @property
    def source(self) -> int:
        """The position of the match's last token; -1 where there is no match."""
        return int(self._now[SOURCE])

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        if not tokens:
            return
        begin = len(self.tokens)
        self.tokens += tokens
        if len(self.tokens) > self._most:
            self._make_room(len(self.tokens))
            begin = 0
        self._tokens_N[begin : len(self.tokens)] = self.tokens[begin:]
        _grow(self._tokens_N, begin, len(self.tokens), self.found_3N, *self._automaton, self._now)

    def proposal(self, length: int) -> list[int]:
        """The next `length` tokens, if the text continues as after the match; none where there is no match."""
        if self.match == 0:
            return []
        begin = self.source + 1
        period = len(self.tokens) - begin
        return [self.tokens[begin + n % period] for n in range(length)]

    def agreement(self, following: Sequence[int]) -> int:
        """How many of the following tokens the proposal predicts, up to its first error."""
        if self.match == 0:
            return 0
        pairs = zip(self.proposal(len(following)), following, strict=True)
        return next((right for right, (proposed, token) in enumerate(pairs) if proposed != token), len(following))


@jit
def _grow(
    tokens_N: Array,
    begin: int,
    end: int,
    found_3N: Array,
    states_4S: Array,
    keys_E: Array,
    edges_2E: Array,
    now: Array,
) -> None:
    """Add the tokens from `begin` to `end` to the automaton.

    Args:
        found_3N: `LookupIndex.found_3N`, written here.
        states_4S: links, lengths of the longest strings, ends, newest edges.
        keys_E: each edge's state and token, as one number.
        edges_2E: the state that it leads to; the same state's edge before it, so that its newest edge begins a linked
            list.
    """
    link_S, longest_S, end_S, newest_S = states_4S
    targets_E, before_E = edges_2E
    for here in range(begin, end):
        token = tokens_N[here]
        found_3N[0, here] = now[MATCH] > 0 and tokens_N[now[SOURCE] + 1] == token
        state, new = now[LAST], now[STATES]
        now[STATES], now[LAST], now[MATCH], now[SOURCE] = new + 1, new, 0, -1
        link_S[new], longest_S[new], end_S[new] = 0, longest_S[state] + 1, here
        while state >= 0 and keys_E[slot(keys_E, _edge(state, token))] == np.uint64(0):
            _lead(state, token, new, keys_E, targets_E, before_E, newest_S)
            state = link_S[state]
        if state >= 0:
            known = targets_E[slot(keys_E, _edge(state, token))]
            if longest_S[known] > longest_S[state] + 1:  # its shorter strings also end elsewhere: they split off
                copy = now[STATES]
                now[STATES] = copy + 1
                link_S[copy], longest_S[copy], end_S[copy] = link_S[known], longest_S[state] + 1, end_S[known]
                edge = newest_S[known]
                while edge >= 0:
                    _lead(copy, _token(keys_E[edge]), targets_E[edge], keys_E, targets_E, before_E, newest_S)
                    edge = before_E[edge]
                while state >= 0 and targets_E[slot(keys_E, _edge(state, token))] == known:
                    _lead(state, token, copy, keys_E, targets_E, before_E, newest_S)
                    state = link_S[state]
                link_S[known] = copy
                known = copy
            link_S[new] = known
            now[MATCH], now[SOURCE] = longest_S[known], end_S[known]
            end_S[known] = here
        found_3N[1, here], found_3N[2, here] = now[SOURCE], now[MATCH]


@jit
def _edge(state: int, token: np.int64) -> np.uint64:
    """State and token as one number, never 0. Token ids are below 2^32 - 1."""
    return (np.uint64(state) << np.uint64(32)) | np.uint64(token + 1)


@jit
def _token(edge: np.uint64) -> np.int64:
    return np.int64(edge & np.uint64(0xFFFFFFFF)) - np.int64(1)


@jit
def _lead(
    state: int, token: np.int64, target: int, keys_E: Array, targets_E: Array, before_E: Array, newest_S: Array
) -> None:
    """Let a state's edge with this token lead to `target`."""
    key = _edge(state, token)
    at = slot(keys_E, key)
    if keys_E[at] == np.uint64(0):
        keys_E[at], before_E[at] = key, newest_S[state]
        newest_S[state] = at
    targets_E[at] = target
