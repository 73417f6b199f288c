"""Replay of batches of requests with distinct texts. They are decided jointly
(`Policy.select_jointly`) or one by one; when a text ends, the next one takes its place.

Legend: B requests in flight, L context lengths, V numbers of verified tokens, R roots of all texts,
A actions, X texts, S kinds of drafts (chains, lookups), P parts of the texts' sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from selector.files import Array
from selector.jit import jit
from selector.latency import LatencyProfile, StepTimes
from selector.runtime.joint import Shapes, joint_choice
from selector.train.data import Timed
from selector.train.replay import Replayed

ROUNDS = 3  # of finding the speed that prices time
STREAM = 4  # texts that each place in the batch decodes at least
PARTS = 8  # of the sources; errors are over these

compiled_choice = jit(joint_choice)


class Streamed(NamedTuple):
    """Texts of streams of requests: first roots, numbers of roots, context lengths, and how many
    tokens of the longest chain and of the longest lookup would be accepted."""

    begin_X: Array
    size_X: Array
    length_R: Array
    accepted_RS: Array

    @classmethod
    def of(cls, timed: Timed, generator: np.random.Generator) -> Streamed:
        """How many tokens are accepted at a root is drawn once where its labels are not 0 or 1."""
        size_X = timed.texts.size_X.numpy()
        length_R = timed.texts.length_R.numpy().astype(float)
        drawn_R1 = generator.random((len(length_R), 1))
        kinds = np.split(timed.survivals_RS.numpy(), [timed.space.tree_survivals], axis=1)
        accepted_RS = np.stack([(part > drawn_R1).sum(1) for part in kinds], axis=1)
        return cls(np.cumsum(size_X) - size_X, size_X, length_R, accepted_RS)


@partial(jit, kept=False)
def step_seconds(times: StepTimes, length: float, drafted: float, passes: int) -> float:
    """Seconds of a step at a mean context length, in which each request verifies so many drafted
    tokens on average, after so many forward passes of the draft."""
    target_L = np.array(
        [np.interp(1 + drafted, times.verified_V, target_V) for target_V in times.target_LV]
    )
    seconds = np.interp(length, times.lengths_L, target_L)
    if passes > 0:
        seconds += passes * np.interp(length, times.lengths_L, times.draft_L)
        seconds += np.interp(length, times.lengths_L, times.drafting_L)
    return seconds


@partial(jit, kept=False)
def _common_chain(
    tokens_BA: Array, shapes: Shapes, speed: float, times: StepTimes, length: float
) -> int:
    # the position of the chain that is best for all requests of a step
    best = -np.inf
    chosen = 0
    for a in range(len(shapes.drafted_A)):
        if shapes.copies_A[a]:
            continue
        drafted = shapes.drafted_A[a]
        worth = tokens_BA[:, a].sum() - speed * step_seconds(times, length, drafted, drafted)
        if worth > best:
            best = worth
            chosen = a
    return chosen


@partial(jit, kept=False)  # it calls a function of another file
def decoded(
    stream: Array,
    batch: int,
    texts: Streamed,
    shapes: Shapes,
    times: StepTimes,
    token_L: Array,
    decisions: tuple[Array, Array, float],
    common: bool,
) -> tuple[float, float, float]:
    """Tokens, seconds and steps of one stream of requests.

    Args:
        token_L: the time to verify one more token of one request.
        decisions: an action of every root, [R]; or predicted block efficiencies, [R, A], and the
            speed of the batch.
        common: whether predictions choose one chain for all requests of a step, as engines draft
            with their drafters.
    """
    action_R, tokens_RA, speed = decisions
    text_B = stream[:batch].copy()
    at_B = np.zeros(batch, np.int64)
    coming = batch
    tokens = 0
    seconds = 0.0
    steps = 0
    while coming < len(stream):
        row_B = texts.begin_X[text_B] + at_B
        length = texts.length_R[row_B].mean()
        if common:
            chain = _common_chain(tokens_RA[row_B], shapes, speed, times, length)
            chosen_B = np.full(batch, chain)
        elif len(tokens_RA):
            token = np.interp(length, times.lengths_L, token_L)
            draft = np.interp(length, times.lengths_L, times.draft_L)
            drafting = np.interp(length, times.lengths_L, times.drafting_L)
            chosen_B = compiled_choice(tokens_RA[row_B], shapes, speed, token, draft, drafting)
        else:
            chosen_B = action_R[row_B]
        passes = shapes.passes_A[chosen_B].max()
        seconds += step_seconds(times, length, shapes.drafted_A[chosen_B].mean(), passes)
        steps += 1
        for b in range(batch):
            action = chosen_B[b]
            size = texts.size_X[text_B[b]]
            kind = int(shapes.copies_A[action])
            right = min(texts.accepted_RS[row_B[b], kind], shapes.drafted_A[action])
            tokens += min(right + 1, size - at_B[b])
            at_B[b] += right + 1
            if at_B[b] >= size:
                at_B[b] = 0
                if coming < len(stream):  # else the stream is over, and so is this walk
                    text_B[b] = stream[coming]
                coming += 1
    return tokens, seconds, steps


class MixedBatches:
    """Texts as streams of requests, one for each part of the sources; B requests of a stream are
    decoded at once.

    A stream holds the texts of its part in random orders. It ends when its last text begins, so
    that there are always B requests. How many tokens are accepted at a root is drawn once where its
    labels are not 0 or 1. In a `Replayed` each stream is one text, and visits of roots are not
    counted.
    """

    def __init__(self, timed: Timed, profile: LatencyProfile, batch: int, seed: int = 0) -> None:
        self.timed = timed
        self.batch = batch
        self.times = profile.step_times(batch)
        self.shapes = Shapes.of(timed.space.actions)
        generator = np.random.default_rng(seed)
        self._texts = Streamed.of(timed, generator)
        number_X = timed.texts.source_number_X.numpy()
        part_of = generator.permutation(number_X.max() + 1) % PARTS
        self._streams: list[Array] = []
        for part in range(PARTS):
            texts = np.flatnonzero(part_of[number_X] == part)
            if len(texts) > 0:
                rounds = -(-STREAM * batch // len(texts))  # rounded up
                orders = [generator.permutation(texts) for _ in range(rounds)]
                self._streams.append(np.concatenate(orders))

    def replay(self, action_R: Tensor, asked: Sequence[str] = ()) -> Replayed:
        """A decision at every root that does not depend on the other requests. Each step is longer
        by the time of the decisions that see the features `asked`, as `Setting.asked`."""
        replayed = self._run(action_R.numpy(), np.zeros((0, 0)), 0.0)
        return replayed.charged(self.timed.profile.decision_seconds(asked))

    def select(
        self, tokens_RA: Tensor, speed: float, common: bool = False, asked: Sequence[str] = ()
    ) -> Replayed:
        """Joint decisions by predicted block efficiencies, or one chain for all requests of a step
        if `common`; the batch's `speed`, in tokens per second, prices time. `asked` as in
        `replay`."""
        replayed = self._run(np.zeros(0, np.int64), tokens_RA.double().numpy(), speed, common)
        return replayed.charged(self.timed.profile.decision_seconds(asked))

    def speed_of(
        self, tokens_RA: Tensor, begin: float, common: bool = False, asked: Sequence[str] = ()
    ) -> float:
        """The speed that prices time in joint decisions: the one that they reach, found from a
        first guess."""
        tried: dict[float, float] = {}
        last = begin
        for _ in range(ROUNDS + 1):
            tried[last] = self.select(tokens_RA, last, common, asked).speed
            last = tried[last]
        return max(tried, key=tried.__getitem__)

    def _run(
        self, action_R: Array, tokens_RA: Array, speed: float, common: bool = False
    ) -> Replayed:
        token_L = self.times.token_L / self.batch
        decisions = action_R, tokens_RA, speed
        texts, shapes, times = self._texts, self.shapes, self.times
        rows = [
            decoded(stream, self.batch, texts, shapes, times, token_L, decisions, common)
            for stream in self._streams
        ]
        tokens_X, seconds_X, steps_X = torch.tensor(rows, dtype=torch.float64).unbind(-1)
        return Replayed(tokens_X, seconds_X, steps_X, torch.zeros(0))
