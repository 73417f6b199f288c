"""What the text and both models' rows along it say at a root; a decoder keeps it up to date step by step.

The text says most of the *source*, the place that a lookup copies from: what followed the longest earlier match of the
text's end. Whether the text will go on so again is often written in the text itself. In `a b c . a b d . a b` the end
`a b` was followed by `d` the last time, but by `c` the time before: half of its precedents speak for the proposal. And
how sure was the target when it read on there? The entropies of its rows are known wherever the text was generated, so a
proposal that runs into a place of high entropy is likely to end there. All of this is known before any pass of the
draft, and takes no pass of any model.

Legend: N tokens, F scalars, D decays of running means, C slots of a table of counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data_gen.lookup import LookupIndex
from data_gen.sampling import Sampling
from selector.jit import jit, slot
from selector.schema import DECAYS, EARLY_SCALARS, LONGEST_MATCH, PRECEDENT_LENGTHS, SOURCE_LENGTHS

Array = NDArray[Any]

# arguments of what is compiled: Numba keeps compiled code until this file changes, and with it other files' constants
_DECAYS_D, _SOURCES, _PRECEDENTS = np.array(DECAYS), np.array(SOURCE_LENGTHS), np.array(PRECEDENT_LENGTHS)
USUAL = DECAYS.index(0.8)  # the running mean that stands for entropies that are not known
COUNTED, ROWS, COPIED, STEADY = range(4)  # of `TextHistory._state`
ROOM = 512  # tokens, at first


class TextHistory:
    """What the text and the target's rows along it say, from the last prompt token on.

    Args:
        prompt: token ids; they count for repeats alone.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.index = LookupIndex(prompt)
        self._rows = 0  # tokens after the prompt
        # of each token after the prompt: the target's entropy before it, and whether a lookup had it right
        self._entropies_N, self._foretold_N = np.zeros(0), np.zeros(0)
        self._sources_N = np.array([self.index.source])  # the source before each of these, and after the last
        self._means_3D = np.zeros((3, len(DECAYS)))
        self._state = np.zeros(4, np.int64)
        self._keys_C, self._counts_C = np.zeros(0, np.uint64), np.zeros(0, np.int32)  # of all runs of a few tokens

    def add(self, tokens: Sequence[int], target_entropies: Sequence[float]) -> None:
        """More committed tokens, and the target's entropy before each."""
        begin, self._rows = self._rows, self._rows + len(tokens)
        if self._rows > len(self._entropies_N):
            self._make_room()
        self._entropies_N[begin : self._rows] = target_entropies
        self._foretold_N[begin : self._rows], self._sources_N[begin + 1 : self._rows + 1] = self.index.extend(tokens)

    def _make_room(self) -> None:
        """For twice as many tokens as there are; runs of tokens are then counted anew."""
        more = self._rows + ROOM
        for name in ("_entropies_N", "_foretold_N", "_sources_N"):
            array = getattr(self, name)
            setattr(self, name, np.concatenate([array, np.zeros(more, array.dtype)]))
        runs = (1 + PRECEDENT_LENGTHS[-1]) * (len(self.index) + len(self._entropies_N))
        slots = 1 << (2 * runs).bit_length()  # at most half of them are taken
        self._keys_C, self._counts_C = np.zeros(slots, np.uint64), np.zeros(slots, np.int32)
        self._state[COUNTED] = 0

    def scalars(self, length: int, sampling: Sampling) -> Array:
        """The early scalars at the newest token, float64 [F]. At least one token has been added."""
        rows = self._rows
        found_F = np.empty(len(EARLY_SCALARS))
        end = _early(
            found_F,
            self.index.tokens_N,
            self._entropies_N[:rows],
            self._foretold_N[:rows],
            self._sources_N[: rows + 1],
            self.index.match,
            self._means_3D,
            self._state,
            self._keys_C,
            self._counts_C,
            _DECAYS_D,
            _SOURCES,
            _PRECEDENTS,
            USUAL,
            LONGEST_MATCH,
        )
        found_F[end:] = length, sampling.temperature, sampling.top_p
        return found_F


class DraftHistory:
    """What the draft's rows along the text say, from the last prompt token on."""

    def __init__(self) -> None:
        self._means_3D = np.zeros((3, len(DECAYS)))
        self._means: list[float] = []
        self._agreed = 0
        self._newest_entropy = 0.0

    def add(self, accepted: Sequence[float], draft_entropies: Sequence[float]) -> None:
        """More committed tokens: what the rows before each say, `min(1, q/p)` of it and the draft's entropy."""
        self._means = _averaged(self._means_3D, _DECAYS_D, np.array(accepted), np.array(draft_entropies)).tolist()
        for share in accepted:
            self._agreed = self._agreed + 1 if share >= 1 else 0
        self._newest_entropy = draft_entropies[-1]

    def scalars(self, draft_entropy_root: float) -> list[float]:
        """The scalars that the draft is needed for, at the newest token."""
        return [self._newest_entropy, draft_entropy_root, *self._means, min(self._agreed, LONGEST_MATCH)]


@jit
def _averaged(means_3D: Array, decays_D: Array, firsts_N: Array, seconds_N: Array) -> Array:
    """Running means of two numbers: of the first one at every decay, then of the second.

    Args:
        means_3D: sums of both and of weights, brought up to date here.
        firsts_N, seconds_N: their newest values.
    """
    D = len(decays_D)
    found = np.empty(2 * D)
    for d in range(D):
        for n in range(len(firsts_N)):
            means_3D[0, d] = decays_D[d] * means_3D[0, d] + firsts_N[n]
            means_3D[1, d] = decays_D[d] * means_3D[1, d] + seconds_N[n]
            means_3D[2, d] = decays_D[d] * means_3D[2, d] + 1
        found[d] = means_3D[0, d] / means_3D[2, d]
        found[D + d] = means_3D[1, d] / means_3D[2, d]
    return found


@jit
def _early(
    found_F: Array,
    tokens_N: Array,
    entropies_N: Array,
    foretold_N: Array,
    sources_N: Array,
    match: int,
    means_3D: Array,
    state: Array,
    keys_C: Array,
    counts_C: Array,
    decays_D: Array,
    source_lengths: Array,
    precedent_lengths: Array,
    usual_at: int,
    longest_match: int,
) -> int:
    """The early scalars up to the precedents, in the order of the schema; the position after them.

    `means_3D`, `state`, `keys_C` and `counts_C` are brought up to date.
    """
    rows = state[ROWS]
    means = _averaged(means_3D, decays_D, entropies_N[rows:], foretold_N[rows:])
    for n in range(rows, len(entropies_N)):
        state[COPIED] = state[COPIED] + 1 if foretold_N[n] > 0 else 0
        state[STEADY] = state[STEADY] + 1 if 0 <= sources_N[n] == sources_N[n + 1] - 1 else 0
    state[ROWS] = len(entropies_N)
    found_F[0] = entropies_N[-1]
    found_F[1 : 1 + len(means)] = means
    at = 1 + len(means)
    found_F[at] = min(state[COPIED], longest_match)
    found_F[at + 1] = min(match, longest_match)
    at = _place(found_F, at + 2, tokens_N, entropies_N, foretold_N, sources_N[-1], source_lengths, means[usual_at])
    found_F[at] = min(state[STEADY], longest_match) if match > 0 else 0
    found_F[at + 1] = len(tokens_N) - 1 - sources_N[-1] if match > 0 else 0
    _count(tokens_N, state, keys_C, counts_C, 1 + precedent_lengths[-1])
    return _precedents(found_F, at + 2, tokens_N, sources_N[-1], keys_C, counts_C, precedent_lengths)


@jit
def _place(
    found_F: Array,
    at: int,
    tokens_N: Array,
    entropies_N: Array,
    foretold_N: Array,
    source: int,
    lengths: Array,
    usual: float,
) -> int:
    """What is known of the tokens that a lookup would copy: mean entropies, the share that is known, and how many of
    them in a row a lookup foretold."""
    prompt, distance = len(tokens_N) - len(entropies_N), len(tokens_N) - 1 - source
    total, known, foretold, in_a_row = 0.0, 0, 0, True
    number = 0
    for n in range(lengths[-1]):
        copied = source + 1 + n % distance - prompt
        is_known = source >= 0 and copied >= 0
        if is_known:
            total += entropies_N[copied]
            known += 1
        in_a_row = in_a_row and is_known and foretold_N[copied] > 0
        foretold += in_a_row
        if n + 1 == lengths[number]:
            found_F[at + number] = total / known if known > 0 else usual
            number += 1
    found_F[at + number] = known / lengths[-1]
    found_F[at + number + 1] = foretold
    return at + number + 2


@jit
def _precedents(
    found_F: Array, at: int, tokens_N: Array, source: int, keys_C: Array, counts_C: Array, lengths: Array
) -> int:
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
            found_F[at] = before
            found_F[at + 1] = agree / before if before > 0 else 0.0
            at, number = at + 2, number + 1
    return at


@jit
def _count(tokens_N: Array, state: Array, keys_C: Array, counts_C: Array, longest: int) -> None:
    """Counts the runs of up to `longest` tokens that end at tokens that are not counted yet."""
    for last in range(state[COUNTED], len(tokens_N)):
        run = np.uint64(0)
        for n in range(min(longest, last + 1)):
            run = _longer(run, tokens_N[last - n])
            at = slot(keys_C, run)
            keys_C[at] = run
            counts_C[at] += 1
    state[COUNTED] = len(tokens_N)


@jit
def _longer(run: np.uint64, before: int) -> np.uint64:
    """The key of a run of tokens with one more before it, never 0: 64 bits, mixed as in SplitMix64.

    Two runs of a text of 100,000 tokens have the same key in one text of 10^8, where a count is then too high.
    """
    run = (run ^ np.uint64(before + 1)) * np.uint64(0xBF58476D1CE4E5B9)
    run = (run ^ (run >> np.uint64(30))) * np.uint64(0x94D049BB133111EB)
    return max(run ^ (run >> np.uint64(27)), np.uint64(1))
