"""95% bootstrap intervals over *sources* (files that prompts come from): the prompts of one file are not independent.

All methods, settings and verifiers share the prompts and therefore each resample, so that the interval of a ratio is
narrower than those of its parts suggest. The intervals do not include the noise of a machine's clock.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES = 2000  # the bounds of a 95% interval then vary by a few per cent of its width


def source_weights(sources: int, seed: int) -> np.ndarray:
    """How often each source counts in each resample, [1 + RESAMPLES, sources]; once in the first row, the estimate."""
    drawn = np.random.default_rng(seed).multinomial(sources, np.full(sources, 1 / sources), RESAMPLES)
    return np.vstack([np.ones(sources), drawn])


def sums_by_source(values: Sequence[float], of: Sequence[str], sources: Sequence[str]) -> np.ndarray:
    """The sum of some values over each source, [sources]."""
    place = {source: number for number, source in enumerate(sources)}
    return np.bincount([place[source] for source in of], weights=values, minlength=len(sources))


def interval(values_B: np.ndarray) -> list[float]:
    """The bounds of 95% of the resamples; the first value, which is the estimate, and NaNs are left out."""
    return [float(bound) for bound in np.nanpercentile(values_B[1:], [2.5, 97.5])]
