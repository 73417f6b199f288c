"""Replay of requests that come and go: an engine with continuous batching, in which each request
joins the next step after it arrives and leaves when its text ends.

The pass over a prompt takes as long as so many more verified tokens in the step that the request
joins, and the time of a step is that of the requests that are then in flight.

Legend: B requests in flight, N requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from selector.files import Array
from selector.latency import LatencyProfile, StepTimes
from selector.runtime.joint import Shapes
from selector.train.data import Timed
from selector.train.mixed import Streamed, step_seconds

# from the roots of the requests in flight, their mean context length and the step's times: the
# positions of their actions, and the seconds that deciding takes
Choose = Callable[[Array, float, StepTimes], tuple[Array, float]]


@dataclass(frozen=True)
class Load:
    """The answers to requests: when each arrived, ascending, in seconds, float64 [N]; and which
    text it is, int64 [N]."""

    arrived_N: Array
    text_N: Array


@dataclass(frozen=True)
class Served:
    """How an engine served a load: tokens, the seconds until the last one, steps, and each
    request's seconds from its arrival to its last token, float64 [N]."""

    tokens: int
    seconds: float
    requests: float  # in a step, on average
    latency_N: Array

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


class Engine:
    """An engine with step times by batch size, for the texts of `timed`.

    Args:
        most: requests in flight; more wait.
    """

    def __init__(self, timed: Timed, profile: LatencyProfile, most: int, seed: int = 0) -> None:
        self.shapes = Shapes.of(timed.space.actions)
        self._texts = Streamed.of(timed, np.random.default_rng(seed))
        self._profile = profile
        self._most = most
        self._times: dict[int, StepTimes] = {}

    def serve(self, load: Load, choose: Choose) -> Served:
        """Decode all requests of a load."""
        texts = self._texts
        waiting = deque(range(len(load.arrived_N)))
        # of each request in flight: its number, the root of its next step, and where its text ends
        flight_B3 = np.zeros((0, 3), np.int64)
        latency_N = np.zeros(len(load.arrived_N))
        clock = float(load.arrived_N[0])
        steps = 0
        requests = 0
        while waiting or len(flight_B3):
            if not len(flight_B3):
                clock = max(clock, load.arrived_N[waiting[0]])
            prompts = 0.0
            while waiting and load.arrived_N[waiting[0]] <= clock and len(flight_B3) < self._most:
                number = waiting.popleft()
                text = load.text_N[number]
                begin = texts.begin_X[text]
                joining = [[number, begin, begin + texts.size_X[text]]]
                flight_B3 = np.concatenate([flight_B3, joining])
                prompts += texts.length_R[begin]
            root_B = flight_B3[:, 1]
            times = self._times_of(len(root_B))
            length = float(texts.length_R[root_B].mean())
            action_B, deciding = choose(root_B, length, times)
            clock += deciding + self._seconds(action_B, length, times, prompts)
            steps += 1
            requests += len(root_B)
            kind_B = self.shapes.copies_A[action_B].astype(np.int64)
            accepted_B = texts.accepted_RS[root_B, kind_B]
            flight_B3[:, 1] += 1 + np.minimum(accepted_B, self.shapes.drafted_A[action_B])
            is_over_B = flight_B3[:, 1] >= flight_B3[:, 2]
            over = flight_B3[is_over_B, 0]
            latency_N[over] = clock - load.arrived_N[over]
            flight_B3 = flight_B3[~is_over_B]
        tokens = int(texts.size_X[load.text_N].sum())
        return Served(tokens, clock - float(load.arrived_N[0]), requests / steps, latency_N)

    def _seconds(self, action_B: Array, length: float, times: StepTimes, prompts: float) -> float:
        passes = int(self.shapes.passes_A[action_B].max())
        drafted = float(self.shapes.drafted_A[action_B].mean())
        token, _, _ = times.prices(length, len(action_B))
        return float(step_seconds(times, length, drafted, passes)) + token * prompts

    def _times_of(self, batch: int) -> StepTimes:
        if batch not in self._times:
            self._times[batch] = self._profile.step_times(batch)
        return self._times[batch]
