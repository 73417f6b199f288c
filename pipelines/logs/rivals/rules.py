"""What rules of other projects are told of labelled texts, how fast they are there, and the search for their numbers.

Legend: X texts, R roots, A actions, K kinds of drafts (chain, copy).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar, TypeVarTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from selector.actions import ActionSpace
from selector.jit import jit
from selector.schema import LOG
from selector.train.data import Timed
from selector.train.replay import Replayed, replay

Array = NDArray[Any]
Moves = Sequence[dict[str, float]]  # changes of a rule that are tried together
AnyRival = TypeVar("AnyRival", bound="Rival")
Found = TypeVar("Found")
Given = TypeVarTuple("Given")


class RivalTexts:
    """Labelled texts, and what rules are told of them.

    Args:
        timed: in a space of `ActionSpace.chains`, with the scalars of `schema.LOG`.
    """

    def __init__(self, timed: Timed) -> None:
        self.timed, self.depth, self.longest = timed, timed.space.depth, max(timed.space.lookups)
        assert timed.space == ActionSpace.chains(self.depth, self.longest)
        self._scalars: dict[str, Tensor] = {}
        self._remembered: dict[tuple[object, ...], Any] = {}
        self._speeds: dict[Rival, float] = {}

    @cached_property
    def certain(self) -> bool:
        """Whether all labels are 0 or 1."""
        survivals_RS = self.timed.survivals_RS
        return bool(((survivals_RS == 0) | (survivals_RS == 1)).all())

    @cached_property
    def accepted_RK(self) -> Array:
        """How many tokens of the longest chain and of the longest copy would be accepted, int64 [R, 2]."""
        parts = self.timed.survivals_RS.split([self.depth, self.longest], dim=1)
        return torch.stack([part.sum(1) for part in parts], dim=1).long().numpy()

    @cached_property
    def seconds_RA(self) -> Array:
        """What a step with each action takes at each root, float32."""
        return self.timed.seconds().numpy()

    @property
    def size_X(self) -> Array:
        return self.timed.texts.size_X.numpy()

    def scalar(self, name: str) -> Tensor:
        """One scalar of `schema.LOG` at every root, [R]."""
        if name not in self._scalars:
            self._scalars[name] = self.timed.texts.scalars_RF[:, LOG.names.index(name)].contiguous()
        return self._scalars[name]

    def copy(self, length: int) -> int:
        """The action that copies so many tokens, or as many as can be copied; a chain of k tokens is action k."""
        return self.depth + min(length, self.longest)

    def remembered(self, find: Callable[[RivalTexts, *Given], Found], *given: *Given) -> Found:
        """What a function finds of these texts and of what else it is given, found once."""
        key = (find, *given)
        if key not in self._remembered:
            self._remembered[key] = find(self, *given)
        return self._remembered[key]

    def replayed(self, rule: Rival) -> Replayed:
        """What a rule takes for these texts."""
        action_R, texts = rule.actions(self), self.timed.texts
        seconds_R = self.timed.seconds_of(action_R)
        return replay(self.timed.survivals_RS, action_R, seconds_R, texts.size_X, self.timed.space)

    def speed(self, rule: Rival) -> float:
        """Tokens per second of `replayed`, remembered. Where labels are certain, one walk along its steps suffices."""
        if rule not in self._speeds:
            if self.certain:
                action_R = rule.actions(self).numpy()
                seconds = _seconds(action_R, self.accepted_RK, self.seconds_RA, self.size_X, self.depth)
                self._speeds[rule] = len(action_R) / seconds
            else:
                self._speeds[rule] = self.replayed(rule).speed
        return self._speeds[rule]


@dataclass(frozen=True)
class Rival(ABC):
    """A rule with its numbers."""

    @abstractmethod
    def actions(self, texts: RivalTexts) -> Tensor:
        """Positions of what it drafts at every root, int64 [R]."""


@dataclass(frozen=True)
class Sequential(Rival):
    """A rule that learns from its own steps; at roots where none of its steps begins its actions mean nothing."""


def fastest(train: RivalTexts, rules: Iterable[AnyRival]) -> AnyRival:
    """The first of the fastest rules."""
    return max(rules, key=train.speed)


def climbed(train: RivalTexts, start: AnyRival, moves: Sequence[Moves]) -> AnyRival:
    """The fastest rule that changing some of its numbers at a time leads to; never slower than the start."""
    best, before = start, None
    while best != before:
        before = best
        for changes in moves:
            best = fastest(train, [best, *(replace(best, **change) for change in changes)])
    return best


def one(name: str, values: Iterable[float]) -> Moves:
    """Changes of one number."""
    return [{name: value} for value in values]


def two(first: str, second: str, values: Iterable[tuple[float, float]]) -> Moves:
    """Changes of two numbers together."""
    return [{first: a, second: b} for a, b in values]


@jit
def _seconds(action_R: Array, accepted_RK: Array, seconds_RA: Array, size_X: Array, depth: int) -> float:
    """The time of a policy's steps where labels are certain."""
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
