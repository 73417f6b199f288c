"""Drafts copied from the text itself: what followed the longest earlier match of its end.

In `a b c a b` the longest end that stands in the text before is `a b`, of length 2; a `c` followed it there, so the
proposal is `c a b c ..`: it may run on into what it has copied itself. Engines call this prompt lookup or n-gram
speculation; here any length of match counts, in prompt and output alike.

A suffix automaton (Blumer et al. 1985) knows all substrings of the text so far; it grows by one token in amortised
constant time. After a token has been added, the longest end of the text that occurred earlier is what the newest
state's suffix link stands for. Each state remembers where one of its strings last ended when it was that match, so that
later occurrences are preferred to earlier ones: nearby text is the better guide.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class LookupIndex:
    """The longest earlier match of a text's end, kept up to date token by token, and what followed it.

    Attributes:
        tokens: of the text so far.
        match: its length in tokens, overlaps included; 0 where the last token is new.
        source: the position where it ends; -1 where there is none.
    """

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self.tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]  # by state and token
        self._link = [-1]
        self._longest = [0]
        self._end = [-1]  # by state: the position where an occurrence of its strings ends
        self._last = 0
        self.match, self.source = 0, -1
        for token in tokens:
            self.add(token)

    def __len__(self) -> int:
        """Tokens so far."""
        return len(self.tokens)

    def add(self, token: int) -> None:
        """The text goes on."""
        here = len(self.tokens)
        self.tokens.append(token)
        new = self._state(self._longest[self._last] + 1, {}, 0, here)
        state = self._last
        self._last = new
        while state >= 0 and token not in self._next[state]:
            self._next[state][token] = new
            state = self._link[state]
        if state < 0:
            self.match, self.source = 0, -1
            return
        known = self._next[state][token]
        if self._longest[known] > self._longest[state] + 1:  # some of its ends occur elsewhere, too: they split off
            copy = self._state(self._longest[state] + 1, dict(self._next[known]), self._link[known], self._end[known])
            while state >= 0 and self._next[state].get(token) == known:
                self._next[state][token] = copy
                state = self._link[state]
            self._link[known] = copy
            known = copy
        self._link[new] = known
        self.match, self.source = self._longest[known], self._end[known]
        self._end[known] = here

    def proposal(self, length: int) -> list[int]:
        """The next `length` tokens, if the text goes on as it did after the match; none where there is no match."""
        if self.match == 0:
            return []
        begin, period = self.source + 1, len(self.tokens) - self.source - 1
        return [self.tokens[begin + n % period] for n in range(length)]

    def foretells(self, token: int) -> bool:
        """Whether the proposal's first token is this one."""
        return self.match > 0 and self.tokens[self.source + 1] == token

    def agreement(self, following: Sequence[int]) -> int:
        """How many of the tokens that follow the proposal has right, up to the first wrong one."""
        for right, (proposed, token) in enumerate(zip(self.proposal(len(following)), following, strict=False)):
            if proposed != token:
                return right
        return len(following) if self.match else 0

    def _state(self, longest: int, following: dict[int, int], link: int, end: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._longest.append(longest)
        self._end.append(end)
        return len(self._link) - 1
