"""An engine's traffic as timed steps: what its plug-in recorded, with equal numbers of requests and
equal contexts within a bin, so that `timings.profile_of` fits them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pandas as pd

from selector.files import Array
from selector.schema import InputError

FEWEST = 100  # steps of about so many requests that draft nothing, and that draft
REACHED = 10  # steps that verify as many tokens as the most that are fitted, at least
KNOTS = (1, 1.25, 1.5, 2, 3, 5, 9, 17, 33, 65, 129)  # verified tokens, linear in between
BLOCK = 50  # consecutive steps, which are drawn or held out together
HELD_OUT = 5  # one block of so many
DRAWS = 8
SLOW = 2.0  # times as long as usual: a pause of the machine, which is not fitted


def enough(steps: pd.DataFrame, name: str, drafts: bool) -> pd.DataFrame:
    """The steps of about 1, 2, 4, .. requests of which there are enough of every kind; InputError
    without any."""
    kinds = {"draft nothing": steps["verified"] == 1, "draft": steps["verified"] > 1}
    if drafts:
        kinds["draft with a model"] = steps["passes"] > 0
    counts = pd.DataFrame(kinds).groupby(_about(steps)).transform("sum")
    least = counts.min(axis=1)
    if least.max() < FEWEST:
        most = counts.loc[least.idxmax()]
        words = ", ".join(f"{count} that {kind}" for kind, count in most.items())
        raise InputError(
            f"{name}: too few steps: of about as many requests at most {words}; {FEWEST} of each "
            "are needed"
        )
    return steps[least >= FEWEST].reset_index(drop=True)


def binned(steps: pd.DataFrame) -> pd.DataFrame:
    """The steps with the mean number of requests and the mean context of their bin, and how many
    requests `more` than that there were."""
    about = _about(steps)
    most = steps["verified"].groupby(about).transform(lambda sizes: sizes.nlargest(REACHED).min())
    batch = steps["batch"].groupby(about).transform("mean").round().astype(int)
    is_long = steps["context"] > steps["context"].groupby(about).transform("median")
    context = steps["context"].groupby([about, is_long]).transform("mean").round().astype(int)
    more = steps["batch"] - batch
    return steps.assign(batch=batch, context=context, more=more)[steps["verified"] <= most]


def usual(steps: pd.DataFrame, size: Array) -> pd.Series:
    """Which steps take at most `SLOW` times the median of those with as many passes and a verified
    `size` in the same bin."""
    median = steps["seconds"].groupby([size, steps["passes"]]).transform("median")
    return steps["seconds"] <= SLOW * median


def quick(seconds: pd.Series, predicted: pd.Series) -> pd.Series:
    """Which steps are not among the slowest tenth, by what they take over what is predicted, nor
    `SLOW`."""
    slowness = seconds / predicted
    return slowness <= min(slowness.quantile(0.9), SLOW)


def _about(steps: pd.DataFrame) -> pd.Series:
    """The number of requests as the nearest power of two."""
    return np.log2(steps["batch"]).round()


def drawn(steps: pd.DataFrame) -> Iterator[pd.DataFrame]:
    """Bootstrap draws of blocks of consecutive steps."""
    generator = np.random.default_rng(0)
    blocks = np.array_split(np.arange(len(steps)), -(-len(steps) // BLOCK))
    for _ in range(DRAWS):
        rows = [blocks[block] for block in generator.choice(len(blocks), len(blocks))]
        yield steps.iloc[np.concatenate(rows)].reset_index(drop=True)


def halves(steps: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Steps to fit, and held-out blocks of them."""
    is_held_out = np.arange(len(steps)) // BLOCK % HELD_OUT == HELD_OUT - 1
    return steps[~is_held_out], steps[is_held_out]
