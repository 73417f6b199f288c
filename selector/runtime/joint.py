"""Joint decisions for several requests that are decoded together, and streams of requests whose decisions are joint.

The requests share their draft passes. A step in which nothing is drafted takes f, a draft pass p, and one more verified
token of one request t:

    T = f(contexts) + p max_b passes_b + t sum_b drafted_b.

At the speed g of the whole batch, a verified token costs `g t` tokens, and a draft pass `g p`. For each number m of
passes, every request takes its best action with up to m passes. The m with the largest sum minus `g p m` is chosen.

Legend: B requests in flight, A actions, C contexts, V verified tokens, M draft passes, R roots of all texts, X texts, S
kinds of drafts (chains, lookups).
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from selector.actions import Action, ActionSpace
from selector.jit import jit
from selector.latency import MOST_TOKENS, LatencyProfile
from selector.schema import InputError

Array = NDArray[Any]


class StepClock(NamedTuple):
    """Times of the steps of a batch of one size, in seconds."""

    contexts_C: Array  # context lengths, ascending, at least two
    draft_C: Array  # one draft pass
    target_CV: Array  # the rest of a step, by verified tokens of a request

    def prices(self, context: float, batch: int) -> tuple[float, float]:
        """Seconds of one more verified token of one request, and of one draft pass of all, at a mean context."""
        token, draft = (np.interp(context, self.contexts_C, each_C) for each_C in (self.token_C / batch, self.draft_C))
        return float(token), float(draft)

    @property
    def token_C(self) -> Array:
        """Seconds of one more verified token of every request."""
        return (self.target_CV[:, -1] - self.target_CV[:, 0]) / (self.target_CV.shape[1] - 1)


def step_clock(profile: LatencyProfile, batch: int) -> StepClock:
    """The clock of a batch size; InputError where the profile holds times of one request alone."""
    if profile.batches is None:
        raise InputError(f"the latency profile of {profile.device} holds times of one request alone")
    draft, target = profile.batches.at(batch, MOST_TOKENS)
    lengths = target.lengths if len(target.lengths) > 1 else [*target.lengths, target.lengths[0] + 1]
    rows = [[target.at(length, size) for size in target.sizes] for length in lengths]
    return StepClock(np.array(lengths, float), np.array([draft.at(each, 1) for each in lengths]), np.array(rows))


class Shapes(NamedTuple):
    """Drafted tokens and draft passes of chains and lookups."""

    drafted_A: Array
    passes_A: Array
    copies_A: Array  # whether the action is a lookup

    @classmethod
    def of(cls, actions: Collection[Action] | ActionSpace) -> Shapes:
        """Raises ValueError where an action has branches."""
        if any(action.K > 1 for action in actions):
            raise ValueError("requests of one batch draft chains or lookups, not trees")
        drafted, copies = (np.array(each) for each in zip(*((a.nodes, a.copies) for a in actions), strict=True))
        return cls(drafted, np.where(copies, 0, drafted), copies)


@jit
def joint_choice(tokens_BA: Array, shapes: Shapes, speed: float, token_seconds: float, pass_seconds: float) -> Array:
    """Positions of the requests' actions, int64 [B], from predicted block efficiencies, float64; `speed` is g, and the
    times are those of one verified token of one request, and of one draft pass of all requests."""
    B, A = tokens_BA.shape
    token, once, most = speed * token_seconds, speed * pass_seconds, shapes.passes_A.max()
    best_MB = np.full((most + 1, B), -np.inf)  # with up to m passes
    action_MB = np.zeros((most + 1, B), np.int64)
    for b in range(B):
        for a in range(A):
            worth = tokens_BA[b, a] - token * shapes.drafted_A[a]
            if worth > best_MB[shapes.passes_A[a], b]:
                best_MB[shapes.passes_A[a], b], action_MB[shapes.passes_A[a], b] = worth, a
        for m in range(1, most + 1):
            if best_MB[m - 1, b] >= best_MB[m, b]:
                best_MB[m, b], action_MB[m, b] = best_MB[m - 1, b], action_MB[m - 1, b]
    found, top = 0, -np.inf
    for m in range(most + 1):
        total = best_MB[m].sum() - once * m
        if total > top:
            found, top = m, total
    return action_MB[found]


class Streamed(NamedTuple):
    """Texts of streams of requests: first roots, numbers of roots, context lengths, and how many tokens of the longest
    chain and of the longest lookup would be accepted."""

    begin_X: Array
    size_X: Array
    length_R: Array
    accepted_RS: Array


@jit
def decoded(
    stream: Array,
    batch: int,
    texts: Streamed,
    shapes: Shapes,
    clocks: tuple[StepClock, Array],
    decisions: tuple[Array, Array, float],
) -> tuple[float, float]:
    """Tokens and seconds of one stream of requests: when a text is finished, the next one takes its place.

    Args:
        clocks: step times, and the time to verify one more token of one request, [C].
        decisions: an action of every root, [R]; or predicted block efficiencies, [R, A], and the speed of the batch.
    """
    (clock, token_C), (action_R, tokens_RA, speed) = clocks, decisions
    text_B, at_B = stream[:batch].copy(), np.zeros(batch, np.int64)
    coming, tokens, seconds = batch, 0, 0.0
    while coming < len(stream):
        row_B = texts.begin_X[text_B] + at_B
        context = texts.length_R[row_B].mean()
        draft = np.interp(context, clock.contexts_C, clock.draft_C)
        if len(tokens_RA):
            token = np.interp(context, clock.contexts_C, token_C)
            chosen_B = joint_choice(tokens_RA[row_B], shapes, speed, token, draft)
        else:
            chosen_B = action_R[row_B]
        drafted = shapes.drafted_A[chosen_B].mean()
        target_C = np.array([np.interp(drafted, np.arange(len(target_V)), target_V) for target_V in clock.target_CV])
        seconds += np.interp(context, clock.contexts_C, target_C) + shapes.passes_A[chosen_B].max() * draft
        for b in range(batch):
            action, size = chosen_B[b], texts.size_X[text_B[b]]
            right = min(texts.accepted_RS[row_B[b], int(shapes.copies_A[action])], shapes.drafted_A[action])
            tokens += min(right + 1, size - at_B[b])
            at_B[b] += right + 1
            if at_B[b] >= size:
                at_B[b] = 0
                if coming < len(stream):  # else the stream is over, and so is this walk
                    text_B[b] = stream[coming]
                coming += 1
    return tokens, seconds
