"""The selector restricted to few shapes of trees and lookups, for engines that capture a graph for each shape.

The first shape is the fastest static tree; the others are those that the selector drafts in most steps. Both are taken
over all sampling settings together.

Legend: A actions.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, NamedTuple

import torch

from pipelines.config import Config
from pipelines.data.recorded import timed
from pipelines.run import console, table
from selector.decision import Mode
from selector.latency import LatencyProfile
from selector.train.data import Texts, Timed
from selector.train.module import SelectorModule
from selector.train.replay import Ratio, ratio_of_speeds
from selector.train.tuning import Predictions, StaticTable, decide, replay_mode

COUNTS = (1, 2, 4, 8, 16, 32)


class Decisions(NamedTuple):
    """A mode with its predictions on the texts of its sampling setting."""

    mode: Mode
    timed: Timed
    predictions: Predictions
    policy: bool
    static: StaticTable

    def over(self, mode: Mode, other: Mode) -> Ratio:
        """The speed of one mode over that of another."""
        mine, theirs = (replay_mode(self.timed, self.predictions, each, self.policy) for each in (mode, other))
        return ratio_of_speeds(mine, theirs, self.timed.texts.source_number_X)

    def restricted(self, shapes: list[int]) -> Mode:
        """The mode with some shapes alone; that of the best static tree among them where decisions are not faster."""
        mode = self.mode.restricted(self.timed.space, shapes, self.static.speeds())
        return mode if self.over(mode, mode.static_only()).value > 1 else mode.static_only()


@torch.no_grad()
def shapes_by_visits(settings: list[Decisions]) -> list[int]:
    """Positions of the actions that are drafted, the fastest static tree first, then by their share of the steps."""
    space = settings[0].timed.space
    share_A = torch.zeros(len(space), dtype=torch.float64)
    for each in settings:
        found = decide(each.timed, each.predictions, each.mode, each.policy)
        visits_R = found.replayed(each.timed).visits_R
        share_A.index_add_(0, found.action_R, visits_R / visits_R.sum())
    first = int(torch.stack([each.static.speeds().log() for each in settings]).sum(0).argmax())
    share_A[first] = torch.inf
    return [int(a) for a in share_A.argsort(descending=True, stable=True) if share_A[a] > 0]


def limited_modes(
    config: Config, module: SelectorModule, texts: Texts, entries: list[dict[str, Any]], profile: LatencyProfile
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The modes of an artefact with `export.tiers` shapes; and, by the number of shapes, what is lost: `shapes`, and
    `ratios`, the speed over the unrestricted selector's under each sampling setting. The latter is also shown."""
    settings = []
    for mode in map(Mode.of, entries):
        own = timed(texts, mode.sampling, config.train.verifier, profile)
        predictions = module.predictions(own.texts, mode)
        settings.append(Decisions(mode, own, predictions, not module.is_regressor, StaticTable.of(own)))
    order, actions = shapes_by_visits(settings), settings[0].timed.space.actions
    rows, cells = list[dict[str, Any]](), list[dict[str, str]]()
    for count in (count for count in COUNTS if count <= len(order)):
        shapes = order[:count]
        ratios = [each.over(each.restricted(shapes), each.mode) for each in settings]
        rows.append({"shapes": [list(actions[a]) for a in shapes], "ratios": [asdict(ratio) for ratio in ratios]})
        named = {str(each.timed.sampling): str(own) for each, own in zip(settings, ratios, strict=True)}
        listed = " ".join(str(actions[a]) for a in shapes[:4]) + " .." * (count > 4)
        cells.append({"shapes": str(count), **named, "the shapes": listed})
    caption = "replayed on the validation texts; ± one standard error over sources"
    console.print(table(cells, "Speed with few shapes of trees, over the selector with all of them", caption))
    modes = [each.restricted(order[: config.export.tiers]) for each in settings]
    return [{**entry, **mode.row()} for entry, mode in zip(entries, modes, strict=True)], rows
