"""The features at a root that depend only on token ids."""

from __future__ import annotations

from bisect import bisect
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache

from data_gen.drafting.lookup import LookupIndex, common, copied
from data_gen.features.means import RunningMeans, Share, in_a_row, means_of_first
from data_gen.models.sampling import Sampling
from selector.schema import (
    LONGEST_COUNTED,
    LONGEST_LOOKUP,
    LONGEST_MATCH,
    MOST_SEEN,
    PRECEDENT_LENGTHS,
    SOURCE_LENGTHS,
)

LONGEST_RUN = 1 + PRECEDENT_LENGTHS[-1]  # tokens of a run that is counted
SIMILAR = (1, 2, 3, 4, 7, 12, 24)  # the least matches of the classes of similar ones


class TextHistory:
    """The features of a text's token ids, from the prompt on."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.index, self.start = LookupIndex(), len(prompt)
        self._predicted, self._new = RunningMeans(), RunningMeans()
        self._copied = self._steady = 0  # the latest tokens in a row: predicted ones; those whose source moved by one
        self._seen: defaultdict[tuple[int, ...], int] = defaultdict(int)  # times, by run of a few tokens
        self._right: defaultdict[int, Share] = defaultdict(Share)  # by class of match, of lookups' first tokens
        self._lengths: defaultdict[int, Share] = defaultdict(Share)  # of their right tokens before a wrong one
        self._counted = 0  # tokens of the index
        self.add(prompt)

    def add(self, tokens: Sequence[int]) -> None:
        """Add committed tokens."""
        self.index.extend(tokens)

    def _count(self, here: int) -> None:
        tokens, sources, matches = self.index.tokens, self.index.sources, self.index.matches
        predicted = self.index.predicted[here]
        self._predicted.add(predicted)
        self._new.add(matches[here] == 0)
        self._copied = self._copied + 1 if predicted else 0
        moved = here > 0 and 0 <= sources[here - 1] == sources[here] - 1
        self._steady = self._steady + 1 if moved else 0
        run = tokens[max(here + 1 - LONGEST_RUN, 0) : here + 1]
        for first in range(len(run)):
            self._seen[tuple(run[first:])] += 1
        if here > 0 and matches[here - 1]:
            self._right[bisect(SIMILAR, matches[here - 1])].add(predicted)
        before = here - LONGEST_COUNTED  # the lookup there can be judged now
        if before >= 0 and matches[before]:
            begin = sources[before] + 1
            right = common(tokens[begin : begin + LONGEST_COUNTED], tokens[before + 1 : here + 1])
            self._lengths[bisect(SIMILAR, matches[before])].add(right / LONGEST_COUNTED)

    def scalars(self, sampling: Sampling, batch: int = 1) -> list[float]:
        """The text's scalars at its newest token, in the order of `TEXT_SCALARS`; `batch` requests are decoded
        together."""
        for here in range(self._counted, len(self.index)):
            self._count(here)
        self._counted = len(self.index)
        tokens, sources, matches = self.index.tokens, self.index.sources, self.index.matches
        match, source, copied_means = matches[-1], sources[-1], self._predicted.values()
        there = self.index.predicted[source + 1 : source + 1 + LONGEST_LOOKUP] if source >= 0 else []
        second = sources[source] if source >= 0 else -1
        third = sources[second] if second >= 0 else -1
        proposal, *others = (copied(tokens, place, LONGEST_LOOKUP) for place in (source, second, third))
        agrees = [common(proposal, other) for other in others]
        similar = bisect(SIMILAR, match)
        return [
            *(len(tokens), batch, sampling.temperature, sampling.top_p),
            min(match, LONGEST_MATCH),
            *copied_means,
            min(self._copied, LONGEST_MATCH),
            min(self._steady, LONGEST_MATCH),
            0 <= source < self.start - 1,
            in_a_row(there),
            *means_of_first(there, SOURCE_LENGTHS, 0.0),
            min(match, matches[source], LONGEST_MATCH) if source >= 0 else 0,  # no earlier match is longer than `match`
            agrees[0],
            min(agrees),
            *self._precedents(proposal),
            *self._new.values(),
            self._right[similar].value(copied_means[-1]),
            self._lengths[similar].value(copied_means[-1]),
        ]

    def _precedents(self, proposal: Sequence[int]) -> list[float]:
        tokens, result = self.index.tokens, list[float]()
        for count in PRECEDENT_LENGTHS:
            times = agreed = 0
            if proposal:
                run = tuple(tokens[-count:])
                times, agreed = self._seen[run] - 1, self._seen.get((*run, proposal[0]), 0)
            result += min(times, MOST_SEEN), agreed / times if times else 0.0
        return result

    def keys(self) -> list[int]:
        """The keys that group training roots at the newest token, in the order of `schema.KEYS`."""
        tokens, source = self.index.tokens, self.index.source
        last, before = tokens[-1], tokens[-2] if len(tokens) > 1 else -1
        first = tokens[source + 1] if source >= 0 else -1
        seen = 2 * min(self.index.match, 3) + self.index.predicted[-1]
        pairs = (last, -1), (before, last), (last, seen), (last, first), (first, -1)
        return [key_of(kind, *pair) for kind, pair in enumerate(pairs)]


@lru_cache(maxsize=1 << 16)
def key_of(kind: int, one: int, other: int) -> int:
    """Two numbers of one kind, both at least -1, as one key of 63 bits, mixed as in SplitMix64. Artefacts hold keys."""
    mixed, all_bits = 0, (1 << 64) - 1
    for part in (kind, one, other):
        mixed = (mixed ^ (part + 2)) * 0xBF58476D1CE4E5B9 & all_bits
        mixed = (mixed ^ (mixed >> 30)) * 0x94D049BB133111EB & all_bits
        mixed ^= mixed >> 27
    return mixed >> 1
