"""Stronger rules than the lookup rule: when they copy, and how many tokens the drafter drafts.

Each rule is tuned on training texts and replayed on held-out ones, exactly and with the selector's step times; the time
of its decisions is not counted.

Legend: X texts, R roots, A actions, F features, K kinds of drafts (chain, copy).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import product
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selector.decision import Mode
from selector.jit import jit
from selector.schema import PRECEDENT_LENGTHS
from selector.train.data import Timed
from selector.train.replay import Replayed, replay
from selector.train.tuning import LEASTS

Array = NDArray[Any]
Moves = Sequence[dict[str, Any]]  # alternative changes of a rule's parameters
AnyRival = TypeVar("AnyRival", bound="Copying | Payoff")
COPIES = (1, 2, 3, 4, 6, 8, 10, 12, 16, 20)  # candidate lengths of copies
HITS = (0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, math.inf)  # candidate thresholds for the share of recent hits
PAYOFFS = (0.5, 1, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10, 14, math.inf)  # candidate thresholds, in predicted tokens
PAYOFF_SCALARS = (  # what a predicted payoff is linear in
    *("match", "copied", "copied_mean_0.8", "copied_mean_0.95", "source_steady", "source_in_prompt"),
    *("source_foretold", "second_match", "second_agrees"),
    *(f"{name}_{count}" for name in ("seen", "agree") for count in PRECEDENT_LENGTHS),
)


def rivals(train: Timed, test: Timed, rule: Mode) -> dict[str, Replayed]:
    """The rules, tuned on training texts and replayed on held-out ones; `rule` is the lookup rule as tuned there."""
    own, held_out = RivalTexts(train), RivalTexts(test)
    assert rule.rule is not None
    tuned: dict[str, Rival] = {
        "the lookup rule with all options": best_rule(own, Copying(rule.action.nodes, *rule.rule)),
        "HVD": hybrid_verified_decoding(own),
    }
    return {name: held_out.replayed(each) for name, each in tuned.items()}


class RivalTexts:
    """Labelled texts as the rules know them.

    Args:
        timed: in a space of `ActionSpace.chains`, with the scalars of `schema.LOG`.
    """

    def __init__(self, timed: Timed) -> None:
        self.timed, self.depth, self.longest = timed, timed.space.depth, max(timed.space.lookups)
        self.size_X: Array = timed.texts.size_X.numpy()
        self.match_R, self.hits_R = (timed.texts.scalar(name).contiguous() for name in ("match", "hit_mean_0.8"))

    @cached_property
    def certain(self) -> bool:
        """Whether all labels are 0 or 1, so that the end of every step is certain."""
        survivals_RS = self.timed.survivals_RS
        return bool(((survivals_RS == 0) | (survivals_RS == 1)).all())

    @cached_property
    def accepted_RK(self) -> Array:
        """How many tokens of the longest chain and of the longest copy would be accepted, int64 [R, 2]."""
        parts = self.timed.survivals_RS.split([self.depth, self.longest], dim=1)
        return torch.stack([part.sum(1) for part in parts], dim=1).long().numpy()

    @cached_property
    def seconds_RA(self) -> Array:
        """The time of a step with each action at each root, float32."""
        return self.timed.seconds().numpy()

    @cached_property
    def payoff_scalars_RF(self) -> Tensor:
        """A constant 1 and `PAYOFF_SCALARS` of every root, float64."""
        return torch.stack([torch.ones_like(self.match_R), *map(self.timed.texts.scalar, PAYOFF_SCALARS)], 1).double()

    def copy(self, length: int) -> int:
        """The action that copies `length` tokens, or as many as possible. Action k is the chain of k tokens."""
        return self.depth + min(length, self.longest)

    def replayed(self, rule: Rival) -> Replayed:
        """The exact replay of a rule."""
        action_R, timed = rule.actions(self), self.timed
        return replay(timed.survivals_RS, action_R, timed.seconds_of(action_R), timed.texts.size_X, timed.space)

    def speed(self, rule: Rival) -> float:
        """Tokens per second of a rule. Where labels are certain, one walk along its steps is enough."""
        if not self.certain:
            return self.replayed(rule).speed
        action_R = rule.actions(self).numpy()
        return len(action_R) / _seconds(action_R, self.accepted_RK, self.seconds_RA, self.size_X, self.depth)


@dataclass(frozen=True)
class Copying:
    """Copy where the match has at least some length, else draft."""

    drafted: int
    least: int  # the match from which `copied` tokens are copied
    copied: int
    longer: float = math.inf  # the match from which `far` tokens are copied
    far: int = 1
    hits: float = math.inf  # the share of the drafter's recent hits above which `steady` tokens are drafted
    steady: int = 0

    def actions(self, texts: RivalTexts) -> Tensor:
        """The positions of its actions at every root, int64 [R]."""
        actions = self.drafted, self.steady, texts.copy(self.copied), texts.copy(self.far)
        least = self.hits, float(self.least), float(self.longer)
        return torch.from_numpy(_copying(texts.match_R.numpy(), texts.hits_R.numpy(), actions, least))


@dataclass(frozen=True)
class Payoff:
    """Copy where the predicted accepted length of the copy reaches a threshold (`hybrid_verified_decoding`)."""

    weights: tuple[float, ...]  # of a constant 1 and of `PAYOFF_SCALARS`
    drafted: int
    least: float  # the threshold, in tokens
    copied: int

    def actions(self, texts: RivalTexts) -> Tensor:
        """As `Copying.actions`."""
        copies_R = (payoff(texts, self.weights) >= self.least) & (texts.match_R > 0)
        return torch.where(copies_R, texts.copy(self.copied), self.drafted)


Rival = Copying | Payoff  # a rule with its parameters


def best_rule(train: RivalTexts, start: Copying) -> Copying:
    """The best rule of thumb: two lengths of copies by two lengths of the match, and two lengths of the drafter by
    its recent hits. All of them are tuned, beginning with `start`."""
    lengths, drafted = _copy_lengths(train), range(train.depth + 1)
    moves = [
        grid(copied=lengths, longer=LEASTS),
        grid(least=LEASTS, copied=lengths),
        grid(longer=LEASTS, far=lengths),
        grid(hits=HITS, steady=drafted),
        grid(drafted=drafted, hits=HITS),
    ]
    return climbed(train, replace(start, far=start.copied, steady=start.drafted), moves)


def hybrid_verified_decoding(train: RivalTexts) -> Payoff:
    """Hybrid Verified Decoding (HVD, arXiv 2606.01019): predict a copy's accepted length, and copy where it is large.

    This follows the idea of the abstract, not the paper's predictor: here the accepted length is linear in scalars of
    the match, fitted by least squares at the training roots with a match. The threshold and both lengths are tuned.
    """
    has_R = train.match_R > 0
    own_RF = train.payoff_scalars_RF[has_R]
    accepted_R = train.timed.survivals_RS[has_R, train.depth :].sum(1).double()
    ridge_FF = 1e-6 * max(len(own_RF), 1) * torch.eye(own_RF.shape[1], dtype=torch.float64)
    weights_F = torch.linalg.solve(own_RF.T @ own_RF + ridge_FF, own_RF.T @ accepted_R)
    start = Payoff(tuple(weights_F.tolist()), 0, math.inf, train.longest)
    together = grid(least=PAYOFFS, copied=_copy_lengths(train))
    return climbed(train, start, [grid(drafted=range(train.depth + 1)), together])


def _copy_lengths(train: RivalTexts) -> list[int]:
    return sorted({min(length, train.longest) for length in COPIES} | {train.longest})


@lru_cache(maxsize=1)
def payoff(texts: RivalTexts, weights: tuple[float, ...]) -> Tensor:
    """The predicted accepted length of a copy at every root, float64 [R]."""
    return texts.payoff_scalars_RF @ torch.tensor(weights, dtype=torch.float64)


def climbed(train: RivalTexts, start: AnyRival, moves: Sequence[Moves]) -> AnyRival:
    """The fastest rule that a coordinate search from `start` finds: it takes the best of each list of moves in turn,
    until none of them helps."""
    best, before, speed = start, None, cache(train.speed)
    while best != before:
        before = best
        for changes in moves:
            best = max([best, *(replace(best, **change) for change in changes)], key=speed)
    return best


def grid(**values: Iterable[float]) -> Moves:
    """Changes of one or several parameters together: every combination of their values."""
    return [dict(zip(values, each, strict=True)) for each in product(*values.values())]


@jit
def _copying(
    match_R: Array, hits_R: Array, actions: tuple[int, int, int, int], least: tuple[float, float, float]
) -> Array:
    """`Copying`: the action at every root, int64 [R]; with torch this takes ten times as long. The first action is the
    default; the others are taken where hits, match and longer match reach `least`."""
    action_R = np.zeros(len(match_R), np.int64)
    for r in range(len(match_R)):
        action = actions[1] if hits_R[r] > least[0] else actions[0]
        action = actions[2] if match_R[r] >= least[1] else action
        action_R[r] = actions[3] if match_R[r] >= least[2] else action
    return action_R


@jit
def _seconds(action_R: Array, accepted_RK: Array, seconds_RA: Array, size_X: Array, depth: int) -> float:
    """The time of a rule's steps where labels are certain."""
    seconds, end, n = 0.0, 0, 0
    for x in range(len(size_X)):
        n, end = end, end + size_X[x]
        while n < end:
            action = action_R[n]
            seconds += seconds_RA[n, action]
            if action > depth:
                n += 1 + min(action - depth, accepted_RK[n, 1])
            else:
                n += 1 + min(action, accepted_RK[n, 0])
    return seconds
