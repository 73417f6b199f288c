"""Tiers: the selector restricted to few shapes of trees and lookups, as engines have a graph for each shape.

Shapes are chosen one at a time, from none on, for all sampling settings together: the one with which replay is fastest
beside those that are there. That is a greedy choice, so the best N shapes may be others. Not every shape is replayed:
an estimate says which few are worth it, the net tokens (`E - price T`, by the labels) that a shape adds at the roots
that the unrestricted selector comes to, where the restricted one would take it.

Legend: R roots, A actions.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from data_gen.models.sampling import Sampling
from pipelines.config import Config
from pipelines.data.recorded import timed
from pipelines.run import console
from selector.actions import choice_of
from selector.decision import Mode, net_tokens
from selector.latency import LatencyProfile
from selector.train.data import Texts, Timed
from selector.train.module import SelectorModule
from selector.train.replay import Ratio, Replayed, ratio_of_speeds
from selector.train.tuning import (
    Judged,
    Predictions,
    StaticTable,
    decide,
    replay_mode,
    sources,
)

COUNTS = (1, 2, 4, 8, 16, 32)
SHORTLIST = 4  # shapes that are replayed before one is chosen, beside the best static trees
CHAINS, TREES = "chains", "trees and lookups"


@dataclass(frozen=True)
class Setting:
    """One sampling setting of a selector on the texts that shapes are chosen by.

    Attributes:
        mode: how the unrestricted selector decides.
        opinions: its predictions.
        static: all trees without decisions.
    """

    mode: Mode
    timed: Timed
    predictions: Predictions
    policy: bool
    static: StaticTable

    @classmethod
    def of(cls, mode: Mode, timed: Timed, predictions: Predictions, policy: bool) -> Setting:
        return cls(mode, timed, predictions, policy, StaticTable.of(timed))

    def replayed(self, mode: Mode) -> Replayed:
        """The texts as a mode decodes them."""
        if not mode.feature_levels:
            return self.static.replayed(self.timed.space.index(mode.action))
        return replay_mode(self.timed, self.predictions, mode, self.policy)


@dataclass(frozen=True)
class Worth:
    """What shapes are worth at the roots of one setting, in shares of its tokens.

    Attributes:
        chosen_RA: by what the selector chooses among the shapes it has.
        net_RA: net tokens that the labels say it then gets, weighted by visits.
    """

    chosen_RA: Tensor
    net_RA: Tensor


def settings_of(
    config: Config, module: SelectorModule, texts: Texts, modes: list[Mode], profile: LatencyProfile
) -> list[Setting]:
    """The selector under each of its sampling settings."""
    found = []
    for mode in modes:
        mine = timed(texts, (mode.temperature, mode.top_p), config.train.verifier, profile)
        found.append(Setting.of(mode, mine, module.predictions(mine.texts, mode), not module.is_regressor))
    return found


@torch.no_grad()
def shapes_in_order(settings: list[Setting], candidates: list[int], count: int) -> list[int]:
    """Positions of up to so many shapes; the first n of them are the choice for n."""
    worths = [worth_of(setting) for setting in settings]
    whole = [setting.replayed(setting.mode).speed for setting in settings]
    best = [(torch.full((len(w.net_RA),), -torch.inf), torch.zeros(len(w.net_RA))) for w in worths]
    order: list[int] = []

    def speed(shape: int) -> float:
        """Over the unrestricted selector's, summed over the settings."""
        each = zip(settings, whole, strict=True)
        return sum(setting.replayed(_mode(setting, [*order, shape])).speed / own for setting, own in each)

    while len(order) < min(count, len(candidates)):
        left = torch.tensor(
            [a for a in candidates if a not in order and (order or a < len(settings[0].timed.space.trees))]
        )
        gain_A = torch.stack([_gains(w, *state) for w, state in zip(worths, best, strict=True)]).sum(0)[left]
        likely = {int(left[at]) for at in gain_A.topk(min(SHORTLIST, len(left))).indices}
        trees = left[left < len(settings[0].timed.space.trees)]
        likely |= {int(trees[setting.static.speeds()[trees].argmax()]) for setting in settings if len(trees)}
        order.append(max(sorted(likely), key=speed))
        best = [_with(w, *state, order[-1]) for w, state in zip(worths, best, strict=True)]
    return order


def _gains(worth: Worth, chosen_R: Tensor, net_R: Tensor) -> Tensor:
    """What each shape would add to those that are there, [A]."""
    taken_RA = worth.chosen_RA > chosen_R.unsqueeze(-1)
    return ((worth.net_RA - net_R.unsqueeze(-1)) * taken_RA).sum(0)


def _with(worth: Worth, chosen_R: Tensor, net_R: Tensor, at: int) -> tuple[Tensor, Tensor]:
    """The best shape of every root once another one is there."""
    taken_R = worth.chosen_RA[:, at] > chosen_R
    return torch.where(taken_R, worth.chosen_RA[:, at], chosen_R), torch.where(taken_R, worth.net_RA[:, at], net_R)


def worth_of(setting: Setting) -> Worth:
    """Of every shape at every root; where nothing is decided, and at first roots, a shape is taken for its mean."""
    timed, mode = setting.timed, setting.mode
    seconds_RA = timed.seconds(mode.feature_levels)
    whole = setting.replayed(mode) if mode.feature_levels else decide(timed, {}, mode).replayed(timed)
    share_R = (whole.visits_R / whole.tokens_X.sum()).float()
    net_RA = (timed.space.efficiencies(timed.survivals_RS) - mode.speed * seconds_RA) * share_R.unsqueeze(-1)
    static_A = torch.zeros(len(timed.space))
    static_A[: len(timed.space.trees)] = setting.static.speeds().float()
    if not mode.decides:
        return Worth(static_A.expand_as(net_RA), net_RA)
    scores_RA = setting.predictions[mode.feature_levels[-1]]
    if setting.policy:
        chosen_RA = scores_RA
    else:
        free = torch.ones(1, len(timed.space), dtype=torch.bool)
        speed, rho = (torch.tensor(value).view(1, 1) for value in (mode.speed, mode.rho))
        chosen_RA = net_tokens(scores_RA, seconds_RA, speed, rho, free)
    return Worth(torch.where(timed.texts.unknown_R.unsqueeze(-1), static_A, chosen_RA), net_RA)


def _mode(setting: Setting, shapes: list[int]) -> Mode:
    """The mode of some shapes alone: all of them may be chosen, and time keeps its price."""
    free = replace(setting.mode, allowed=())
    return replace(free.restricted(setting.timed.space, shapes, setting.static.speeds()), speed=free.speed)


def restricted(setting: Setting, shapes: list[int]) -> Judged:
    """The mode of some shapes alone, over the best static tree among them.

    Whether decisions pay was found with all trees, with a margin for chance. Where they did, they stay as long as they
    are faster than that static tree at all.
    """
    mode = _mode(setting, shapes)
    static = setting.static.replayed(setting.timed.space.index(mode.action))
    group_X = sources(setting.timed.texts)
    ratio = ratio_of_speeds(setting.replayed(mode), static, group_X)
    if ratio.value > 1:
        return Judged(mode, ratio)
    return Judged(mode.static_only(), ratio_of_speeds(static, static, group_X))


def candidates_of(settings: list[Setting], kind: str) -> list[int]:
    """Positions of the shapes of a kind."""
    space = settings[0].timed.space
    if kind == CHAINS:
        return [space.index(space.chain(length)) for length in range(space.depth + 1)]
    return list(range(len(space)))


def tiers(settings: list[Setting]) -> list[dict[str, Any]]:
    """What fewer shapes lose, for each kind and number: speed over the unrestricted selector's, setting by setting.

    Returns:
        rows of `kind`, `shapes`, and `ratios`, one for each setting.
    """
    whole = [setting.replayed(setting.mode) for setting in settings]
    rows = []
    for kind in (CHAINS, TREES):
        order = shapes_in_order(settings, candidates_of(settings, kind), max(COUNTS))
        for count in [count for count in COUNTS if count <= len(order)]:
            found = [restricted(setting, order[:count]) for setting in settings]
            ratios = [_over(*each) for each in zip(settings, found, whole, strict=True)]
            shapes = [list(settings[0].timed.space.actions[at]) for at in order[:count]]
            rows.append({"kind": kind, "shapes": shapes, "ratios": ratios})
    return rows


def _over(setting: Setting, judged: Judged, whole: Replayed) -> Ratio:
    return ratio_of_speeds(setting.replayed(judged.mode), whole, sources(setting.timed.texts))


def table_of(rows: list[dict[str, Any]], settings: list[Setting]) -> Table:
    """One line for each kind and number of shapes."""
    table = Table(title="Speed with few shapes of trees, over the selector with all of them", title_justify="left")
    samplings = [str(Sampling(setting.mode.temperature, setting.mode.top_p)) for setting in settings]
    for column in ("shapes", "of", *samplings, "the shapes"):
        table.add_column(column)
    for row in rows:
        shapes = " ".join(str(choice_of(shape)) for shape in row["shapes"][:4])
        more = " .." if len(row["shapes"]) > 4 else ""
        table.add_row(str(len(row["shapes"])), row["kind"], *map(str, row["ratios"]), shapes + more)
    table.caption = "chosen greedily and replayed on the validation texts; ± one standard error over sources"
    return table


def limited_modes(
    config: Config, module: SelectorModule, texts: Texts, entries: list[dict[str, Any]], profile: LatencyProfile
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The modes of an artefact with `export.tiers` shapes; and what fewer and more would lose, which is also shown."""
    assert config.export.tiers is not None
    settings = settings_of(config, module, texts, [Mode.of(entry) for entry in entries], profile)
    rows = tiers(settings)
    console.print(table_of(rows, settings))
    shapes = shapes_in_order(settings, candidates_of(settings, TREES), config.export.tiers)
    found = [restricted(setting, shapes) for setting in settings]
    modes = [{**entry, **judged.mode.row()} for entry, judged in zip(entries, found, strict=True)]
    return modes, [{**row, "ratios": [asdict(ratio) for ratio in row["ratios"]]} for row in rows]
