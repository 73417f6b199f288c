"""What decoding consists of: choosers of actions, and steps with their times, which
`decoder.Decoder` makes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from selector.actions import Action

Features = dict[str, Tensor]
PARTS = ("draft", "select", "target", "verify", "commit")


class Chooser(Protocol):
    """Chooses the action of a step.

    `select` gets the features of each of the `feature_levels` in turn, until it returns an action.
    After the last level, and at the first root, it gets None and must answer. If it has an
    attribute `longest` that is not 0, it gets the match alone once the text has more tokens.
    """

    @property
    def feature_levels(self) -> tuple[str, ...]: ...

    def select(self, features: Features | None) -> Action | None: ...


@dataclass
class FixedTree:
    """Chooses one action at every step, whatever the features are."""

    action: Action
    feature_levels: tuple[str, ...] = ()

    def select(self, features: Features | None) -> Action:
        return self.action


@dataclass
class Random:
    actions: Sequence[Action]
    generator: torch.Generator
    feature_levels: tuple[str, ...] = ()

    def select(self, features: Features | None) -> Action:
        return self.actions[int(torch.randint(len(self.actions), (), generator=self.generator))]


@dataclass
class Overruled:
    """Asks a chooser and drafts other actions, in turn, so that decisions can be timed whatever
    they are."""

    chooser: Chooser
    actions: Iterator[Action]

    @property
    def feature_levels(self) -> tuple[str, ...]:
        return self.chooser.feature_levels

    def select(self, features: Features | None) -> Action:
        self.chooser.select(features)
        return next(self.actions)


@dataclass
class Step:
    """One decoding step. Unless the decoder is `timed`, a part that queues work on a GPU takes
    little time, and the part that reads its result takes the rest."""

    length: int  # committed tokens before the step, the root token included
    action: Action
    accepted: int  # tau, the number of accepted drafted tokens
    nodes: int  # of the drafted tree, the root included
    seconds: dict[str, float]  # wall-clock time by part (`PARTS`)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass
class Decoded:
    tokens: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


class Stopwatch:
    """Seconds by part of a step. If it `waits`, a lap begins with a host synchronisation."""

    def __init__(self, device: torch.device, waits: bool) -> None:
        self._device = device
        self._waits = waits and device.type == "cuda"
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._last = self._now()

    def _now(self) -> float:
        if self._waits:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def skip(self) -> None:
        self._last = self._now()

    def lap(self, part: str) -> None:
        now = self._now()
        self.seconds[part] += now - self._last
        self._last = now
