"""95% bootstrap intervals over *sources* (files that prompts come from): the prompts of one file are not independent.

One resample of the sources counts for all methods, settings and verifiers, because they share the prompts: a ratio's
interval is therefore narrower than those of its parts suggest. The errors after a plus-minus sign are one standard
error by the jackknife over the same sources (`replay.ratio_of_speeds`). Neither holds the noise of a machine's clock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000  # the bounds of a 95% interval then vary by a few per cent of its width


def source_weights(sources: int, seed: int) -> np.ndarray:
    """How often each source counts in each resample, [1 + RESAMPLES, sources]; in the first row, every one once."""
    drawn = np.random.default_rng(seed).multinomial(sources, np.full(sources, 1 / sources), RESAMPLES)
    return np.vstack([np.ones(sources), drawn])


def sums_by_source(values: Sequence[float], of: Sequence[str], sources: Sequence[str]) -> np.ndarray:
    """The sum of some values over each source, [sources]."""
    place = {source: number for number, source in enumerate(sources)}
    return np.bincount([place[source] for source in of], weights=values, minlength=len(sources))


def interval(values_B: np.ndarray) -> list[float]:
    """The bounds that hold 95% of the resamples; the first value, the estimate itself, and NaNs are left out."""
    return [float(bound) for bound in np.nanpercentile(values_B[1:], [2.5, 97.5])]
