"""Wall-clock time by part of the work."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch


class Clock:
    """Seconds by part; each lap counts the time since the one before.

    Args:
        waits: whether a lap waits for a GPU, which works on while Python goes ahead. Without it a part's time is
            Python's, and what the GPU still owes is counted where its numbers are next read.
    """

    def __init__(self, device: torch.device, parts: Sequence[str], waits: bool) -> None:
        self.device, self.waits = device, waits
        self.seconds = dict.fromkeys(parts, 0.0)
        self.last = self._now()

    def _now(self) -> float:
        if self.waits and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def skip(self) -> None:
        """The time since the last lap counts nowhere."""
        self.last = self._now()

    def lap(self, part: str) -> None:
        now = self._now()
        self.seconds[part] += now - self.last
        self.last = now
