"""The joint choice of requests that are decoded together and share the draft's forward passes.

A step in which nothing is drafted takes f seconds; drafting adds c once, each of the draft's
forward passes p, and each verified token of one request t:

    T = f(contexts) + c [max_b passes_b > 0] + p max_b passes_b + t sum_b drafted_b.

At the speed g of the whole batch, a verified token costs `g t` tokens, and a pass of the draft
`g p`. For each number m of passes, every request takes its best action with up to m passes. The m
with the largest sum minus `g (c + p m)` is chosen.

Legend: B requests, A actions.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np

from selector.actions import Action
from selector.files import Array


class Shapes(NamedTuple):
    """Drafted tokens of chains and lookups, and the draft's forward passes for them."""

    drafted_A: Array
    passes_A: Array
    copies_A: Array  # whether the action is a lookup

    @classmethod
    def of(cls, actions: Collection[Action]) -> Shapes:
        """Raises ValueError where an action has branches."""
        if any(action.K > 1 for action in actions):
            raise ValueError("requests of one batch draft chains or lookups, not trees")
        drafted_A = np.array([action.nodes for action in actions])
        copies_A = np.array([action.copies for action in actions])
        return cls(drafted_A, np.where(copies_A, 0, drafted_A), copies_A)


def joint_choice(
    tokens_BA: Array,
    shapes: Shapes,
    speed: float,
    token_seconds: float,
    pass_seconds: float,
    once_seconds: float = 0.0,
) -> Array:
    """Positions of the requests' actions, int64 [B], from predicted block efficiencies, float64
    [B, A]; `speed` is g, and the times are those of `StepTimes.prices`. Replay compiles it."""
    order_A = np.argsort(shapes.passes_A, kind="mergesort")  # stable: ties keep their order
    passes_A = shapes.passes_A[order_A]
    worth_AB = (tokens_BA - speed * token_seconds * shapes.drafted_A).T.copy()[order_A]
    best_AB = worth_AB.copy()  # running maximum: the best action with at most as many passes
    for a in range(1, len(best_AB)):
        best_AB[a] = np.maximum(best_AB[a - 1], best_AB[a])
    shared_A = speed * (pass_seconds * passes_A + once_seconds * (passes_A > 0))
    last = (best_AB.sum(axis=1) - shared_A).argmax()
    return order_A[worth_AB[: last + 1].argmax(axis=0)]
