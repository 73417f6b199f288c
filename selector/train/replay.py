"""Replay: the exact expected time that decoding of given texts takes with any way of choosing trees
at roots.

Given the text, a step that begins at root i with the tree a(i) ends at root i + n with the
probability `P(tau + 1 = n | text)`, which the labels hold (`data_gen.text_labels`), whatever
happened before. So the expected number of steps that begin at each position follows from one walk
along the text,

    D(first root) = 1,      D(i + n) += D(i) P(tau + 1 = n | i, a(i)),

and the expected time is `sum_i D(i) T(a(i), i)`. The draft's KV cache lags behind the text while
steps copy, or draft nothing, and its next forward pass takes longer (`LatencyProfile.lag`). So D
has a second index, the number m of tokens since that pass: a step with a forward pass of the draft
takes `lag(m)` more and sets m to 0, and any other step adds its n tokens to m. Tokens that the last
step yields beyond the text's end take time and do not count. This holds for every policy that
decides at roots by what is known there, before any token is drafted. The only variance is that
between texts; standard errors are over their sources, by the jackknife.

Legend: X texts, N roots of one text, R roots of all texts, A actions, S survivals, D depth, J
accepted lengths + 1, M tokens since the draft's last forward pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from selector.actions import ActionSpace
from selector.files import Array
from selector.jit import jit

ROUNDS = 5  # of restoring the means and clipping again


class Lag(NamedTuple):
    """The roots at which the draft has a forward pass, bool [R]; and the additional seconds of that
    step when 0, 1, .. tokens came since the last such pass, float64 [M]. A larger number counts as
    the last one."""

    passes_R: Tensor
    seconds_M: Tensor


@dataclass(frozen=True)
class Replayed:
    """Tokens of each text, expected seconds and steps, float64 [X]; and how many steps begin at
    each root, [R]."""

    tokens_X: Tensor
    seconds_X: Tensor
    steps_X: Tensor
    visits_R: Tensor

    @property
    def speed(self) -> float:
        """Tokens per second, sums over sums."""
        return float(self.tokens_X.sum() / self.seconds_X.sum())

    @classmethod
    def joined(cls, parts: Sequence[Replayed]) -> Replayed:
        """The same of the texts of several parts, one after another."""
        columns = [(part.tokens_X, part.seconds_X, part.steps_X, part.visits_R) for part in parts]
        return cls(*map(torch.cat, zip(*columns, strict=True)))

    def charged(self, seconds: float) -> Replayed:
        """The same steps, each longer by the seconds of its decision."""
        return replace(self, seconds_X=self.seconds_X + seconds * self.steps_X)

    @property
    def block_efficiency(self) -> float:
        """Tokens per step over all texts."""
        return float(self.tokens_X.sum() / self.steps_X.sum())


def monotone(survivals_RS: Tensor, space: ActionSpace) -> Tensor:
    """The monotone projection of labels, which makes them laws of tau: between 0 and 1, never
    rising along a path; each column keeps its mean; float32 [R, S].

    Labels of branches carry the noise of which siblings were drawn. They are right on average, yet
    one of 1.6 makes a probability of -0.6, and a walk along the text multiplies such noise at every
    step. Clipping lowers the means, so each column is then scaled back to its mean. Labels of
    chains, lookups and shapes by rank have no such noise and do not change.
    """
    survivals_RS = survivals_RS.float()
    if not space.branchings:  # only their labels are noisy
        return survivals_RS
    mean_S = survivals_RS.mean(0)
    cut_RS = _falling(survivals_RS, space)
    for _ in range(ROUNDS):
        cut_RS = _falling(cut_RS * (mean_S / cut_RS.mean(0).clamp(min=1e-9)), space)
    return cut_RS


def _falling(survivals_RS: Tensor, space: ActionSpace) -> Tensor:
    # the last column is the root, which is reached for sure
    falling_RS = torch.nn.functional.pad(survivals_RS.clamp(0, 1), (0, 1), value=1.0)
    for at, before in space.steps:
        falling_RS[:, at] = torch.minimum(falling_RS[:, at], falling_RS[:, before])
    return falling_RS[:, :-1]


def outcomes(survivals_RS: Tensor, action_R: Tensor, space: ActionSpace) -> Tensor:
    """`P(tau + 1 = n)` of the given actions, n = 1 .. depth + 1, float64 [R, J]."""
    # the 0 beyond a tree's depth
    padded_RS = torch.nn.functional.pad(survivals_RS.double(), (0, 1))
    reached_RD = padded_RS.gather(-1, space.survival_of_AD[action_R])
    one_R1 = torch.ones_like(reached_RD[:, :1])
    at_least_RJ = torch.cat([one_R1, reached_RD], dim=-1)
    more_RJ = torch.cat([reached_RD, 0 * one_R1], dim=-1)
    return at_least_RJ - more_RJ


def replay(
    survivals_RS: Tensor,
    action_R: Tensor,
    seconds_R: Tensor,
    size_X: Tensor,
    space: ActionSpace,
    lag: Lag | None = None,
) -> Replayed:
    """Replays a policy, given as the action of every root, int64 [R], and the seconds of its step
    where the draft does not lag, [R]. The roots of a text follow one another; `size_X` is their
    number, int64."""
    if lag is None:
        every_root_R = torch.ones(len(action_R), dtype=torch.bool)
        lag = Lag(passes_R=every_root_R, seconds_M=torch.zeros(1).double())
    sums_X2, visits_R = _walk(
        survivals_RS.contiguous().numpy(),
        space.survival_of_AD.contiguous().numpy(),
        action_R.contiguous().numpy(),
        seconds_R.double().numpy(),
        lag.passes_R.numpy(),
        lag.seconds_M.numpy(),
        size_X.numpy(),
    )
    seconds_X, steps_X = torch.from_numpy(sums_X2).unbind(-1)
    return Replayed(size_X.double(), seconds_X, steps_X, torch.from_numpy(visits_R))


@jit
def _walk(
    survivals_RS: Array,
    survival_of_AD: Array,
    action_R: Array,
    seconds_R: Array,
    passes_R: Array,
    lag_M: Array,
    size_X: Array,
) -> tuple[Array, Array]:
    none, depth, longest = survivals_RS.shape[1], survival_of_AD.shape[1], len(lag_M) - 1
    sums_X2, visits_R, begin = np.zeros((len(size_X), 2)), np.zeros(len(action_R)), 0
    for x in range(len(size_X)):
        begins_NM = np.zeros((size_X[x] + depth + 1, longest + 1))  # D, also beyond the text's end
        begins_NM[0, 0] = 1.0
        for n in range(size_X[x]):
            row, visits, reached = begin + n, begins_NM[n].sum(), 1.0
            if visits == 0.0:
                continue
            visits_R[row] = visits
            sums_X2[x, 0] += visits * seconds_R[row]
            if passes_R[row]:
                sums_X2[x, 0] += (begins_NM[n] * lag_M).sum()
            sums_X2[x, 1] += visits
            for d in range(depth + 1):
                survival = survival_of_AD[action_R[row], d] if d < depth else none
                further = survivals_RS[row, survival] if survival < none else 0.0
                ends = reached - further  # d accepted, and no more
                if passes_R[row]:
                    begins_NM[n + 1 + d, 0] += visits * ends
                elif ends != 0.0:
                    for m in range(longest + 1):
                        begins_NM[n + 1 + d, min(m + 1 + d, longest)] += begins_NM[n, m] * ends
                reached = further
                if survival >= none:
                    break
        begin += size_X[x]
    return sums_X2, visits_R


def fastest_possible(
    survivals_RS: Tensor, seconds_RA: Tensor, size_X: Tensor, space: ActionSpace
) -> Replayed:
    """The policy with the least expected time for each text, of all policies that know the labels;
    the draft counts as never lagging, so this is a bound."""
    best_R = _best_ahead(
        survivals_RS.contiguous().numpy(),
        space.survival_of_AD.contiguous().numpy(),
        seconds_RA.double().numpy(),
        size_X.numpy(),
    )
    action_R = torch.from_numpy(best_R)
    seconds_R = seconds_RA.gather(-1, action_R.unsqueeze(-1))[:, 0]
    return replay(survivals_RS, action_R, seconds_R, size_X, space)


@jit
def _best_ahead(
    survivals_RS: Array, survival_of_AD: Array, seconds_RA: Array, size_X: Array
) -> Array:
    # dynamic programming from each text's end: the action with the least expected time to there
    none, depth = survivals_RS.shape[1], survival_of_AD.shape[1]
    best_R = np.zeros(len(seconds_RA), np.int64)
    begin = 0
    for x in range(len(size_X)):
        ahead_N = np.zeros(size_X[x] + depth + 1)
        for n in range(size_X[x] - 1, -1, -1):
            row, least = begin + n, np.inf
            for a in range(seconds_RA.shape[1]):
                time, reached = seconds_RA[row, a], 1.0
                for d in range(depth + 1):
                    survival = survival_of_AD[a, d] if d < depth else none
                    further = survivals_RS[row, survival] if survival < none else 0.0
                    time += (reached - further) * ahead_N[n + 1 + d]
                    reached = further
                    if reached == 0.0:
                        break
                if time < least:
                    least, best_R[row] = time, a
            ahead_N[n] = least
        begin += size_X[x]
    return best_R


@dataclass(frozen=True)
class Ratio:
    """A quotient of speeds, and one standard error over sources."""

    value: float
    error: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ±{self.error:.3f}"

    def is_ahead(self, errors: float, of: float = 1.0) -> bool:
        """Whether it is above a value by so many standard errors."""
        return self.value - errors * self.error > of


def ratio_of_speeds(replayed: Replayed, rival: Replayed, source_X: Tensor | None = None) -> Ratio:
    """Speed over another's on the same texts; the standard error is by the jackknife over the
    texts' sources, since texts of one source are not independent. Without sources, each text is
    one."""
    sums_XC = torch.stack(
        [replayed.tokens_X, replayed.seconds_X, rival.tokens_X, rival.seconds_X], dim=-1
    )
    if source_X is None:
        source_X = torch.arange(len(sums_XC))
    return jackknifed(sums_XC, source_X)


def speed_ratio(sums_C: Tensor) -> Tensor:
    """Tokens per second over another's, from tokens, seconds, the other's tokens and its
    seconds."""
    return sums_C[..., 0] / sums_C[..., 1] / (sums_C[..., 2] / sums_C[..., 3])


def jackknifed(
    sums_XC: Tensor, source_X: Tensor, ratio: Callable[[Tensor], Tensor] = speed_ratio
) -> Ratio:
    """A `ratio` of sums of columns, over their last axis, and its standard error over sources:
    infinite for a single one, unless the ratio is exactly 1."""
    _, group_X = source_X.unique(return_inverse=True)
    G = int(group_X.max()) + 1
    C = sums_XC.shape[1]
    sums_GC = torch.zeros(G, C, dtype=torch.float64).index_add_(0, group_X, sums_XC.double())
    value = ratio(sums_GC.sum(0))
    if G == 1:
        return Ratio(float(value), 0.0 if value == 1 else math.inf)
    without_G = ratio(sums_GC.sum(0) - sums_GC)
    variance = (G - 1) / G * (without_G - without_G.mean()).square().sum()
    return Ratio(float(value), float(variance.sqrt()))
