"""Features of a drafter's hits: committed tokens that the drafter predicted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from data_gen.features.means import RunningMeans, Share, in_a_row, means_of_first
from data_gen.features.text import TextHistory, key_of
from selector.schema import HIT_LENGTHS, KEYS, LONGEST_LOOKUP, LONGEST_MATCH, MOST_SEEN, PRECEDENT_LENGTHS

NOTHING = Share()


class HitHistory:
    """A drafter's hits on the committed tokens after the prompt of `text`."""

    def __init__(self, text: TextHistory) -> None:
        self.text = text
        self._hits: list[float] = []
        self._means = RunningMeans()
        self._after: defaultdict[tuple[int, ...], Share] = defaultdict(Share)  # by run of a few tokens
        self._of_copied, self._of_others = Share(), Share()  # of tokens that a lookup predicted, and of the others

    def add(self, hits: Sequence[float]) -> None:
        """Add, for each new token of the text, whether the drafter predicted it."""
        index = self.text.index
        for hit in hits:
            here = self.text.start + len(self._hits)
            self._hits.append(hit)
            self._means.add(hit)
            (self._of_copied if index.predicted[here] else self._of_others).add(hit)
            run = index.tokens[max(here - PRECEDENT_LENGTHS[-1], 0) : here]
            for first in range(len(run)):
                self._after[tuple(run[first:])].add(hit, fading=1.0)

    @property
    def key(self) -> int:
        """The key that groups training roots in addition to `TextHistory.keys`."""
        return key_of(len(KEYS), self.text.index.tokens[-1], int(self._hits[-1]) if self._hits else -1)

    def scalars(self) -> list[float]:
        """The drafter's scalars at the newest token, in the order of `DRAFTER_SCALARS` but for those by key. All tokens
        after the prompt must have been added."""
        tokens, means = self.text.index.tokens, self._means.values()
        first = self.text.index.source + 1 - self.text.start  # the source's first token, among the hits
        there = self._hits[first : first + LONGEST_LOOKUP] if first > 0 else []
        after = [self._after.get(tuple(tokens[-count:]), NOTHING) for count in PRECEDENT_LENGTHS]
        return [
            *means,
            in_a_row(self._hits[: -LONGEST_MATCH - 1 : -1]),
            in_a_row(there),
            *means_of_first(there, HIT_LENGTHS, means[-1]),
            *(share.value(means[-1]) for share in after),
            min(after[0].count, MOST_SEEN),
            self._of_copied.value(means[-1]),
            self._of_others.value(means[-1]),
        ]
