"""Intervals, said once: what they are over, and how they are drawn.

Every interval of a figure is a 95% bootstrap interval over *sources* (files that prompts come from), for prompts of one
file are not independent. One resample of the sources counts for all methods, settings and verifiers, which saw the same
prompts: so a ratio's interval is narrower than its parts' would suggest. Errors that follow a plus-minus sign are one
standard error by the jackknife over the same sources (`replay.ratio_of_speeds`). Neither holds the noise of a
machine's clock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def source_weights(sources: int, resamples: int, seed: int) -> np.ndarray:
    """How often each source counts in each resample, [1 + resamples, sources]; in the first row, every one once."""
    drawn = np.random.default_rng(seed).multinomial(sources, np.full(sources, 1 / sources), resamples)
    return np.vstack([np.ones(sources), drawn])


def sums_by_source(values: Sequence[float], of: Sequence[str], sources: Sequence[str]) -> np.ndarray:
    """The sum of some values over each source, [sources]."""
    place = {source: number for number, source in enumerate(sources)}
    return np.bincount([place[source] for source in of], weights=values, minlength=len(sources))


def interval(values_B: np.ndarray) -> list[float]:
    """95% of the resamples lie in it. The first value, which is the estimate itself, is left out, and so are NaNs."""
    return [float(bound) for bound in np.nanpercentile(values_B[1:], [2.5, 97.5])]
