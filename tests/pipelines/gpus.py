"""Step times of two engines that do not exist, as `espalier latency --from` reads them.

`flat`: a pass costs the same up to 256 tokens, and grows with them beyond. `stepped`: graphs are
captured at powers of two up to 128 tokens, and a pass costs what the next captured size does.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from pipelines.latency.timings import profile_of, read_timings
from selector.latency import LatencyProfile

BATCHES = (1, 2, 4, 8, 16, 32, 64)
VERIFIED = range(1, 10)
CONTEXT = 512
VERIFIERS = ("specinfer", "traversal")
# of a pass of the target over so many tokens; the draft takes a 20th
Seconds = Callable[[int], float]


def flat(tokens: int) -> float:
    return 20e-3 * max(1.0, tokens / 256)


def stepped(tokens: int) -> float:
    padded = tokens if tokens > 128 else next(2**i for i in range(8) if tokens <= 2**i)
    return 16e-3 + 2e-4 * padded


def step(seconds: Seconds, batch: int, verified: int, passes: int) -> float:
    """A whole step of an engine."""
    target = seconds(batch * verified) if verified else 0.0
    return target + passes * seconds(batch) / 20


def timings(seconds: Seconds, batches: tuple[int, ...] = BATCHES) -> str:
    """The CSV file: chains of every length, and the draft alone, for every batch size."""
    work = [(0, 1), *((verified, verified - 1) for verified in VERIFIED)]
    lines = ["batch,context,verified,passes,seconds"]
    for batch in batches:
        lines += [f"{batch},{CONTEXT},{v},{p},{step(seconds, batch, v, p):.9g}" for v, p in work]
    return "\n".join(lines) + "\n"


def read(folder: Path, text: str, stepped: bool = True) -> LatencyProfile:
    """The profile of a CSV file."""
    path = folder / "timings.csv"
    path.write_text(text)
    return profile_of(read_timings(path), "timings.csv", stepped, "pair", VERIFIERS)
