"""Where a text repeats itself: the longest end of it that stands in it before.

A suffix automaton (Blumer et al. 1985) knows all substrings of the text so far; it grows by one token in amortised
constant time. After a token has been added, the longest end of the text that occurred earlier is what the newest
state's suffix link stands for. In `a b c a b` it is `a b`, of length 2.
"""

from __future__ import annotations

from collections.abc import Iterable


class LongestMatch:
    """`length` is that of the longest end of the tokens so far that occurred before, overlaps included."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._next: list[dict[int, int]] = [{}]  # by state and token
        self._link = [-1]
        self._longest = [0]
        self._last = 0
        for token in tokens:
            self.add(token)

    @property
    def length(self) -> int:
        """In tokens."""
        return self._longest[self._link[self._last]] if self._last else 0

    def add(self, token: int) -> None:
        """The text goes on."""
        new = self._state(self._longest[self._last] + 1, {}, 0)
        state = self._last
        self._last = new
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state < 0:
            return
        known = self._next[state][token]
        if self._longest[known] > self._longest[state] + 1:  # some of its ends occur elsewhere, too: they split off
            copy = self._state(self._longest[state] + 1, dict(self._next[known]), self._link[known])
            while state >= 0 and self._next[state].get(token) == known:
                self._next[state][token] = copy
                state = self._link[state]
            self._link[known] = copy
            known = copy
        self._link[new] = known

    def _state(self, longest: int, following: dict[int, int], link: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._longest.append(longest)
        return len(self._link) - 1
