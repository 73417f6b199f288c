"""What an engine's steps were and how long they took, from one call of its plug-in to the next; and
the way out where drafting is slower than plain decoding."""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Sequence
from functools import cache
from statistics import median
from time import perf_counter
from typing import NamedTuple

import numpy as np

from data_gen.features.root import DrafterKnowledge

NAME = "espalier"  # in an engine's configuration and log
FIRST = 8  # first steps, in which nothing is drafted
PLAIN = 64  # one step of so many drafts nothing, too
CHECKED = 16  # of these the last ones, with which the others are compared
LOST = 10.0  # tokens of a request that drafting may lose before it ends
FEWEST = 8  # drafting steps before it ends
WINDOW = 300  # drafting steps in which it has to gain something
PAUSE = 2000  # steps until it is tried again


class Step(NamedTuple):
    """A step of an engine."""

    batch: int  # requests that were decoded together
    context: int  # their mean tokens before the step
    verified: float  # mean tokens of a request in the target's pass, the root included
    passes: int  # forward passes of the draft model
    seconds: float
    tokens: int  # that the step yielded, of all requests


class StepTimer:
    """Times steps from one call of a plug-in to the next."""

    def __init__(self) -> None:
        self._called = 0.0
        self._texts: Sequence[DrafterKnowledge] = ()

    def ended(self, texts: Sequence[DrafterKnowledge]) -> Step | None:
        """The step since the last call; None where its requests are others, and with the prompt of
        a new one it took longer."""
        begin = self._called
        before = self._texts
        self._called = perf_counter()
        self._texts = ()  # a call that fails does not begin a step
        if not before or set(before) != set(texts):
            return None
        tokens = _tokens_of(texts) - self._step.tokens
        return self._step._replace(seconds=self._called - begin, tokens=tokens)

    def begin(
        self, texts: Sequence[DrafterKnowledge], drafts: Sequence[Sequence[int]], passes: int
    ) -> None:
        """A step of these texts with these drafts."""
        batch = len(texts)
        tokens = _tokens_of(texts)
        verified = 1 + sum(map(len, drafts)) / batch
        self._texts = texts
        self._step = Step(batch, round(tokens / batch), verified, passes, 0.0, tokens)


def _tokens_of(texts: Sequence[DrafterKnowledge]) -> int:
    return sum(len(text.text.index.tokens) for text in texts)


class WayOut:
    """Ends drafting where it is slower than plain decoding, and tries it again now and then.

    A step's lead is how many tokens more a request got in it than plain steps would have yielded in
    the same time. Where the sum of the leads has fallen by `LOST` below its maximum, and that by
    more than two standard errors, or has not risen above it in a `WINDOW` (CUSUM, Page 1954),
    drafting is in doubt: in the next `CHECKED` steps nothing is drafted, and if the leads are as
    bad by the time of these, drafting ends for `PAUSE` steps. So a machine that becomes slower in
    all does not end it.

    The time of plain steps is that of the last ones in which nothing was drafted. It is measured in
    units of what the clock promises for so many requests and so long contexts, so that their mix
    does not matter.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._begin = FIRST  # the call after which it drafts
        self._plain: deque[float] = deque(maxlen=CHECKED)
        # tokens of a request and time of the drafting steps since the leads' sum had its maximum
        self._drafting: list[tuple[float, float]] = []
        self._unchecked = 0  # plain steps that a doubt still waits for

    def may_draft(self) -> bool:
        """Whether the next step may draft; to be asked once a step."""
        self._calls += 1
        if self._unchecked > 0:
            return False
        return self._calls > self._begin and self._calls % PLAIN > 0

    def add(self, step: Step, promised: float) -> None:
        """Count a step, of which the clock promises so many seconds without drafts."""
        time = step.seconds / promised
        if step.verified > 1:
            if self._plain:
                self._drafting.append((step.tokens / step.batch, time))
                leads = self._leads()
                if sum(leads) >= 0:
                    self._drafting.clear()
                elif _are_behind(leads):
                    self._unchecked = CHECKED
            return
        self._plain.append(time)
        if self._unchecked > 0:
            self._unchecked -= 1
            if self._unchecked == 0:
                self._judge()

    def _judge(self) -> None:
        if _are_behind(self._leads()):
            log_once("drafting is slower than plain decoding here: nothing is drafted for a while")
            self._begin = self._calls + PAUSE
        self._drafting.clear()

    def _leads(self) -> list[float]:
        plain = median(self._plain)
        return [tokens - time / plain for tokens, time in self._drafting]


def _are_behind(leads: Sequence[float]) -> bool:
    """Whether drafting steps have surely lost too much, or gained nothing for too long."""
    lost = -sum(leads)
    if lost <= 0:
        return False
    steps = len(leads)
    is_sure = lost > max(LOST, 2 * math.sqrt(steps) * float(np.std(leads)))
    return steps >= WINDOW or (is_sure and steps >= FEWEST)


log_once = cache(logging.getLogger(NAME).error)
