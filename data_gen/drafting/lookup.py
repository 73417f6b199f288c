"""Drafts that are copied from the text: the tokens after the longest earlier match of its end.

In `a b c a b` the longest suffix that occurs earlier is `a b`, of length 2. A `c` followed it
there, so the proposal is `c a b c ..`, which may continue into its own copy. Engines call this
prompt lookup or n-gram speculation.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from itertools import compress, count
from operator import ne
from typing import TypeVar

T = TypeVar("T")


class LookupIndex:
    """The longest earlier match of a text's end, and the tokens after it. The text grows by
    `extend`.

    A suffix automaton (Blumer et al. 1985) grows by one token in amortised constant time. The
    longest suffix of the text that occurred earlier is the string of the newest state's suffix
    link. Each state stores where it was last such a match, so that recent occurrences are
    preferred.

    Attributes:
        tokens: the text.
        predicted: for each token, 1 if it was the first one of the proposal before it, else 0.
        match_ends, matches: after each token, the position of the match's last token and the
            match's length, which may overlap the text's end; -1 and 0 where the token is new.

    They are arrays of int64, of which many slices together become a NumPy array quickly.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens = array("q")
        self.predicted = array("q")
        self.match_ends = array("q")
        self.matches = array("q")
        # by state: the next state by token, the suffix link, the longest string's length, where it
        # was last a match
        self._next: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._longest = [0]
        self._end = [-1]
        self._last = 0
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def match(self) -> int:
        """Tokens of the longest earlier match of the text's end; 0 where there is none."""
        return self.matches[-1] if self.matches else 0

    @property
    def match_end(self) -> int:
        """Position of that match's last token; -1 where there is none."""
        return self.match_ends[-1] if self.match_ends else -1

    def extend(self, tokens: Iterable[int]) -> None:
        """Append committed tokens."""
        for token in tokens:
            end = self.match_end
            was_predicted = end >= 0 and self.tokens[end + 1] == token
            match_end, match = self._grow(token)
            self.tokens.append(token)
            self.predicted.append(was_predicted)
            self.match_ends.append(match_end)
            self.matches.append(match)

    def _grow(self, token: int) -> tuple[int, int]:
        # called for every token of every request, so it appends new states to the columns itself
        after = self._next
        link = self._link
        longest = self._longest
        end = self._end
        here = len(self.tokens)
        new = len(link)
        after.append({})
        link.append(0)
        longest.append(here + 1)
        end.append(here)
        state = self._last
        self._last = new
        while state >= 0 and token not in after[state]:
            after[state][token] = new
            state = link[state]
        if state < 0:
            return -1, 0
        matched = after[state][token]
        if longest[matched] > longest[state] + 1:  # its shorter strings also end here: they split
            short = len(link)
            after.append(after[matched].copy())
            link.append(link[matched])
            longest.append(longest[state] + 1)
            end.append(end[matched])
            while state >= 0 and after[state].get(token) == matched:
                after[state][token] = short
                state = link[state]
            link[matched] = short
            matched = short
        link[new] = matched
        match_end = end[matched]
        end[matched] = here
        return match_end, longest[matched]

    def proposal(self, length: int) -> list[int]:
        """The next `length` tokens, if the text continues as after the match; none where there is
        no match."""
        return copied(self.tokens, self.match_end, length)

    def agreement(self, following: Sequence[int]) -> int:
        """How many of the following tokens the proposal predicts, up to its first error."""
        return common(self.proposal(len(following)), following)


def copied(values: Sequence[T], match_end: int, length: int) -> list[T]:
    """The values after a match, which may continue into their own copy; none where its end is
    -1."""
    if match_end < 0:
        return []
    continuation = list(values[match_end + 1 : match_end + 1 + length])
    while len(continuation) < length:
        continuation += continuation[: length - len(continuation)]
    return continuation


def common(one: Sequence[T], other: Sequence[T]) -> int:
    # no loop in Python, as it runs at every root of a text
    differing = compress(count(), map(ne, one, other))
    return next(differing, min(len(one), len(other)))
