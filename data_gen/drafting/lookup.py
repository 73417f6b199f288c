"""Drafts copied from the text itself: what followed the longest earlier match of its end.

In `a b c a b` the longest end that occurs earlier is `a b`, of length 2. A `c` followed it there, so the proposal is
`c a b c ..`, which may continue into its own copy. Engines call this prompt lookup or n-gram speculation; here matches
of all lengths count, in prompt and output.

A suffix automaton (Blumer et al. 1985) knows all substrings of the text so far; it grows by one token in amortised
constant time. After a token has been added, the longest end of the text that occurred earlier is what the newest
state's suffix link stands for. Each state remembers where one of its strings last ended when it was that match, so that
later occurrences are preferred to earlier ones: nearby text is the better guide.

Legend: N tokens, S states, E slots of a table of the edges between them.
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
_NOTHING = np.zeros(0, np.int64)


class LookupIndex:
    """The longest earlier match of a text's end, kept up to date token by token, and what followed it.

    Attributes:
        tokens: of the text so far.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._make_room(0)
        self.extend(list(tokens))

    def _make_room(self, count: int) -> None:
        """An automaton of no text, for up to so many tokens and as many again: n tokens make at most 2n states and 3n
        edges."""
        self._most = 2 * count + ROOM
        slots = 1 << (6 * self._most).bit_length()  # at most half of them are taken
        self._tokens_N = np.zeros(self._most, np.int64)
        self._states_3S = np.full((3, 2 * self._most), -1)  # of each the link, the longest string, and an end of it
        self._edges_E = np.zeros(slots, np.uint64), np.zeros(slots, np.int64), np.zeros(slots, np.int64)
        self._newest_S = np.full(2 * self._most, -1)  # the newest edge of each
        self._states_3S[1, 0] = 0
        self._now = np.array([1, 0, 0, -1])

    def __len__(self) -> int:
        """Tokens so far."""
        return len(self.tokens)

    @property
    def tokens_N(self) -> Array:
        """The same as an array, int64."""
        return self._tokens_N[: len(self.tokens)]

    @property
    def match(self) -> int:
        """Its length in tokens, overlaps included; 0 where the last token is new."""
        return int(self._now[MATCH])

    @property
    def source(self) -> int:
        """The position where it ends; -1 where there is none."""
        return int(self._now[SOURCE])

    def extend(self, tokens: Sequence[int]) -> tuple[Array, Array, Array]:
        """The text goes on.

        Returns:
            For each of them, whether it was the first one of the proposal before it; the source and the length of the
            match after it.
        """
        if not tokens:
            return _NOTHING, _NOTHING, _NOTHING
        begin = len(self.tokens)
        self.tokens += tokens
        if len(self.tokens) > self._most:
            self._make_room(len(self.tokens))
            self._tokens_N[:begin] = self.tokens[:begin]
            self._grow(0, begin)
        self._tokens_N[begin : len(self.tokens)] = tokens
        return self._grow(begin, len(self.tokens))

    def _grow(self, begin: int, end: int) -> tuple[Array, Array, Array]:
        found_3N: Array = _grown(
            self._tokens_N[:end], begin, self._states_3S, *self._edges_E, self._newest_S, self._now
        )
        return found_3N[0], found_3N[1], found_3N[2]

    def proposal(self, length: int) -> list[int]:
        """The next `length` tokens, if the text goes on as it did after the match; none where there is no match."""
        if self.match == 0:
            return []
        begin = self.source + 1
        period = len(self.tokens) - begin
        return [self.tokens[begin + n % period] for n in range(length)]

    def agreement(self, following: Sequence[int]) -> int:
        """How many of the tokens that follow the proposal has right, up to the first wrong one."""
        for right, (proposed, token) in enumerate(zip(self.proposal(len(following)), following, strict=False)):
            if proposed != token:
                return right
        return len(following) if self.match else 0


@jit
def _grown(
    tokens_N: Array,
    begin: int,
    states_3S: Array,
    keys_E: Array,
    targets_E: Array,
    before_E: Array,
    newest_S: Array,
    now: Array,
) -> Array:
    """Adds the tokens from `begin` on to the automaton; what `extend` returns, [3, N].

    Args:
        states_3S: links, longest strings, ends.
        keys_E, targets_E, before_E: of each edge the state and the token, as one number; the state that it leads to;
            the edge of the same state that was made before it.
        newest_S: each state's newest edge, where this list of its edges begins.
    """
    link_S, longest_S, end_S = states_3S
    found_3N = np.zeros((3, len(tokens_N) - begin), np.int64)
    for here in range(begin, len(tokens_N)):
        token = tokens_N[here]
        found_3N[0, here - begin] = now[MATCH] > 0 and tokens_N[now[SOURCE] + 1] == token
        state, new = now[LAST], now[STATES]
        now[STATES], now[LAST], now[MATCH], now[SOURCE] = new + 1, new, 0, -1
        link_S[new], longest_S[new], end_S[new] = 0, longest_S[state] + 1, here
        while state >= 0 and not _leads(state, token, keys_E):
            _lead(state, token, new, keys_E, targets_E, before_E, newest_S)
            state = link_S[state]
        if state >= 0:
            known = targets_E[slot(keys_E, _edge(state, token))]
            if longest_S[known] > longest_S[state] + 1:  # some of its ends occur elsewhere, too: they split off
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
        found_3N[1, here - begin], found_3N[2, here - begin] = now[SOURCE], now[MATCH]
    return found_3N


@jit
def _edge(state: int, token: np.int64) -> np.uint64:
    """State and token as one number, never 0. Token ids are below 2^32 - 1."""
    return (np.uint64(state) << np.uint64(32)) | np.uint64(token + 1)


@jit
def _token(edge: np.uint64) -> np.int64:
    return np.int64(edge & np.uint64(0xFFFFFFFF)) - np.int64(1)


@jit
def _leads(state: int, token: np.int64, keys_E: Array) -> bool:
    """Whether a state has an edge with this token."""
    return keys_E[slot(keys_E, _edge(state, token))] != np.uint64(0)


@jit
def _lead(
    state: int, token: np.int64, target: int, keys_E: Array, targets_E: Array, before_E: Array, newest_S: Array
) -> None:
    """A state's edge with this token leads to `target` from now on."""
    key = _edge(state, token)
    at = slot(keys_E, key)
    if keys_E[at] == np.uint64(0):
        keys_E[at], before_E[at] = key, newest_S[state]
        newest_S[state] = at
    targets_E[at] = target
