"""Joint decisions for several requests that are decoded together.

The requests share their draft passes. A step in which nothing is drafted takes f, drafting c more, a draft pass p, and
one more verified token of one request t:

    T = f(contexts) + c [max_b passes_b > 0] + p max_b passes_b + t sum_b drafted_b.

At the speed g of the whole batch, a verified token costs `g t` tokens, and a draft pass `g p`. For each number m of
passes, every request takes its best action with up to m passes. The m with the largest sum minus `g (c + p m)` is
chosen.

Legend: B requests in flight, A actions, C contexts, V verified tokens, M draft passes.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from selector.actions import Action, ActionSpace
from selector.latency import MOST_TOKENS, LatencyProfile
from selector.schema import InputError

Array = NDArray[Any]


class StepClock(NamedTuple):
    """Times of the steps of a batch of one size, in seconds."""

    contexts_C: Array  # context lengths, ascending, at least two
    draft_C: Array  # one draft pass
    drafting_C: Array  # once in a step that drafts
    target_CV: Array  # the rest of a step, by verified tokens of a request

    def prices(self, context: float, batch: int) -> tuple[float, float, float]:
        """Seconds of one more verified token of one request, of one draft pass of all, and of drafting once, at a mean
        context."""
        each = (self.token_C / batch, self.draft_C, self.drafting_C)
        token, draft, drafting = (float(np.interp(context, self.contexts_C, own_C)) for own_C in each)
        return token, draft, drafting

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
    draft_C2 = np.array([[draft.at(length, width) for width in (1, 2)] for length in lengths])
    return StepClock(np.array(lengths, float), draft_C2[:, 0], draft_C2[:, 1] - draft_C2[:, 0], np.array(rows))


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


def joint_choice(
    tokens_BA: Array,
    shapes: Shapes,
    speed: float,
    token_seconds: float,
    pass_seconds: float,
    once_seconds: float = 0.0,
) -> Array:
    """Positions of the requests' actions, int64 [B], from predicted block efficiencies, float64; `speed` is g, and the
    times are those of `StepClock.prices`. Replay compiles it."""
    B, A = tokens_BA.shape
    token, most = speed * token_seconds, shapes.passes_A.max()
    best_MB = np.full((most + 1, B), -np.inf)  # with up to m passes
    action_MB = np.zeros((most + 1, B), np.int64)
    for a in range(A):
        m, worth_B = shapes.passes_A[a], tokens_BA[:, a] - token * shapes.drafted_A[a]
        better_B = worth_B > best_MB[m]
        best_MB[m], action_MB[m] = np.where(better_B, worth_B, best_MB[m]), np.where(better_B, a, action_MB[m])
    for m in range(1, most + 1):
        fewer_B = best_MB[m - 1] >= best_MB[m]
        best_MB[m] = np.where(fewer_B, best_MB[m - 1], best_MB[m])
        action_MB[m] = np.where(fewer_B, action_MB[m - 1], action_MB[m])
    passes_M = np.arange(most + 1)
    return action_MB[(best_MB.sum(axis=1) - speed * (pass_seconds * passes_M + once_seconds * (passes_M > 0))).argmax()]
