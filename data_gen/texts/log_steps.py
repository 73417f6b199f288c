"""Labels from an engine's own steps: what a draft would have had accepted where none began.

Where drafts are not sampled, a text does not depend on what was drafted. So a log of steps tells of
most tokens whether a draft predicted them: those before a step's first rejected token were *hits*,
that one was a *miss*, and the additional token after a wholly accepted draft is unknown. The
accepted length of a draft that begins anywhere is then the run of hits from there on. But a token
was predicted at one depth alone, its distance from the step's begin, and the nearer a draft begins,
the better it predicts: of the tokens that a deeper draft missed, a nearer one hits a share, here
called `again`. A token that a deeper draft hit counts as a hit of a nearer one, and what a nearer
draft did as what a deeper one does.

`again` follows from steps of different lengths. Of two drafts that begin at the same place and have
l tokens accepted, let one have l tokens, so that the next step begins at the token l + 1 with a
fresh draft, and the other one more than l + 1. Over both possible outcomes of the token l, the
fresh one hits with

    F = a X + (1 - a) M,      X = D + again (1 - D),

where `a` is how often the longer draft has the token l right, D how often then also the token
l + 1, and M how often a fresh draft hits after a miss. All but X are observed. This holds where
lengths do not depend on what is easy, as random ones. Only steps behind a long one are compared,
since an engine with short drafts begins its steps at other places. With steps of a single length,
`again` lies between 0 and how often a fresh draft hits.

Legend: R positions of a text, D depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]


class Predicted(NamedTuple):
    """Of each token the probability that its step's draft predicted it, NaN where none is known,
    float32 [R]; and at which depth, the number of tokens since the step's begin, int64 [R]."""

    hit_R: Floats
    depth_R: NDArray[np.int64]


def predicted(survivals_RD: Floats) -> Predicted:
    """What the drafts of a text did. `survivals_RD` are P(accepted >= t) of a draft that begins at
    each position, NaN where nothing, or less than t tokens, was drafted."""
    R, D = survivals_RD.shape
    drafted_R = (~np.isnan(survivals_RD)).sum(1)
    position_R = np.arange(R)
    begin_R = np.maximum.accumulate(np.where(drafted_R > 0, position_R, -1))  # of the token's step
    # a token that is far from all steps counts as one behind the longest draft
    depth_R = np.where(begin_R < 0, D + 1, np.minimum(position_R - begin_R + 1, D + 1))
    is_known_R = depth_R <= drafted_R[begin_R]
    reached_RD = np.pad(survivals_RD, ((0, 0), (1, 1)), constant_values=((0, 0), (1, np.nan)))
    before_R = reached_RD[begin_R, depth_R - 1]
    hit_R = reached_RD[begin_R, depth_R] / np.where(before_R > 0, before_R, 1)
    return Predicted(np.where(is_known_R, hit_R, np.nan).astype(np.float32), depth_R)


@dataclass(frozen=True)
class Correction:
    """How labels follow from steps.

    Attributes:
        again: P(a nearer draft hits | a deeper one missed).
        low: the least that it can be; where the log tells `again`, two standard errors less.
        high: the most.
        further: P(a draft's next token is a hit | it was wholly accepted).
        is_told: whether steps of several lengths tell `again`.
        unknown: the share of the tokens that no draft predicted, for better or worse.
    """

    again: float
    low: float
    high: float
    further: float
    is_told: bool
    unknown: float

    @classmethod
    def of(cls, texts: Sequence[Floats]) -> Correction:
        """From what is known of each text, as `predicted` takes it."""
        steps = _Steps.of(texts)
        hit_R = np.concatenate([predicted(survivals_RD).hit_R for survivals_RD in texts])
        unknown = float(np.isnan(hit_R).mean())
        most = steps.first
        estimate = steps.again()
        if estimate is None:
            return cls(most / 2, 0.0, most, steps.further, False, unknown)
        again, error = estimate
        low, again, high = np.clip([again - 2 * error, again, again + 2 * error], 0.0, most)
        return cls(float(again), float(low), float(high), steps.further, True, unknown)

    def imputed(self, survivals_RD: Floats, again: float | None = None) -> Floats:
        """The labels with means in place of what is not known; `again` may be another one."""
        if not np.isnan(survivals_RD).any():
            return survivals_RD
        if again is None:
            again = self.again
        R, depth = survivals_RD.shape
        hit_R, depth_R = predicted(survivals_RD)
        hit_R = np.nan_to_num(hit_R, nan=self.further)
        nearer_R = hit_R + again * (1 - hit_R)
        imputed_RD = np.zeros_like(survivals_RD)
        reached_R = np.ones(R, np.float32)
        for d in range(min(depth, R)):
            # the draft's token d + 1 is the text's token so many positions further on
            right_R = np.where(d + 1 < depth_R[d:], nearer_R[d:], hit_R[d:])
            reached_R = reached_R[: R - d] * right_R
            imputed_RD[: R - d, d] = reached_R
        return np.where(np.isnan(survivals_RD), imputed_RD, survivals_RD)


class _Steps(NamedTuple):
    """All steps of a log: the drafted tokens of the step before, 0 without one, their drafted and
    accepted tokens, and whether the next step's first token was a hit; NaN where there is none,
    float64 [steps] each."""

    before: NDArray[np.float64]
    drafted: NDArray[np.float64]
    accepted: NDArray[np.float64]
    following: NDArray[np.float64]

    @classmethod
    def of(cls, texts: Sequence[Floats]) -> _Steps:
        columns: list[NDArray[np.float64]] = []
        for survivals_RD in texts:
            drafted_R = (~np.isnan(survivals_RD)).sum(1)
            begins = np.flatnonzero(drafted_R)
            known_RD = survivals_RD[begins]
            drafted, accepted = drafted_R[begins], np.nansum(known_RD, axis=1)
            following = np.append(known_RD[1:, 0], np.nan) if len(begins) else known_RD[:, 0]
            # the next one that is known may begin later
            is_next = np.append(begins[1:] == (begins + accepted + 1)[:-1], False)[: len(begins)]
            following = np.where(is_next, following, np.nan)
            before = np.append(0, drafted)[: len(drafted)]
            columns.append(np.stack([before, drafted, accepted, following]))
        return cls(*np.concatenate(columns, axis=1))

    @property
    def first(self) -> float:
        """How often a fresh draft's first token is a hit."""
        return _share(self.accepted >= 1)[0]

    @property
    def further(self) -> float:
        """How often a draft's last token is a hit, where those before it are."""
        reached = self.accepted >= self.drafted - 1
        return _share((self.accepted >= self.drafted)[reached])[0]

    def again(self) -> tuple[float, float] | None:
        """The estimate of `Correction.again` and its standard error, over all lengths l; None
        where steps of one length alone tell of some."""
        estimates = []
        for length in range(1, int(self.drafted.max(initial=0)) - 1):
            estimate = self._again_after(length)
            if estimate is not None:
                estimates.append(estimate)
        if not estimates:
            return None
        values, variances = np.array(estimates).T
        weights = 1 / variances
        return float(np.average(values, weights=weights)), float(weights.sum() ** -0.5)

    def _again_after(self, length: int) -> tuple[float, float] | None:
        # behind short drafts, steps begin at other places
        alike = self.before >= length + 2
        whole = alike & (self.drafted == length) & (self.accepted == length)
        longer = alike & (self.drafted >= length + 2) & (self.accepted >= length)
        right = longer & (self.accepted > length)
        wrong = longer & (self.accepted == length)
        outcomes = (
            self.following[whole],  # F
            (self.accepted > length)[longer],  # a
            (self.accepted > length + 1)[right],  # D
            self.following[wrong],  # M
        )
        (F, a, D, M), variances = np.transpose([_share(outcome) for outcome in outcomes])
        if not np.isfinite(variances).all() or a == 0 or D == 1:
            return None
        X = (F - (1 - a) * M) / a
        slopes = np.array([1 / a, (M - F) / a**2, (X - 1) / (1 - D), (a - 1) / a]) / (1 - D)
        return (X - D) / (1 - D), float(slopes**2 @ variances)


FEWEST = 30  # outcomes, of which a share is taken


def _share(outcomes: NDArray[np.bool_] | NDArray[np.float64]) -> tuple[float, float]:
    """The mean of those that are known, and its variance; infinite where they are few."""
    known = outcomes[~np.isnan(outcomes.astype(float))].astype(float)
    if len(known) == 0:
        return 0.0, np.inf
    mean = known.mean()
    if len(known) < FEWEST:
        return float(mean), np.inf
    # as if one more hit and one more miss were seen, so that it is never 0
    shrunk = (known.sum() + 1) / (len(known) + 2)
    return float(mean), float(shrunk * (1 - shrunk) / len(known))
