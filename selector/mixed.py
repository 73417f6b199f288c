"""Replay of batches of different requests.

B requests are always in flight: a finished text makes room for the next one. Their decisions are made together
(`selector.joint`), or each by itself.

Legend: B requests in flight, R roots of all texts, A actions, X texts, C contexts, V verified tokens, S sources of
drafts (chains, lookups), P parts of the texts' sources.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selector.data import Timed
from selector.jit import jit
from selector.joint import Shapes, joint_actions, step_clock
from selector.latency import LatencyProfile
from selector.replay import Ratio, jackknifed_ratio

Array = NDArray[Any]
ROUNDS = 3  # of finding the speed at which time is charged
STREAM = 4  # how many texts a place in the batch sees at least
PARTS = 8  # of the sources: errors are over these


class MixedReplay(NamedTuple):
    """Of each part of the sources the tokens and the seconds of its stream, float64 [PARTS]."""

    tokens_P: Tensor
    seconds_P: Tensor

    @property
    def speed(self) -> float:
        """Tokens per second of the whole batch."""
        return float(self.tokens_P.sum() / self.seconds_P.sum())

    def over(self, other: MixedReplay) -> Ratio:
        """The quotient of speeds; its error by the jackknife over the parts."""
        sums_P4 = torch.stack([self.tokens_P, self.seconds_P, other.tokens_P, other.seconds_P], dim=-1)
        return jackknifed_ratio(sums_P4, torch.arange(len(sums_P4)))


class MixedBatches:
    """Texts as streams of requests, of which B are decoded at once.

    The sources fall into parts; each part's texts, in a random order and as often as it takes, are a stream of their
    own. It ends when the last of its texts begins, so that there are always B requests.

    Args:
        timed: labels of 0 and 1; of others one draw is taken.
        profile: with a batch axis.
        seed: of the texts' order.
    """

    def __init__(self, timed: Timed, profile: LatencyProfile, batch: int, seed: int = 0) -> None:
        self.batch, self.clock, self.shapes = batch, step_clock(profile, batch), Shapes.of(timed.space)
        generator = np.random.default_rng(seed)
        self._accepted_RS = _accepted(timed, generator)
        self._size_X = timed.texts.size_X.numpy()
        self._begin_X = np.concatenate([[0], np.cumsum(self._size_X)[:-1]])
        self._length_R = timed.texts.length_R.numpy().astype(float)
        number_X = timed.texts.source_number_X.numpy()
        part_of = generator.permutation(number_X.max() + 1) % PARTS
        own = [np.flatnonzero(part_of[number_X] == part) for part in range(PARTS)]
        self._streams = [_stream(texts, STREAM * batch, generator) for texts in own if len(texts)]

    def replay(self, action_R: Tensor) -> MixedReplay:
        """A decision at every root that does not depend on the other requests."""
        return self._run(action_R.numpy(), np.zeros((0, 0)), 0.0)

    def select(self, tokens_RA: Tensor, speed: float) -> MixedReplay:
        """Joint decisions by predicted block efficiencies, at a speed of the whole batch."""
        return self._run(np.zeros(0, np.int64), tokens_RA.double().numpy(), speed)

    def speed_of(self, tokens_RA: Tensor, begin: float) -> float:
        """The speed at which joint decisions charge time: their own, from a first guess on."""
        tried = {begin: self.select(tokens_RA, begin).speed}
        for _ in range(ROUNDS):
            last = list(tried.values())[-1]
            tried[last] = self.select(tokens_RA, last).speed
        return max(tried, key=tried.__getitem__)

    def _run(self, action_R: Array, tokens_RA: Array, speed: float) -> MixedReplay:
        shapes, clock = self.shapes, self.clock
        rows = [
            _stream_walk(
                stream,
                self.batch,
                self._begin_X,
                self._size_X,
                self._length_R,
                self._accepted_RS,
                action_R,
                tokens_RA,
                speed,
                shapes.drafted_A,
                shapes.passes_A,
                shapes.copies_A,
                clock.contexts_C,
                clock.draft_C,
                clock.target_CV,
                clock.token_C / self.batch,
            )
            for stream in self._streams
        ]
        return MixedReplay(*torch.tensor(rows, dtype=torch.float64).unbind(-1))


def _stream(texts: Array, count: int, generator: np.random.Generator) -> Array:
    """Texts in random orders, one after another, at least so many."""
    rounds = -(-count // len(texts))
    return np.concatenate([generator.permutation(texts) for _ in range(max(rounds, 1))])


def _accepted(timed: Timed, generator: np.random.Generator) -> Array:
    """How many tokens of the longest chain and of the longest lookup each root would have accepted, int64 [R, 2]."""
    survivals_RS, depth = timed.survivals_RS.numpy(), timed.space.tree_survivals
    drawn_R1 = generator.random((len(survivals_RS), 1))
    return np.stack([(part > drawn_R1).sum(1) for part in np.split(survivals_RS, [depth], axis=1)], axis=1)


@jit
def _stream_walk(
    stream: Array,
    batch: int,
    begin_X: Array,
    size_X: Array,
    length_R: Array,
    accepted_RS: Array,
    action_R: Array,
    tokens_RA: Array,
    speed: float,
    drafted_A: Array,
    passes_A: Array,
    copies_A: Array,
    contexts_C: Array,
    draft_C: Array,
    target_CV: Array,
    token_C: Array,
) -> tuple[float, float]:
    """Tokens and seconds of one stream. Without predictions (`tokens_RA`) the given actions are taken."""
    text_B, at_B = np.empty(batch, np.int64), np.zeros(batch, np.int64)
    for b in range(batch):
        text_B[b] = stream[b % len(stream)]
    coming, tokens, seconds = batch, 0.0, 0.0
    row_B, chosen_B = np.empty(batch, np.int64), np.empty(batch, np.int64)
    most = passes_A.max()
    while coming < len(stream):
        context = 0.0
        for b in range(batch):
            row_B[b] = begin_X[text_B[b]] + at_B[b]
            context += length_R[row_B[b]] / batch
        context = min(max(context, contexts_C[0]), contexts_C[-1])
        above = max(1, np.searchsorted(contexts_C, context))
        share = (context - contexts_C[above - 1]) / (contexts_C[above] - contexts_C[above - 1])
        draft = draft_C[above - 1] + share * (draft_C[above] - draft_C[above - 1])
        if len(tokens_RA):
            token = token_C[above - 1] + share * (token_C[above] - token_C[above - 1])
            chosen_B = joint_actions(tokens_RA[row_B], drafted_A, passes_A, most, speed * token, speed * draft)
        else:
            chosen_B = action_R[row_B]
        drafted, passes = 0.0, 0
        for b in range(batch):
            action = chosen_B[b]
            drafted += drafted_A[action] / batch
            passes = max(passes, passes_A[action])
            right = min(accepted_RS[row_B[b], int(copies_A[action])], drafted_A[action])
            left = size_X[text_B[b]] - at_B[b]
            tokens += min(right + 1, left)
            at_B[b] += right + 1
            if at_B[b] >= size_X[text_B[b]] and coming < len(stream):
                text_B[b], at_B[b] = stream[coming], 0
                coming += 1
            elif at_B[b] >= size_X[text_B[b]]:
                at_B[b] = 0  # the stream is over, and so is this walk
        low, high = target_CV[above - 1], target_CV[above]
        whole = int(drafted)
        rest = drafted - whole
        for part, weight in ((low, 1 - share), (high, share)):
            between = part[whole] + rest * (part[min(whole + 1, len(part) - 1)] - part[whole])
            seconds += weight * between
        seconds += passes * draft
    return tokens, seconds
