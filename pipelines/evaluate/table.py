"""From decoded prompts and replayed texts to the figures of an evaluation: one tidy table, which the terminal, the
report, MLflow and the pages read.

A measure of speed names its rival and, unless it is this machine's, the clock: "replayed over plain decoding". Decoded
ratios are paired, each prompt and round by itself (`pipelines.statistics`), and their bounds are those of a 95%
interval over sources; what was replayed has one standard error to each side. Tokens count up to the limit of a text.

Legend: X prompts, R rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas
import torch

from pipelines.config import Config
from pipelines.evaluate.assisted import ASSISTED
from pipelines.evaluate.methods import AT_ROOT, BEST_STATIC, PLAIN, SELECTOR, Method
from pipelines.evaluate.origins import shares
from pipelines.run import watched
from pipelines.statistics import paired, speed, with_interval
from selector.files import atomically
from selector.latency import LatencyProfile
from selector.sampling import Sampling
from selector.train.data import Texts
from selector.train.replay import Ratio, ratio_of_speeds

Rows = list[dict[str, Any]]  # of the journal
ALL = "all"  # kinds of prompts
ON = "replayed on"  # the clock of another machine
TOKENS_PER_SECOND, EFFICIENCY, SHARE = "tokens per second", "tokens per step", "share"
# by figure of the summary: the method that the selector's speed is compared with
FIGURES = {
    "ratio_vs_assisted_generation": ASSISTED,
    "ratio_vs_best_static_delayed": BEST_STATIC,
    "ratio_vs_static_traversal_wall": AT_ROOT,
}


class Figure(NamedTuple):
    """One figure. `low` and `high` are None where a single source leaves them open, or where there are none."""

    setting: str
    method: str
    kind: str
    measure: str
    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        return self.text(2)

    def text(self, digits: int) -> str:
        """The figure with its error or its interval."""
        if self.low is None or self.high is None:
            return f"{self.value:.{digits}f}"
        if self.measure.startswith("replayed"):
            return f"{self.value:.{digits}f} ±{self.high - self.value:.{digits}f}"
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def setting_name(temperature: float, top_p: float) -> str:
    """A sampling setting as the table has it."""
    return str(Sampling(temperature, top_p))


def decoded(rival: str) -> str:
    """The measure of a decoded speed over a rival's."""
    return f"decoded over {rival}"


def replayed(rival: str, clock: str = "") -> str:
    """The measure of a replayed speed over a rival's; `clock` is that of another machine."""
    return f"{f'{ON} {clock}' if clock else 'replayed'} over {rival}"


def replayed_figure(setting: str, method: str, measure: str, ratio: Ratio) -> Figure:
    """A replayed ratio."""
    known = ratio.error < float("inf")
    bounds = (ratio.value - ratio.error, ratio.value + ratio.error) if known else (None, None)
    return Figure(setting, method, ALL, measure, ratio.value, *bounds)


class Table:
    """Figures by setting, method, kind and measure."""

    def __init__(self, figures: Iterable[Figure]) -> None:
        self.figures = list(figures)
        self._at = {figure[:4]: figure for figure in self.figures}

    def get(self, setting: str, method: str, measure: str, kind: str = ALL) -> Figure | None:
        """A figure, or None where it was not measured."""
        return self._at.get((setting, method, kind, measure))

    def of(self, setting: str, method: str, measure: str, kind: str = ALL) -> Figure:
        """A figure; KeyError where it was not measured."""
        return self._at[setting, method, kind, measure]

    def methods(self, setting: str, measure: str) -> list[str]:
        """Those with this measure over all kinds, the largest figure first."""
        own = [each for each in self.figures if (each.setting, each.kind, each.measure) == (setting, ALL, measure)]
        return [each.method for each in sorted(own, key=lambda each: -each.value)]

    def kinds(self, setting: str) -> list[str]:
        """The kinds of prompts, `ALL` first."""
        own = {figure.kind for figure in self.figures if figure.setting == setting}
        return [ALL, *sorted(own - {ALL})]

    def write(self, path: Path) -> None:
        """Write a Parquet file whole or not at all."""
        with atomically(path) as partial:
            pandas.DataFrame(self.figures, columns=Figure._fields).to_parquet(partial, index=False)

    @classmethod
    def read(cls, path: Path) -> Table:
        """A written table."""
        rows = pandas.read_parquet(path).astype(object)
        return cls(map(Figure._make, rows.where(rows.notna(), None).itertuples(index=False, name=None)))


def replays(
    methods: Mapping[Sampling, list[Method]], texts: Texts, profile: LatencyProfile, clock: str = ""
) -> Iterator[Figure]:
    """The speed of every method over plain decoding and the best static tree, and of the selector over each of the
    others; `clock` names another machine's profile."""
    for setting, own in watched(methods.items(), f"replaying held-out texts{clock and f', {clock}'}"):
        mine = texts.setting_of(setting)
        found = {method.name: method.replay(mine, profile) for method in own}
        place = setting_name(setting.temperature, setting.top_p)
        for name, replay in found.items():
            for rival in found if name == SELECTOR else (PLAIN, BEST_STATIC):
                if rival != name:
                    ratio = ratio_of_speeds(replay, found[rival], mine.source_number_X)
                    yield replayed_figure(place, name, replayed(rival, clock), ratio)


def figures(rows: Rows) -> Iterator[Figure]:
    """The decoded figures of all methods, settings and kinds of prompts."""
    for setting in dict.fromkeys(row["setting"] for row in rows):
        here = [row for row in rows if row["setting"] == setting]
        kinds = sorted({row["kind"] for row in here})
        for kind in (ALL, *kinds) if len(kinds) > 1 else (ALL,):
            methods: dict[str, Rows] = {}
            for row in here:
                if kind in (ALL, row["kind"]):
                    methods.setdefault(row["method"], []).append(row)
            yield from _of_kind(setting, kind, methods)


def _of_kind(setting: str, kind: str, methods: dict[str, Rows]) -> Iterator[Figure]:
    for method, own in methods.items():
        at = setting, method, kind
        rounds_XR2 = torch.tensor([row["rounds"] for row in own], dtype=torch.float64)
        yield Figure(*at, TOKENS_PER_SECOND, *_bounded(with_interval(rounds_XR2.sum(1), _sources(own), speed)))
        yield Figure(*at, EFFICIENCY, total(own, "tokens") / total(own, "steps"))
        for origin, share in (shares(own) or {}).items():
            yield Figure(*at, f"{SHARE} {origin}", share)
        for rival in methods if method == SELECTOR else (PLAIN, BEST_STATIC):
            if rival != method:
                yield Figure(*at, decoded(rival), *over(own, methods[rival]))


def over(mine: Rows, other: Rows) -> tuple[float, float | None, float | None]:
    """The paired speed of one method over another on the prompts of its rows, and its 95% interval."""
    theirs = {row["prompt"]: row["rounds"] for row in other}
    both_X2R2 = torch.tensor([[row["rounds"], theirs[row["prompt"]]] for row in mine], dtype=torch.float64)
    mine_XR, other_XR = (both_X2R2[..., 0] / both_X2R2[..., 1]).unbind(1)
    return _bounded(paired((mine_XR / other_XR).log(), _sources(mine)))


def _sources(rows: Rows) -> torch.Tensor:
    names = sorted({row["source"] for row in rows})
    return torch.tensor([names.index(row["source"]) for row in rows])


def _bounded(figure: tuple[float, list[float]]) -> tuple[float, float | None, float | None]:
    value, (low, high) = figure
    return (value, low, high) if math.isfinite(high) else (value, None, None)


def summary(config: Config, table: Table, rows: Rows) -> dict[str, Any]:
    """The selector's speed over its rivals', as means over sampling settings and for each; and its decisions' share of
    the time. A bound or an error that a single source leaves open is None."""
    settings = [setting_name(each.temperature, each.top_p) for each in config.sampling]
    found: dict[str, Any] = {}
    for name, rival in FIGURES.items():
        ratios = [table.get(setting, SELECTOR, decoded(rival)) for setting in settings]
        if known := [ratio.value for ratio in ratios if ratio]:
            found[name] = sum(known) / len(known)
    if on_gpu := [
        each.value
        for each in table.figures
        if each.method == SELECTOR and each.measure.startswith(ON) and each.measure.endswith(f" over {AT_ROOT}")
    ]:
        found["ratio_vs_static_traversal_gpu_like"] = sum(on_gpu) / len(on_gpu)
    mine = [row for row in rows if row["method"] == SELECTOR]
    found["selector_time_share"] = total(mine, "select_seconds") / total(mine, "seconds")
    found["by_setting"] = []
    for setting, each in zip(settings, config.sampling, strict=True):
        wall, replay = (table.of(setting, SELECTOR, over_it(BEST_STATIC)) for over_it in (decoded, replayed))
        found["by_setting"].append(
            {
                **{"temperature": each.temperature, "top_p": each.top_p},
                **{"wall_ratio": wall.value, "wall_interval_95": [wall.low, wall.high]},
                "replay_ratio": replay.value,
                "replay_error": None if replay.high is None else replay.high - replay.value,
            }
        )
    return found


def entries(table: Table, rows: Rows) -> Rows:
    """One entry for each method and sampling setting: what it is, and its speed."""
    found: dict[tuple[str, str], Rows] = {}
    for row in rows:
        found.setdefault((row["setting"], row["method"]), []).append(row)
    listed = []
    for at, own in found.items():
        per_second = table.of(*at, TOKENS_PER_SECOND)
        entry = {key: own[0][key] for key in ("setting", "method", "verifier", "drafts", "temperature", "top_p")}
        entry |= {"tokens_per_second": per_second.value, "interval_95": [per_second.low, per_second.high]}
        entry |= {"block_efficiency": table.of(*at, EFFICIENCY).value, "tokens": total(own, "tokens")}
        listed.append(entry | {"prompts": len(own)})
    return listed


def total(rows: Rows, key: str) -> float:
    """The sum of an entry of all rows."""
    return sum(row[key] for row in rows)
