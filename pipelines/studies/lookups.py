"""What a lookup takes, by context length: `python -m pipelines.studies.lookups`.

A step adds five tokens to the index and asks it for sixteen. The text is the source of Python's standard library, a
byte a token, so that matches are many and long; medians over 200 steps at the end of each context.
"""

from __future__ import annotations

import statistics
import time

from data_gen.lookup import LookupIndex
from pipelines.common.console import console
from pipelines.pair.corpus import stdlib_files

CONTEXTS = 1024, 8192, 32768
STEPS, ADDED, PROPOSED = 200, 5, 16


def main() -> None:
    text = "".join(file.text for file in stdlib_files(0.1)[:40]).encode()
    for context in CONTEXTS:
        seconds = step_seconds(text, context)
        console.print(
            f"{context:6,} tokens: {statistics.median(seconds) * 1e6:.1f} µs a step, "
            f"99th percentile {sorted(seconds)[int(0.99 * STEPS)] * 1e6:.1f} µs"
        )


def step_seconds(text: bytes, context: int) -> list[float]:
    """Of the steps that end at a context length."""
    index = LookupIndex(text[: context - STEPS * ADDED])
    seconds = []
    for at in range(context - STEPS * ADDED, context, ADDED):
        begin = time.perf_counter()
        index.extend(list(text[at : at + ADDED]))
        index.proposal(PROPOSED)
        seconds.append(time.perf_counter() - begin)
    return seconds


if __name__ == "__main__":
    main()
