"""How far an earlier place in the text can be trusted: what speaks for copying from there.

A lookup proposes what followed the longest earlier match of the text's end. Whether the text will go on so again is
often written in the text itself. In `a b c . a b d . a b` the end `a b` was followed by `d` the last time, but by `c`
the time before: half of its precedents speak for the proposal. And how sure was the target when it read on there? The
entropies of its rows are known wherever the text was generated, so a proposal that runs into a place of high entropy is
likely to end there. All of this is known before any pass of the draft, and takes no pass of any model.
"""

from __future__ import annotations

from collections import Counter
from itertools import accumulate

from data_gen.lookup import LookupIndex
from selector.schema import LONGEST_LOOKUP, LONGEST_MATCH, PRECEDENT_LENGTHS, SOURCE_LENGTHS


class Precedents:
    """What speaks for and against the proposals of an index of lookups, kept up to date token by token beside it.

    Args:
        index: of the prompt; the entropies begin after it.
    """

    def __init__(self, index: LookupIndex) -> None:
        self._index = index
        self._prompt = len(index)
        self._entropies: list[float] = []  # of the target before each token after the prompt
        self._foretold: list[bool] = []  # whether a lookup had it right
        self._steady = 0
        self._counts: Counter[tuple[int, ...]] = Counter()  # of all runs of a few tokens
        self._counted = 0
        self._source = index.source

    def add(self, entropy: float, foretold: bool) -> None:
        """The index has got one more token.

        Args:
            entropy: of the target before it, in nats.
            foretold: whether it was the first token of the index's proposal.
        """
        self._entropies.append(entropy)
        self._foretold.append(foretold)
        source = self._index.source
        self._steady = self._steady + 1 if source == self._source + 1 and self._source >= 0 else 0
        self._source = source

    def scalars(self, usual_entropy: float) -> list[float]:
        """Those of the schema from `source_entropy_1` on.

        Args:
            usual_entropy: stands where no entropy is known.
        """
        self._count()
        tokens, source = self._index.tokens, self._index.source
        if source < 0:
            return [usual_entropy] * len(SOURCE_LENGTHS) + [0.0] * (4 + 2 * len(PRECEDENT_LENGTHS))
        distance = len(tokens) - 1 - source
        first = source + 1 - self._prompt  # the proposal's first token, counted from the prompt's end
        copied = [first + n % distance for n in range(LONGEST_LOOKUP)]
        known = [at >= 0 for at in copied]
        sums = list(accumulate(self._entropies[at] if at >= 0 else 0.0 for at in copied))
        counts = list(accumulate(known))
        means = [sums[n - 1] / counts[n - 1] if counts[n - 1] else usual_entropy for n in SOURCE_LENGTHS]
        foretold = next((n for n, at in enumerate(copied) if at < 0 or not self._foretold[at]), LONGEST_LOOKUP)
        seen: list[float] = []
        for n in PRECEDENT_LENGTHS:
            end = tuple(tokens[-n:])
            before = self._counts[end] - 1 if len(end) == n else 0
            agree = self._counts[(*end, tokens[source + 1])] if before > 0 else 0
            seen += [before, agree / before if before > 0 else 0.0]
        place = [counts[-1] / LONGEST_LOOKUP, foretold, min(self._steady, LONGEST_MATCH), distance]
        return [*means, *place, *seen]

    def _count(self) -> None:
        """Counts the runs of tokens that end at the newest tokens."""
        tokens = self._index.tokens
        for end in range(self._counted + 1, len(tokens) + 1):
            for n in range(1, min(max(PRECEDENT_LENGTHS) + 1, end) + 1):
                self._counts[tuple(tokens[end - n : end])] += 1
        self._counted = len(tokens)
