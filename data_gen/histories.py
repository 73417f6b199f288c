"""What the text and the models' rows along it say at a root; a decoder keeps it up to date step by step.

The text says most of the *source*, the place that a lookup copies from: what followed the longest earlier match of the
text's end. Whether the text will go on so again is often written in the text itself. In `a b c . a b d . a b` the end
`a b` was followed by `d` the last time, but by `c` the time before: half of its precedents speak for the proposal. Were
lookups right there when the text was read? Would the source's own source have gone on alike? All of this follows from
token ids alone.

A model's rows add more. The target's entropies are known wherever the text was generated, so a proposal that runs into
a place of high entropy is likely to end there. A drafter that has run over the committed text shows where its first
token was right.

Legend: N tokens, F scalars, D decays of running means, C slots of a table of counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from data_gen.lookup import LookupIndex
from data_gen.sampling import Sampling
from selector.jit import jit, slot
from selector.schema import (
    DECAYS,
    DRAFTER_SCALARS,
    HIT_LENGTHS,
    KEYS,
    LONGEST_LOOKUP,
    LONGEST_MATCH,
    MEANS,
    MOST_SEEN,
    PRECEDENT_LENGTHS,
    SOURCE_LENGTHS,
    TARGET_SCALARS,
    TEXT_SCALARS,
)
from selector.tokens import key_of

Array = NDArray[Any]

# arguments of what is compiled: Numba keeps compiled code until this file changes, and with it other files' constants
_DECAYS_D, _SOURCES, _PRECEDENTS = np.array(DECAYS), np.array(SOURCE_LENGTHS), np.array(PRECEDENT_LENGTHS)
_HITS = np.array(HIT_LENGTHS)
_CAPS = LONGEST_MATCH, LONGEST_LOOKUP, MOST_SEEN
USUAL = DECAYS.index(0.8)  # the running mean that stands for entropies that are not known
FIRST = 4  # scalars that are not the text's: context length, requests, sampling setting
MATCHES = 8  # of matches that count as alike, see `_like`
AHEAD = 8  # tokens of a lookup that are judged
FADING = 0.95  # of a lookup's weight among those with a match like it
DONE, COPIED, STEADY = range(3)  # of `_Text.state`
ROOM = 512  # tokens, at first


class _Text(NamedTuple):
    """What is kept of a text, as compiled functions take it.

    Attributes:
        foretold_N: of each token, whether a lookup foretold it.
        sources_N: the source after each token, -1 where there is none.
        matches_N: the length of the match there.
        sums_2D: of what lookups foretold, and of the weights of the running means.
        new_2D: the same of tokens that were new.
        by_match_4M: by how long the match was, of what lookups foretold and of how far they were right, with weights.
        state: by `DONE` (tokens that are counted), `COPIED` (the latest in a row that lookups foretold), `STEADY` (how
            long the source has moved along).
        keys_C, counts_C: of all runs of a few tokens.
    """

    foretold_N: Array
    sources_N: Array
    matches_N: Array
    sums_2D: Array
    new_2D: Array
    by_match_4M: Array
    state: Array
    keys_C: Array
    counts_C: Array


class TextHistory:
    """What token ids alone say, from the prompt on.

    Args:
        prompt: token ids.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.index = LookupIndex()
        self.start = len(prompt)
        sums = np.zeros((2, len(DECAYS))), np.zeros((2, len(DECAYS))), np.zeros((4, MATCHES))
        arrays = np.zeros(0), np.zeros(0, np.int64), np.zeros(0, np.int64)
        self._known = _Text(*arrays, *sums, np.zeros(3, np.int64), *_empty_table(0))
        self.add(prompt)

    def add(self, tokens: Sequence[int]) -> None:
        """More committed tokens."""
        begin, end = len(self.index), len(self.index) + len(tokens)
        if end > len(self._known.foretold_N):
            self._make_room(end)
        known = self._known
        found = self.index.extend(list(tokens))
        for array_N, new_N in zip((known.foretold_N, known.sources_N, known.matches_N), found, strict=True):
            array_N[begin:end] = new_N

    def _make_room(self, tokens: int) -> None:
        """For twice as many tokens; runs of tokens are then counted anew."""
        old, room = self._known, 2 * tokens + ROOM
        arrays = old.foretold_N, old.sources_N, old.matches_N
        foretold_N, sources_N, matches_N = (np.concatenate([a, np.zeros(room - len(a), a.dtype)]) for a in arrays)
        keys_C, counts_C = _empty_table(room * (1 + PRECEDENT_LENGTHS[-1]))
        count_runs(self.index.tokens_N, 0, int(old.state[DONE]), keys_C, counts_C, 1 + PRECEDENT_LENGTHS[-1])
        self._known = old._replace(
            foretold_N=foretold_N, sources_N=sources_N, matches_N=matches_N, keys_C=keys_C, counts_C=counts_C
        )

    def scalars(self, sampling: Sampling, batch: int = 1) -> Array:
        """The text's scalars at the newest token, float64 [F].

        Args:
            batch: how many requests are decoded together.
        """
        found_F = np.empty(len(TEXT_SCALARS))
        found_F[:FIRST] = len(self.index), batch, sampling.temperature, sampling.top_p
        place = self.start, self.index.match, FIRST
        _text(found_F, self.index.tokens_N, self._known, place, _DECAYS_D, _SOURCES, _PRECEDENTS, _CAPS)
        return found_F

    @property
    def foretold_N(self) -> Array:
        """Of each token, whether a lookup foretold it."""
        return self._known.foretold_N[: len(self.index)]

    def keys(self) -> Array:
        """What training roots are grouped by, at the newest token, int64 [J], in the order of `schema.KEYS`."""
        found: Array = _keys(self.index.tokens_N, self.index.source, self.index.match, self.foretold_N[-1] > 0)
        return found


def _empty_table(entries: int) -> tuple[Array, Array]:
    """Keys and counts, of which at most half are taken."""
    slots = 1 << (2 * entries + 1).bit_length()
    return np.zeros(slots, np.uint64), np.zeros(slots, np.int32)


class _Numbers:
    """Numbers that are added step by step, as one array."""

    def __init__(self) -> None:
        self._room, self._count = np.zeros(ROOM), 0

    def add(self, new: Sequence[float]) -> None:
        end = self._count + len(new)
        if end > len(self._room):
            self._room = np.concatenate([self._room[: self._count], np.zeros(end + ROOM)])
        self._room[self._count : end] = new
        self._count = end

    @property
    def array_N(self) -> Array:
        return self._room[: self._count]


class TargetHistory:
    """What the target's rows along the text say, from the last prompt token on."""

    def __init__(self, text: TextHistory) -> None:
        self.text = text
        self._entropies = _Numbers()  # of the target before each token after the prompt
        self._sums_2D, self._done = np.zeros((2, len(DECAYS))), 0

    def add(self, entropies: Sequence[float]) -> None:
        """More committed tokens: the target's entropy before each."""
        self._entropies.add(entropies)

    def scalars(self) -> Array:
        """The target's scalars at the newest token, float64 [F]. At least one token has been added."""
        found_F, entropies_N = np.empty(len(TARGET_SCALARS)), self._entropies.array_N
        means_D = averaged(self._sums_2D, _DECAYS_D, entropies_N[self._done :])
        self._done = len(entropies_N)
        found_F[0], found_F[1 : 1 + len(means_D)] = entropies_N[-1], means_D
        place = self.text.start, self.text.index.source, 1 + len(means_D)
        _source_entropies(found_F, entropies_N, place, _SOURCES, means_D[USUAL])
        return found_F


class HitHistory:
    """What a drafter's hits on committed tokens say: whether its first token at a root was the text's.

    Args:
        text: the same text's; hits begin behind its prompt.
    """

    def __init__(self, text: TextHistory) -> None:
        self.text = text
        self._hits = _Numbers()
        # running means: of all hits, of those that a lookup foretold, of the others
        self._sums_2D, self._of_copied_22 = np.zeros((2, len(DECAYS))), np.zeros((2, 2))
        self._make_table(ROOM)
        self._done = 0  # hits that are in the running means

    def _make_table(self, hits: int) -> None:
        """A table of what followed runs of a few tokens, with room for so many hits; they are counted anew."""
        keys_C, counts_C = _empty_table(hits * len(PRECEDENT_LENGTHS))
        self._after, self._counted, self._room = (keys_C, counts_C, np.zeros(len(keys_C))), np.zeros(1, np.int64), hits

    def add(self, hits: Sequence[float]) -> None:
        """More committed tokens, of each whether the drafter had it right."""
        self._hits.add(hits)
        if len(self._hits.array_N) > self._room:
            self._make_table(2 * len(self._hits.array_N))

    @property
    def key(self) -> int:
        """What training roots are grouped by beside `TextHistory.keys`."""
        hits_N = self._hits.array_N
        return int(key_of(len(KEYS), self.text.index.tokens[-1], int(hits_N[-1]) if len(hits_N) else -1))

    def scalars(self) -> Array:
        """The drafter's scalars at the newest token, float64 [F]. Every token after the prompt has been added."""
        found_F = np.empty(len(DRAFTER_SCALARS) - len(MEANS) - 1)
        hits_N, foretold_N = self._hits.array_N, self.text.foretold_N[self.text.start :]
        means_D = averaged(self._sums_2D, _DECAYS_D, hits_N[self._done :])
        for n in range(self._done, len(hits_N)):
            sums_2 = self._of_copied_22[int(foretold_N[n] == 0)]
            sums_2 *= FADING
            sums_2 += hits_N[n], 1
        self._done = len(hits_N)
        found_F[: len(means_D)] = means_D
        tokens_N, place = self.text.index.tokens_N, (self.text.start, self.text.index.source, len(means_D))
        at = _of_hits(found_F, tokens_N, hits_N, place, self._counted, self._after, _HITS, _PRECEDENTS, _CAPS)
        found_F[at:] = (self._of_copied_22[:, 0] + 2 * means_D[-1]) / (self._of_copied_22[:, 1] + 2)
        return found_F


class DraftHistory:
    """What the draft's rows along the text say, from the last prompt token on."""

    def __init__(self) -> None:
        self._sums_2D = np.zeros((2, 2, len(DECAYS)))
        self._means: list[float] = []
        self._agreed = 0
        self._newest_entropy = 0.0

    def add(self, accepted: Sequence[float], draft_entropies: Sequence[float]) -> None:
        """More committed tokens: what the rows before each say, `min(1, q/p)` of it and the draft's entropy."""
        pairs = zip(self._sums_2D, (accepted, draft_entropies), strict=True)
        means = [averaged(sums_2D, _DECAYS_D, np.array(values)) for sums_2D, values in pairs]
        self._means = np.concatenate(means).tolist()
        for share in accepted:
            self._agreed = self._agreed + 1 if share >= 1 else 0
        self._newest_entropy = draft_entropies[-1]

    def scalars(self, draft_entropy_root: float) -> list[float]:
        """The scalars that the draft is needed for, at the newest token."""
        return [self._newest_entropy, draft_entropy_root, *self._means, min(self._agreed, LONGEST_MATCH)]


@jit
def averaged(sums_2D: Array, decays_D: Array, new_N: Array) -> Array:
    """Running means of a number at every decay, [D]; 0 where there was none yet.

    Args:
        sums_2D: its sums and those of the weights, brought up to date here.
        new_N: its newest values.
    """
    means_D = np.zeros(len(decays_D))
    for d in range(len(decays_D)):
        for n in range(len(new_N)):
            sums_2D[0, d] = decays_D[d] * sums_2D[0, d] + new_N[n]
            sums_2D[1, d] = decays_D[d] * sums_2D[1, d] + 1
        if sums_2D[1, d] > 0:
            means_D[d] = sums_2D[0, d] / sums_2D[1, d]
    return means_D


@jit
def _text(
    found_F: Array,
    tokens_N: Array,
    known: _Text,
    place: tuple[int, int, int],
    decays_D: Array,
    source_lengths: Array,
    precedent_lengths: Array,
    caps: tuple[int, int, int],
) -> None:
    """The text's scalars from the match on, in the order of the schema; brings `known` up to date.

    Args:
        place: tokens of the prompt, length of the match, the position of the first scalar.
        caps: of matches and runs, of what a lookup copies, of counts.
    """
    (start, match, at), (longest_match, longest_lookup, most_seen) = place, caps
    N, state = len(tokens_N), known.state
    means_D = averaged(known.sums_2D, decays_D, known.foretold_N[state[DONE] : N])
    new_D = averaged(known.new_2D, decays_D, _read_on(tokens_N, known, 1 + precedent_lengths[-1]))
    source = known.sources_N[N - 1]
    found_F[at] = min(match, longest_match)
    found_F[at + 1 : at + 1 + len(means_D)] = means_D
    at += 1 + len(means_D)
    found_F[at] = min(state[COPIED], longest_match)
    found_F[at + 1] = min(state[STEADY], longest_match)
    found_F[at + 2] = 1.0 if 0 <= source < start - 1 else 0.0
    found_F[at + 3] = _in_a_row(known.foretold_N[:N], source, longest_lookup)
    at = _shares(found_F, at + 4, known.foretold_N[:N], source, source_lengths)
    second = known.sources_N[source] if source >= 0 else -1
    found_F[at] = _alike_before(tokens_N, second, longest_match)
    found_F[at + 1] = _alike_after(tokens_N, source, second, longest_lookup)
    third = known.sources_N[second] if second >= 0 else -1
    found_F[at + 2] = min(found_F[at + 1], _alike_after(tokens_N, source, third, longest_lookup))
    _precedents(found_F, at + 3, tokens_N, source, known.keys_C, known.counts_C, precedent_lengths, most_seen)
    at += 3 + 2 * len(precedent_lengths)
    found_F[at : at + len(new_D)] = new_D
    at, like = at + len(new_D), _like(match)
    for part in range(2):  # drawn to what is usual in this text
        total, weight = known.by_match_4M[2 * part, like], known.by_match_4M[2 * part + 1, like]
        found_F[at + part] = (total + 2 * means_D[-1]) / (weight + 2)


@jit
def _read_on(tokens_N: Array, known: _Text, longest: int) -> Array:
    """Counts the tokens that are not counted yet; of each of these, whether it was new in the text."""
    state, N = known.state, len(tokens_N)
    new_N = np.zeros(N - state[DONE])
    for n in range(state[DONE], N):
        state[COPIED] = state[COPIED] + 1 if known.foretold_N[n] > 0 else 0
        moved = n > 0 and 0 <= known.sources_N[n - 1] == known.sources_N[n] - 1
        state[STEADY] = state[STEADY] + 1 if moved else 0
        count_runs(tokens_N, n, n + 1, known.keys_C, known.counts_C, longest)
        new_N[n - state[DONE]] = known.counts_C[slot(known.keys_C, _longer(np.uint64(0), tokens_N[n]))] == 1
        if n > 0 and known.matches_N[n - 1] > 0:
            _note(known.by_match_4M, 0, known.matches_N[n - 1], known.foretold_N[n])
        before = n - AHEAD  # a lookup from there can be judged now
        if before >= 0 and known.matches_N[before] > 0:
            source, right = known.sources_N[before], 0
            while right < AHEAD and _copied(tokens_N[: before + 1], source, right) == tokens_N[before + 1 + right]:
                right += 1
            _note(known.by_match_4M, 2, known.matches_N[before], right / AHEAD)
    state[DONE] = N
    return new_N


@jit
def _note(by_match_4M: Array, row: int, match: int, value: float) -> None:
    """One more value of lookups with a match like this one, whose weight fades."""
    like = _like(match)
    by_match_4M[row, like] = FADING * by_match_4M[row, like] + value
    by_match_4M[row + 1, like] = FADING * by_match_4M[row + 1, like] + 1


@jit
def _like(match: int) -> int:
    """Which matches count as alike: 0, 1, 2, 3, up to 6, up to 11, up to 23, longer ones."""
    if match < 4:
        return match
    return 4 + int(match >= 7) + int(match >= 12) + int(match >= 24)


@jit
def _keys(tokens_N: Array, source: int, match: int, foretold: bool) -> Array:
    """`TextHistory.keys`."""
    last, before = tokens_N[-1], tokens_N[-2] if len(tokens_N) > 1 else -1
    copied = tokens_N[source + 1] if source >= 0 else -1
    return np.array(
        [
            key_of(0, last, -1),
            key_of(1, before, last),
            key_of(2, last, 2 * min(match, 3) + int(foretold)),
            key_of(3, last, copied),
            key_of(4, copied, -1),
        ]
    )


@jit
def _in_a_row(right_N: Array, source: int, most: int) -> int:
    """How many of the tokens after the source were right, from the first on."""
    count = 0
    while source >= 0 and count < most and source + 1 + count < len(right_N) and right_N[source + 1 + count] > 0:
        count += 1
    return count


@jit
def _shares(found_F: Array, at: int, right_N: Array, source: int, lengths: Array) -> int:
    """Which share of the first few tokens after the source was right, of those that are there; the position after."""
    for number in range(len(lengths)):
        some_N = right_N[source + 1 : source + 1 + lengths[number]]
        found_F[at + number] = some_N.mean() if source >= 0 and len(some_N) > 0 else 0.0
    return at + len(lengths)


@jit
def _alike_before(tokens_N: Array, end: int, most: int) -> int:
    """How many of the text's last tokens stand before and at a position, too."""
    count, last = 0, len(tokens_N) - 1
    while count < most and end - count >= 0 and tokens_N[end - count] == tokens_N[last - count]:
        count += 1
    return count


@jit
def _alike_after(tokens_N: Array, one: int, other: int, most: int) -> int:
    """How many tokens two lookups from different sources have in common, from the first on."""
    count = 0
    if one >= 0 and other >= 0:
        while count < most and _copied(tokens_N, one, count) == _copied(tokens_N, other, count):
            count += 1
    return count


@jit
def _copied(tokens_N: Array, source: int, n: int) -> int:
    """The n-th token of a lookup from a source, which may run on into what it has copied itself."""
    return tokens_N[source + 1 + n % (len(tokens_N) - 1 - source)]


@jit
def _source_entropies(
    found_F: Array, entropies_N: Array, place: tuple[int, int, int], lengths: Array, usual: float
) -> None:
    """Means of the target's entropies before the first few tokens that a lookup would copy, and which share of the most
    of them is known.

    Args:
        entropies_N: of each token after the prompt.
        place: tokens of the prompt, the source, the position of the first scalar.
        usual: what stands where none is known.
    """
    start, source, at = place
    distance, total, known, number = start + len(entropies_N) - 1 - source, 0.0, 0, 0
    for n in range(lengths[-1]):
        copied = source + 1 + n % distance - start
        if source >= 0 and copied >= 0:
            total += entropies_N[copied]
            known += 1
        if n + 1 == lengths[number]:
            found_F[at + number] = total / known if known > 0 else usual
            number += 1
    found_F[at + number] = known / lengths[-1]


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
    """The drafter's scalars behind its running means, in the order of the schema; the position after them.

    Args:
        hits_N: of each token after the prompt.
        place: tokens of the prompt, the source, the position of the first scalar.
        counted: how many hits are in the table, brought up to date here, as the table is.
        after: of each run of a few tokens that a hit or a miss followed: its key, how many of them, how many hits.
    """
    (start, source, at), (keys_C, counts_C, hits_C), usual = place, after, found_F[place[2] - 1]
    for n in range(counted[0], len(hits_N)):
        run = np.uint64(0)
        for count in range(min(precedent_lengths[-1], start + n)):
            run = _longer(run, tokens_N[start + n - 1 - count])
            here = slot(keys_C, run)
            keys_C[here] = run
            counts_C[here] += 1
            hits_C[here] += hits_N[n]
    counted[0] = len(hits_N)
    hits = 0
    while hits < min(caps[0], len(hits_N)) and hits_N[len(hits_N) - 1 - hits] > 0:
        hits += 1
    found_F[at] = hits
    inside = source - start  # of the source among the hits; nothing is known of those before them
    found_F[at + 1] = _in_a_row(hits_N, inside, caps[1]) if inside >= 0 else 0
    at += 2
    for number in range(len(source_lengths)):
        some_N = hits_N[inside + 1 : inside + 1 + source_lengths[number]] if inside >= 0 else hits_N[:0]
        found_F[at + number] = some_N.mean() if len(some_N) > 0 else usual
    at += len(source_lengths)
    run = np.uint64(0)
    for number in range(len(precedent_lengths)):
        seen, right = 0, 0.0
        if number < len(tokens_N):
            run = _longer(run, tokens_N[len(tokens_N) - 1 - number])
            here = slot(keys_C, run)
            seen, right = counts_C[here], hits_C[here]
        found_F[at + number] = (right + 2 * usual) / (seen + 2)
        if number == 0:
            found_F[at + len(precedent_lengths)] = min(seen, caps[2])
    return at + len(precedent_lengths) + 1


@jit
def _precedents(
    found_F: Array,
    at: int,
    tokens_N: Array,
    source: int,
    keys_C: Array,
    counts_C: Array,
    lengths: Array,
    most_seen: int,
) -> None:
    """How often the text's last tokens stood in it before, and which share of these the token followed that a lookup
    would copy first."""
    end, followed = np.uint64(0), _longer(np.uint64(0), tokens_N[source + 1])
    number = 0
    for n in range(1, lengths[-1] + 1):
        before, agree = 0, 0
        if source >= 0 and n <= len(tokens_N):
            end, followed = _longer(end, tokens_N[-n]), _longer(followed, tokens_N[-n])
            before = counts_C[slot(keys_C, end)] - 1
            agree = counts_C[slot(keys_C, followed)]
        if n == lengths[number]:
            found_F[at] = min(before, most_seen)
            found_F[at + 1] = agree / before if before > 0 else 0.0
            at, number = at + 2, number + 1


@jit
def count_runs(tokens_N: Array, begin: int, end: int, keys_C: Array, counts_C: Array, longest: int) -> None:
    """Counts the runs of up to `longest` tokens that end at the tokens from `begin` to `end`."""
    for last in range(begin, end):
        run = np.uint64(0)
        for n in range(min(longest, last + 1)):
            run = _longer(run, tokens_N[last - n])
            at = slot(keys_C, run)
            keys_C[at] = run
            counts_C[at] += 1


@jit
def _longer(run: np.uint64, before: int) -> np.uint64:
    """The key of a run of tokens with one more before it, never 0: 64 bits, mixed as in SplitMix64.

    Two runs of a text of 100,000 tokens have the same key in one text of 10^8, where a count is then too high.
    """
    run = (run ^ np.uint64(before + 1)) * np.uint64(0xBF58476D1CE4E5B9)
    run = (run ^ (run >> np.uint64(30))) * np.uint64(0x94D049BB133111EB)
    return max(run ^ (run >> np.uint64(27)), np.uint64(1))
