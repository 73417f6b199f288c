"""What a rule knows of labelled texts, how fast it is on them, and the search for its parameters.

Legend: X texts, R roots, A actions, K kinds of drafts (chain, copy).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from numpy.typing import NDArray
from torch import Tensor

from selector.jit import jit
from selector.train.data import Timed
from selector.train.replay import Replayed, replay

Array = NDArray[Any]
Moves = Sequence[dict[str, Any]]  # alternative changes of a rule's parameters
AnyRival = TypeVar("AnyRival", bound="Rival")
Given = ParamSpec("Given")
Found = TypeVar("Found")


def remembered(
    find: Callable[Concatenate[RivalTexts, Given], Found],
) -> Callable[Concatenate[RivalTexts, Given], Found]:
    """The function, computed once for each of its arguments; it keeps its results in the texts."""

    def once(texts: RivalTexts, *given: Given.args, **named: Given.kwargs) -> Found:
        key = (find, *given, *named.items())
        if key not in texts.results:
            texts.results[key] = find(texts, *given, **named)
        return texts.results[key]

    return once


class RivalTexts:
    """Labelled texts as the rules know them.

    Args:
        timed: in a space of `ActionSpace.chains`, with the scalars of `schema.LOG`.
    """

    def __init__(self, timed: Timed) -> None:
        self.timed, self.depth, self.longest = timed, timed.space.depth, max(timed.space.lookups)
        self.size_X: Array = timed.texts.size_X.numpy()
        self.results: dict[tuple[object, ...], Any] = {}

    @cached_property
    def certain(self) -> bool:
        """Whether all labels are 0 or 1, so that the end of every step is certain."""
        survivals_RS = self.timed.survivals_RS
        return bool(((survivals_RS == 0) | (survivals_RS == 1)).all())

    @cached_property
    def accepted_RK(self) -> Array:
        """How many tokens of the longest chain and of the longest copy would be accepted, int64 [R, 2]."""
        parts = self.timed.survivals_RS.split([self.depth, self.longest], dim=1)
        return torch.stack([part.sum(1) for part in parts], dim=1).long().numpy()

    @cached_property
    def seconds_RA(self) -> Array:
        """The time of a step with each action at each root, float32."""
        return self.timed.seconds().numpy()

    @remembered
    def scalar(self, name: str) -> Tensor:
        """One scalar of `schema.LOG` at every root, [R]."""
        return self.timed.texts.scalar(name).contiguous()

    def copy(self, length: int) -> int:
        """The action that copies `length` tokens, or as many as possible. Action k is the chain of k tokens."""
        return self.depth + min(length, self.longest)

    def replayed(self, rule: Rival) -> Replayed:
        """The exact replay of a rule."""
        action_R, timed = rule.actions(self), self.timed
        return replay(timed.survivals_RS, action_R, timed.seconds_of(action_R), timed.texts.size_X, timed.space)

    @remembered
    def speed(self, rule: Rival) -> float:
        """Tokens per second of a rule. Where labels are certain, one walk along its steps is enough."""
        if not self.certain:
            return self.replayed(rule).speed
        action_R = rule.actions(self).numpy()
        return len(action_R) / _seconds(action_R, self.accepted_RK, self.seconds_RA, self.size_X, self.depth)


@dataclass(frozen=True)
class Rival(ABC):
    """A rule with its parameters."""

    @abstractmethod
    def actions(self, texts: RivalTexts) -> Tensor:
        """The positions of its actions at every root, int64 [R]."""


@dataclass(frozen=True)
class Sequential(Rival):
    """A rule that learns from its own steps, in each text by itself. It needs certain labels. At roots where none of
    its steps begins, its actions mean nothing."""


def fastest(train: RivalTexts, rules: Iterable[AnyRival]) -> AnyRival:
    """The fastest rule; the first one of equals."""
    return max(rules, key=train.speed)


def climbed(train: RivalTexts, start: AnyRival, moves: Sequence[Moves]) -> AnyRival:
    """The fastest rule that a coordinate search from `start` finds: it takes the best of each list of moves in turn,
    until none of them helps."""
    best, before = start, None
    while best != before:
        before = best
        for changes in moves:
            best = fastest(train, [best, *(replace(best, **change) for change in changes)])
    return best


def grid(**values: Iterable[float]) -> Moves:
    """Changes of one or several parameters together: every combination of their values."""
    return [dict(zip(values, each, strict=True)) for each in product(*values.values())]


@jit
def _seconds(action_R: Array, accepted_RK: Array, seconds_RA: Array, size_X: Array, depth: int) -> float:
    """The time of a rule's steps where labels are certain."""
    seconds, end, n = 0.0, 0, 0
    for x in range(len(size_X)):
        n, end = end, end + size_X[x]
        while n < end:
            action = action_R[n]
            seconds += seconds_RA[n, action]
            if action > depth:
                n += 1 + min(action - depth, accepted_RK[n, 1])
            else:
                n += 1 + min(action, accepted_RK[n, 0])
    return seconds
