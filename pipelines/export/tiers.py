"""The selector restricted to few shapes of trees and lookups, for engines that capture a graph for each shape.

Shapes are added one at a time for all sampling settings together: each time the one that makes replay fastest with
those already chosen. This is greedy, so the best N shapes may be others. Only a few candidates are replayed. They are
ranked by the net tokens (`E - price T`, by the labels) that a shape adds where the restricted selector would choose it,
at the roots that the unrestricted selector visits.

Legend: R roots, A actions.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from data_gen.models.sampling import Sampling
from pipelines.config import Config
from pipelines.data.recorded import timed
from pipelines.run import console, table
from selector.actions import choice_of
from selector.decision import Mode, net_tokens
from selector.latency import LatencyProfile
from selector.train.data import Texts, Timed
from selector.train.module import SelectorModule
from selector.train.replay import Ratio, Replayed, ratio_of_speeds
from selector.train.tuning import Judged, Predictions, StaticTable, decide, replay_mode

COUNTS = (1, 2, 4, 8, 16, 32)
SHORTLIST = 4  # shapes that are replayed before one is chosen, beside the best static trees
CHAINS, TREES = "chains", "trees and lookups"


@dataclass(frozen=True)
class Unrestricted:
    """The selector with all shapes under one sampling setting, on the texts with which shapes are chosen."""

    mode: Mode
    timed: Timed
    predictions: Predictions
    policy: bool

    @cached_property
    def static(self) -> StaticTable:
        return StaticTable.of(self.timed)

    def replayed(self, mode: Mode) -> Replayed:
        """The replay of a mode."""
        if not mode.feature_levels:
            return self.static.replayed(self.timed.space.index(mode.action))
        return replay_mode(self.timed, self.predictions, mode, self.policy)

    def over(self, mode: Mode, other: Mode) -> Ratio:
        """The speed of one mode over that of another."""
        return ratio_of_speeds(self.replayed(mode), self.replayed(other), self.timed.texts.source_number_X)

    def only(self, shapes: list[int]) -> Mode:
        """The mode with some shapes alone: all of them may be chosen, and the price of time is unchanged."""
        free = replace(self.mode, allowed=())
        return replace(free.restricted(self.timed.space, shapes, self.static.speeds()), speed=free.speed)


class Worth:
    """The worth of shapes at the roots of one setting, in shares of its tokens.

    Attributes:
        chosen_RA: the score by which the selector chooses among shapes; the speed of the static tree where nothing is
            decided, and at first roots.
        net_RA: net tokens of each shape by the labels, weighted by visits.
        chosen_R, net_R: the same of the best shape chosen so far.
    """

    def __init__(self, whole: Unrestricted) -> None:
        timed, mode, trees = whole.timed, whole.mode, len(whole.timed.space.trees)
        seconds_RA = timed.seconds(mode.feature_levels)
        replayed = decide(timed, whole.predictions, mode, whole.policy).replayed(timed)
        share_R = (replayed.visits_R / replayed.tokens_X.sum()).float()
        net_RA = timed.space.efficiencies(timed.survivals_RS) - mode.speed * seconds_RA
        self.net_RA = net_RA * share_R.unsqueeze(-1)
        static_A = torch.zeros(len(timed.space))
        static_A[:trees] = whole.static.speeds().float()
        self.chosen_RA = static_A.expand_as(net_RA)
        if mode.decides:
            scores_RA = whole.predictions[mode.feature_levels[-1]]
            if not whole.policy:
                speed, rho, free = (torch.tensor([[value]]) for value in (mode.speed, mode.rho, True))
                scores_RA = net_tokens(scores_RA, seconds_RA, speed, rho, free)
            self.chosen_RA = torch.where(timed.texts.unknown_R.unsqueeze(-1), static_A, scores_RA)
        self.chosen_R, self.net_R = torch.full((len(net_RA),), -torch.inf), torch.zeros(len(net_RA))

    def gains(self) -> Tensor:
        """The net tokens that each shape would add to those already chosen, [A]."""
        taken_RA = self.chosen_RA > self.chosen_R.unsqueeze(-1)
        return ((self.net_RA - self.net_R.unsqueeze(-1)) * taken_RA).sum(0)

    def add(self, at: int) -> None:
        """Choose one more shape."""
        taken_R = self.chosen_RA[:, at] > self.chosen_R
        self.chosen_R = torch.where(taken_R, self.chosen_RA[:, at], self.chosen_R)
        self.net_R = torch.where(taken_R, self.net_RA[:, at], self.net_R)


@torch.no_grad()
def shapes_in_order(settings: list[Unrestricted], candidates: list[int], count: int) -> list[int]:
    """Positions of up to `count` shapes; the first n of them are the choice for n. The first one is a tree."""
    worths, trees = list(map(Worth, settings)), len(settings[0].timed.space.trees)
    whole = [setting.replayed(setting.mode).speed for setting in settings]
    order: list[int] = []

    def speed(shape: int) -> float:
        """With one more shape, over the unrestricted selector's, summed over the settings."""
        each = zip(settings, whole, strict=True)
        return sum(setting.replayed(setting.only([*order, shape])).speed / own for setting, own in each)

    while len(order) < min(count, len(candidates)):
        left = torch.tensor([a for a in candidates if a not in order and (order or a < trees)])
        gain_A = torch.stack([worth.gains() for worth in worths]).sum(0)[left]
        likely = {int(left[at]) for at in gain_A.topk(min(SHORTLIST, len(left))).indices}
        static = left[left < trees]
        likely |= {int(static[setting.static.speeds()[static].argmax()]) for setting in settings if len(static)}
        order.append(max(sorted(likely), key=speed))
        for worth in worths:
            worth.add(order[-1])
    return order


def restricted(setting: Unrestricted, shapes: list[int]) -> Judged:
    """The mode with some shapes alone, and its speed over the best static tree among them; that tree's mode where
    decisions are not faster."""
    mode = setting.only(shapes)
    judged = Judged(mode, setting.over(mode, mode.static_only()))
    return judged if judged.ratio.value > 1 else Judged(mode.static_only(), Ratio(1.0, 0.0))


def candidates_of(settings: list[Unrestricted], kind: str) -> list[int]:
    """Positions of the shapes of a kind (`CHAINS` or `TREES`)."""
    space = settings[0].timed.space
    return list(space.chain_positions if kind == CHAINS else range(len(space)))


def tiers(settings: list[Unrestricted]) -> list[dict[str, Any]]:
    """For each kind and number of shapes a row: `kind`, `shapes`, and `ratios`, the speed over the unrestricted
    selector's under each setting."""
    rows = []
    for kind in (CHAINS, TREES):
        order = shapes_in_order(settings, candidates_of(settings, kind), max(COUNTS))
        for count in [count for count in COUNTS if count <= len(order)]:
            ratios = [each.over(restricted(each, order[:count]).mode, each.mode) for each in settings]
            shapes = [list(settings[0].timed.space.actions[at]) for at in order[:count]]
            rows.append({"kind": kind, "shapes": shapes, "ratios": ratios})
    return rows


def limited_modes(
    config: Config, module: SelectorModule, texts: Texts, entries: list[dict[str, Any]], profile: LatencyProfile
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The modes of an artefact with `export.tiers` shapes; and the rows of `tiers`, which are also shown."""
    assert config.export.tiers is not None
    settings = []
    for mode in map(Mode.of, entries):
        mine = timed(texts, mode.setting, config.train.verifier, profile)
        settings.append(Unrestricted(mode, mine, module.predictions(mine.texts, mode), not module.is_regressor))
    rows = tiers(settings)
    cells = [
        {
            "shapes": str(len(row["shapes"])),
            "of": row["kind"],
            **{str(Sampling(*each.timed.setting)): str(own) for each, own in zip(settings, row["ratios"], strict=True)},
            "the shapes": " ".join(map(str, map(choice_of, row["shapes"][:4]))) + " .." * (len(row["shapes"]) > 4),
        }
        for row in rows
    ]
    caption = "chosen greedily and replayed on the validation texts; ± one standard error over sources"
    console.print(table(cells, "Speed with few shapes of trees, over the selector with all of them", caption))
    shapes = shapes_in_order(settings, candidates_of(settings, TREES), config.export.tiers)
    found = [restricted(setting, shapes) for setting in settings]
    modes = [{**entry, **judged.mode.row()} for entry, judged in zip(entries, found, strict=True)]
    return modes, [{**row, "ratios": [asdict(ratio) for ratio in row["ratios"]]} for row in rows]
