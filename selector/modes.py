"""Where a selector's decisions are worth their cost: at the root, along the trunk, or nowhere.

At the root a selector may use all features (DDTE, appendix E). Along the trunk, the root token included, it uses the
draft's own state: far less to compute, and known at every drafted token.

Decided for every sampling setting apart. Speeds g are fitted on the training split, what pays is found on the
validation split, and a decision must be ahead of the best static tree by two standard errors there: where draft and
target agree about as well everywhere, there is little to decide, and the static tree costs nothing. What the traces
promise is then tried in decoding (`pipelines.confirm`).

Legend: B roots, S samples, T trunk tokens, A actions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from selector.actions import EMPTY, ActionSpace
from selector.data import Roots, TracesModule, met_in_decoding, of_setting
from selector.deciding import TRUNK_TOKENS, Played, outcome, play
from selector.module import SelectorModule
from selector.network import further_cost
from selector.runtime import Mode
from selector.speed import by_text

SPACE = ActionSpace.default()
WHERE = ((False, False), (True, False), (False, True))  # at the root, along the trunk
EARLY = 0.03  # share of the steps that may end later than they would
RARE = 0.005  # share of the decisions that may fall to other actions than the best one
ROUNDS = 6  # of Dinkelbach's method
SURE = 2.0  # standard errors that a decision must be ahead of the static tree: by the traces, and then in decoding


@dataclass(frozen=True)
class Decoded:
    """Speed over that of the best static tree in decoding so many prompts, and its standard error."""

    ratio: float
    error: float
    prompts: int


@dataclass(frozen=True)
class Judged:
    """A way to decide under one sampling setting, on the validation split.

    Attributes:
        ratio, error: speed over that of the best static tree, and its standard error over prompts, by the traces.
        without: the ratio without each prompt in turn, by the prompt's number.
        decoded: what it was worth in decoding, where that was tried.
    """

    mode: Mode
    ratio: float
    error: float
    without: dict[int, float]
    decoded: Decoded | None = None

    @property
    def static(self) -> bool:
        """Whether nothing is decided."""
        return not (self.mode.at_root or self.mode.on_trunk)

    @property
    def setting(self) -> tuple[float, float]:
        """Temperature and top-p."""
        return self.mode.temperature, self.mode.top_p

    @property
    def worth(self) -> float:
        """The ratio in decoding, where that was tried; else that by the traces."""
        return self.ratio if self.decoded is None else self.decoded.ratio

    @property
    def assured(self) -> float:
        """What is compared: the ratio less two standard errors, in decoding, where that was tried, or by the traces."""
        return self.worth - SURE * (self.error if self.decoded is None else self.decoded.error)

    def row(self) -> dict[str, Any]:
        """As JSON has it."""
        decoded = None if self.decoded is None else {**asdict(self.decoded), "error": finite(self.decoded.error)}
        figures = {"ratio": self.ratio, "error": finite(self.error), "decoded": decoded}
        return {**asdict(self.mode), "action": list(self.mode.action), **figures}


@torch.no_grad()
def judge(module: SelectorModule, traces: TracesModule) -> list[list[Judged]]:
    """Every way to decide, for every sampling setting of the training split; the chosen one first."""
    module.eval()
    result = []
    for setting in traces.train.setting_B.unique().tolist():
        train, validation = (met_in_decoding(of_setting(split, setting)) for split in (traces.train, traces.validation))
        ways = [way for way in WHERE if module.predicts_efficiency or not way[1]]
        judged = [_judge(module, traces, train, validation, *way) for way in ways]
        result.append(sorted(judged, key=lambda j: j.assured, reverse=True))
    return result


def _judge(
    module: SelectorModule, traces: TracesModule, train: Roots, validation: Roots, at_root: bool, on_trunk: bool
) -> Judged:
    temperature, top_p = train.sampling()
    action, gain = train.best_static()
    static = torch.full((len(train),), action)
    player = Player(module, traces, train, at_root, on_trunk)
    if at_root or on_trunk:
        gain = settled(lambda g: player.play(static, g), gain)
    if on_trunk:
        player = player.from_the(first_token(player.play(static, gain)))
        gain = settled(lambda g: player.play(static, g), gain)
    further = common(player.play(static, gain).times_A)
    charged = gain * module.predicts_efficiency
    verifier_of = traces.verifier_of.get(int(train.setting_B[0]), (0,) * len(SPACE))
    mode = Mode(
        *(temperature, top_p, SPACE.actions[action], at_root, on_trunk, charged),
        *(further, player.first, verifier_of),
    )
    base_B = torch.full((len(validation),), action)
    played = Player(module, traces, validation, at_root, on_trunk).from_the(player.first).play(base_B, gain)
    base = Player(module, traces, validation, False, False).play(base_B, gain)
    ratio, without = ratios(played, base)
    return Judged(mode, ratio, jackknife_error(ratio, without), without)


class Player:
    """Decisions of one kind on some roots, as fast as g can be varied."""

    def __init__(
        self, module: SelectorModule, traces: TracesModule, roots: Roots, at_root: bool, on_trunk: bool
    ) -> None:
        self.roots, self.at_root, self.on_trunk = roots, at_root, on_trunk
        self.revise = traces.profile.revise
        self.undecided_BA = roots.seconds_BA if at_root else roots.static_seconds_BA
        empty = SPACE.index(EMPTY)  # a decision needs the draft's pass over the root even where nothing is drafted then
        self.root_pass_B = roots.seconds_BA[:, empty] - roots.static_seconds_BA[:, empty] - traces.profile.select
        if on_trunk:
            self.gains = [module.gains(roots, t) for t in range(SPACE.decisions + 1)]
        if at_root:
            self.outputs_BA = module.outputs(roots)
            self.charged = float(module.predicts_efficiency)
        self.from_the(0)

    def from_the(self, first: int) -> Player:
        """Trunk tokens before this one are drafted without a decision."""
        self.first, self.seconds_BA = first, self.undecided_BA
        if self.on_trunk:
            decisions_A = (TRUNK_TOKENS - first + 1).clamp(min=0)
            self.seconds_BA = self.undecided_BA + self.revise * decisions_A
            self.seconds_BA[:, SPACE.index(EMPTY)] += self.root_pass_B
            self.further_BTA = further_cost(self.seconds_BA, SPACE)
        return self

    def play(self, static_B: Tensor, gain: float) -> Played:
        """What is drafted when time is charged at `gain` tokens per second."""
        action_B = static_B
        if self.at_root:
            action_B = (self.outputs_BA - self.charged * gain * self.seconds_BA).argmax(-1)
        action_BS = action_B.unsqueeze(-1).expand(self.roots.trunk_BSA.shape[:2])
        times_A = None
        if self.on_trunk:
            costs_BTA = gain * self.further_BTA
            action_BS, times_A = play(self.roots, lambda t: self.gains[t], costs_BTA, self.first)
        return outcome(self.roots, action_BS, self.seconds_BA, times_A)


def settled(play: Callable[[float], Played], gain: float) -> float:
    """The speed g that comes of charging time at it (Dinkelbach), from the static tree's on.

    For a ratio of sums that g is the best one; over whole texts it is an approximation.
    """
    for _ in range(ROUNDS):
        gain = play(gain).speed()
    return gain


def first_token(played: Played) -> int:
    """The first trunk token at which more than a few of the steps have come to their end; 0 is the root."""
    ended_T = TRUNK_TOKENS[played.action_BS].flatten().bincount(minlength=SPACE.decisions + 2).cumsum(0)
    return int((ended_T <= EARLY * played.action_BS.numel()).sum())


def common(times_A: Tensor | None) -> tuple[int, ...]:
    """The further actions that make up all but a few of the decisions, to stop among them, in canonical order."""
    if times_A is None:
        return ()
    shares, order = (times_A / times_A.sum().clamp(min=1)).sort(descending=True)
    needed = int((shares.cumsum(0) < 1 - RARE).sum()) + 1
    return tuple(sorted({SPACE.index(EMPTY), SPACE.index(SPACE.chain(1)), *order[:needed].tolist()}))


def ratios(played: Played, base: Played) -> tuple[float, dict[int, float]]:
    """Speed over the baseline's, and the same without each prompt in turn."""
    times_P2 = torch.stack([base.seconds_per_token(), played.seconds_per_token()], dim=-1)
    return ratio_of_sums(torch.ones_like(times_P2), times_P2, played.prompt_B.unique())


def ratio_of_sums(tokens_P2: Tensor, seconds_P2: Tensor, group_P: Tensor) -> tuple[float, dict[int, float]]:
    """The second's total tokens over total seconds over the first's, and the same without each group in turn; NaN where
    nothing is left then.

    Args:
        tokens_P2, seconds_P2: of two ways to decode each prompt.
        group_P: numbers of groups of prompts.
    """
    sums_G22 = by_text(torch.stack([tokens_P2, seconds_P2], dim=1), group_P)
    total_22 = sums_G22.sum(0)
    without_G22 = total_22 - sums_G22 if len(sums_G22) > 1 else torch.full_like(sums_G22, torch.nan)
    ratios_G = _second_over_first(without_G22)
    return float(_second_over_first(total_22)), dict(zip(group_P.unique().tolist(), ratios_G.tolist(), strict=True))


def _second_over_first(sums_22: Tensor) -> Tensor:
    """Of speeds, from tokens and seconds of two ways, [.., 2, 2]."""
    speed_2 = sums_22[..., 0, :] / sums_22[..., 1, :]
    return speed_2[..., 1] / speed_2[..., 0]


def finite(error: float) -> float | None:
    """Null in JSON, which knows no infinite numbers."""
    return error if math.isfinite(error) else None


def jackknife_error(value: float, without: Mapping[Any, float]) -> float:
    """The standard error of what was computed without each prompt in turn; inf for a single prompt.

    A ratio of exactly 1 is the static tree's to itself: no prompt changes it.
    """
    values = torch.tensor(list(without.values()), dtype=torch.float64)
    if len(values) == 1:
        return 0.0 if value == 1 else math.inf
    return float(((len(values) - 1) / len(values) * (values - values.mean()).square().sum()).sqrt())
