"""What is tuned by replay: the best static tree, the price of time, which trees are ever worth drafting, what pays.

Legend: X texts, R roots, A actions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from selector.actions import EMPTY, Action
from selector.data import Texts, Timed
from selector.decision import RHOS, Mode, choices
from selector.replay import Ratio, Replayed, ratio_of_speeds, replay, replay_static

SPEEDS = (0.85, 1.0, 1.15)  # prices of time that are tried, as multiples of the best static tree's speed
SURE = 2.0  # standard errors that decisions must be ahead of the best static tree
RARE = 0.002  # share of the steps that may fall to other trees than those that are kept


@dataclass(frozen=True)
class StaticTable:
    """Every action as a static tree on some texts: expected tokens, seconds and steps, [X, A] each."""

    tokens_XA: Tensor
    seconds_XA: Tensor
    steps_XA: Tensor

    @classmethod
    def of(cls, timed: Timed) -> StaticTable:
        return cls(*replay_static(timed.survivals_RS, timed.seconds(), timed.texts.layout, timed.space))

    def speeds(self, index_X: Tensor | slice = slice(None)) -> Tensor:
        """Tokens per second over all texts, or some, [A]."""
        return self.tokens_XA[index_X].sum(0) / self.seconds_XA[index_X].sum(0)

    def efficiencies(self) -> Tensor:
        """Tokens per step over all texts, [A]."""
        return self.tokens_XA.sum(0) / self.steps_XA.sum(0)

    def best(self, index_X: Tensor | slice = slice(None), allowed_A: Tensor | None = None) -> int:
        """The fastest tree, by position."""
        speed_A = self.speeds(index_X)
        return int((speed_A if allowed_A is None else speed_A.where(allowed_A, 0.0)).argmax())

    def replayed(self, action: int) -> Replayed:
        """One tree everywhere; without visits."""
        tokens_X, seconds_X, steps_X = (t[:, action] for t in (self.tokens_XA, self.seconds_XA, self.steps_XA))
        return Replayed(tokens_X, seconds_X, steps_X, torch.zeros(0))


def static_replay(timed: Timed, action: Action) -> Replayed:
    """One static tree."""
    at = timed.space.index(action)
    tables = replay_static(timed.survivals_RS, timed.seconds(), timed.texts.layout, timed.space, [at])
    tokens_X, seconds_X, steps_X = (table[:, 0] for table in tables)
    return Replayed(tokens_X, seconds_X, steps_X, torch.zeros(0))


def replay_actions(timed: Timed, action_R: Tensor, seconds_RA: Tensor) -> Replayed:
    """A policy, given as the action of every root."""
    seconds_R = seconds_RA.gather(-1, action_R.unsqueeze(-1))[:, 0]
    return replay(timed.survivals_RS, action_R, seconds_R, timed.texts.layout, timed.space)


def actions_of(timed: Timed, scores_RA: Tensor | None, mode: Mode, seconds_RA: Tensor, policy: bool = False) -> Tensor:
    """What a mode drafts at every root: the static tree at first roots, and everywhere where nothing is decided."""
    static = timed.space.index(mode.action)
    if not mode.decides or scores_RA is None:
        return torch.full((len(timed.texts.length_R),), static)
    if policy:
        chosen_R = scores_RA.masked_fill(~mode.mask(timed.space), -torch.inf).argmax(-1)
    else:
        chosen_R = choices(scores_RA, seconds_RA, mode, timed.space)
    return torch.where(timed.texts.first_R, static, chosen_R)


def replay_mode(
    timed: Timed, scores_RA: Tensor | None, mode: Mode, sees: str | None = None, policy: bool = False
) -> Replayed:
    """A selector as a mode has it decide.

    Args:
        scores_RA: predicted block efficiencies, or a policy's logits.
        sees: what the selector sees: what a decision costs.
    """
    seconds_RA = timed.seconds(sees if mode.decides else None)
    return replay_actions(timed, actions_of(timed, scores_RA, mode, seconds_RA, policy), seconds_RA)


@dataclass(frozen=True)
class Judged:
    """A mode, and its speed over the best static tree's by replay."""

    mode: Mode
    ratio: Ratio

    @property
    def pays(self) -> bool:
        return self.ratio.value - SURE * self.ratio.error > 1


def tuned(timed: Timed, scores_RA: Tensor, static: Mode, sees: str, policy: bool = False) -> Judged:
    """The best price of time for some predictions, and the trees that it ever takes; judged on the same texts.

    Args:
        static: the mode in which nothing is decided.
    """
    base = static_replay(timed, static.action)
    seconds_RA = timed.seconds(sees)
    speeds = [static.speed * factor for factor in SPEEDS]
    prices = [(1.0, 1.0)] if policy else [(1.0, speeds[0])] + [(rho, g) for rho in RHOS if rho < 1 for g in speeds]
    modes = [replace(static, decides=True, rho=rho, speed=g) for rho, g in prices]
    best = max(modes, key=lambda mode: replay_mode(timed, scores_RA, mode, sees, policy).speed)
    action_R = actions_of(timed, scores_RA, best, seconds_RA, policy)
    visits_R = replay_actions(timed, action_R, seconds_RA).visits_R
    best = replace(best, allowed=common(visits_R, action_R, timed))
    return Judged(best, ratio_of_speeds(replay_mode(timed, scores_RA, best, sees, policy), base, sources(timed.texts)))


def common(visits_R: Tensor, action_R: Tensor, timed: Timed) -> tuple[int, ...]:
    """The trees that make up all but a few of the steps, ascending; the empty tree is always one of them."""
    steps_A = torch.zeros(len(timed.space), dtype=torch.float64).index_add_(0, action_R, visits_R)
    shares, order = (steps_A / steps_A.sum()).sort(descending=True)
    needed = int((shares.cumsum(0) < 1 - RARE).sum()) + 1
    return tuple(sorted({timed.space.index(EMPTY), *order[:needed].tolist()}))


def sources(texts: Texts) -> Tensor:
    """The number of every text's source."""
    return texts.source_number_X


def best_static(timed: Timed, table: StaticTable, setting: Sequence[float], allowed_A: Tensor | None = None) -> Mode:
    """The mode in which the best static tree is drafted everywhere."""
    at = table.best(allowed_A=allowed_A)
    return Mode(setting[0], setting[1], timed.space.actions[at], speed=float(table.speeds()[at]))
