"""Features of a drafter's hits: committed tokens that the drafter predicted.

Legend: N tokens, F scalars, D decays of running means, C slots of a table.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from data_gen.features.numbers import CAPS, DECAYS_D, PRECEDENTS, ROOM, Array, Numbers, averaged, empty_table, longer
from data_gen.features.text import FADING, TextHistory, in_a_row, shares
from selector.jit import jit, key_of, slot
from selector.schema import DRAFTER_SCALARS, HIT_LENGTHS, KEYS, MEANS

_HITS = np.array(HIT_LENGTHS)


class HitHistory:
    """A drafter's hits on the committed tokens after the prompt of `text`."""

    def __init__(self, text: TextHistory) -> None:
        self.text = text
        self._hits = Numbers()
        # running means of all hits, and of those that a lookup foretold and the others
        self._sums_2D, self._of_copied_22 = np.zeros((2, len(DECAYS_D))), np.zeros((2, 2))
        self._make_table(ROOM)
        self._done = 0  # hits that are in the running means

    def _make_table(self, hits: int) -> None:
        """Begin a table of what followed runs of a few tokens, with room for `hits` hits, and count these anew."""
        keys_C, counts_C = empty_table(hits * len(PRECEDENTS))
        self._after, self._counted, self._room = (keys_C, counts_C, np.zeros(len(keys_C))), np.zeros(1, np.int64), hits

    def add(self, hits: Sequence[float]) -> None:
        """Add, for each new committed token, whether the drafter predicted it."""
        self._hits.add(hits)
        if len(self._hits.array_N) > self._room:
            self._make_table(2 * len(self._hits.array_N))

    @property
    def key(self) -> int:
        """The key that groups training roots in addition to `TextHistory.keys`."""
        hits_N = self._hits.array_N
        return int(key_of(len(KEYS), self.text.index.tokens[-1], int(hits_N[-1]) if len(hits_N) else -1))

    def scalars(self) -> Array:
        """The drafter's scalars at the newest token, float64 [F]. All tokens after the prompt must have been added."""
        found_F = np.empty(len(DRAFTER_SCALARS) - len(MEANS) - 1)
        hits_N, foretold_N = self._hits.array_N, self.text.foretold_N[self.text.start :]
        means_D = averaged(self._sums_2D, DECAYS_D, hits_N[self._done :])
        for n in range(self._done, len(hits_N)):
            sums_2 = self._of_copied_22[int(foretold_N[n] == 0)]
            sums_2 *= FADING
            sums_2 += hits_N[n], 1
        self._done = len(hits_N)
        found_F[: len(means_D)] = means_D
        tokens_N, place = self.text.index.tokens_N, (self.text.start, self.text.index.source, len(means_D))
        at = _of_hits(found_F, tokens_N, hits_N, place, self._counted, self._after, _HITS, PRECEDENTS, CAPS)
        found_F[at:] = (self._of_copied_22[:, 0] + 2 * means_D[-1]) / (self._of_copied_22[:, 1] + 2)
        return found_F


@jit
def _of_hits(
    found_F: Array,
    tokens_N: Array,
    hits_N: Array,
    place: tuple[int, int, int],
    counted: Array,
    after: tuple[Array, Array, Array],
    source_lengths: Array,
    precedent_lengths: Array,
    caps: tuple[int, int, int],
) -> int:
    """Write the drafter's scalars after its running means, in the schema's order; returns the position after them.

    Args:
        hits_N: the hits after the prompt.
        place: the prompt's tokens, the source, the position of the first scalar.
        counted: how many hits the table has; both are updated here.
        after: the table: runs' keys, how often a hit or a miss followed them, how often a hit.
    """
    (start, source, at), (keys_C, counts_C, hits_C), usual = place, after, found_F[place[2] - 1]
    for n in range(counted[0], len(hits_N)):
        run = np.uint64(0)
        for count in range(min(precedent_lengths[-1], start + n)):
            run = longer(run, tokens_N[start + n - 1 - count])
            here = slot(keys_C, run)
            keys_C[here] = run
            counts_C[here] += 1
            hits_C[here] += hits_N[n]
    counted[0] = len(hits_N)
    hits = 0
    while hits < min(caps[0], len(hits_N)) and hits_N[len(hits_N) - 1 - hits] > 0:
        hits += 1
    found_F[at] = hits
    inside = source - start  # the source's position among the hits; negative if it is in the prompt
    found_F[at + 1] = in_a_row(hits_N, inside, caps[1])
    at = shares(found_F, at + 2, hits_N, inside, source_lengths, usual)
    run = np.uint64(0)
    for number in range(len(precedent_lengths)):
        seen, right = 0, 0.0
        if number < len(tokens_N):
            run = longer(run, tokens_N[len(tokens_N) - 1 - number])
            here = slot(keys_C, run)
            seen, right = counts_C[here], hits_C[here]
        found_F[at + number] = (right + 2 * usual) / (seen + 2)
        if number == 0:
            found_F[at + len(precedent_lengths)] = min(seen, caps[2])
    return at + len(precedent_lengths) + 1
