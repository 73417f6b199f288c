"""From decoded prompts and replayed texts to the figures of an evaluation: one tidy table, which
all that shows them reads.

A measure of speed names its rival and, unless it is this machine's, the clock: "replayed over plain
decoding". Decoded speeds are geometric means over prompts and rounds, and so their ratios are
paired. Their bounds are those of a 95% interval over *sources* (files that prompts come from),
which leaves out clock noise, the training seed and the choice of the pair; what was replayed has
one standard error to each side. Tokens count up to the limit of a text.

Legend: X prompts, R rounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pandas
import torch
from scipy import stats
from torch import Tensor

from pipelines.config import Config
from pipelines.evaluate.methods import ASSISTED, AT_ROOT, BEST_STATIC, PLAIN, SELECTOR, Method
from pipelines.run import watched
from selector.actions import Action
from selector.files import atomically
from selector.latency import LatencyProfile
from selector.sampling import Sampling
from selector.train.data import Texts
from selector.train.replay import Ratio, ratio_of_speeds

Rows = list[dict[str, Any]]  # of the journal
# where new tokens come from
DRAFTED = "drafted"
COPIED = "copied"
TARGET = "target"
ORIGINS = (DRAFTED, COPIED, TARGET)
ALL = "all"  # kinds of prompts
ON = "replayed on"  # the clock of another machine
TOKENS_PER_SECOND = "tokens per second"
EFFICIENCY = "tokens per step"
SHARE = "share"
# by figure of the summary: the method that the selector's speed is compared with
FIGURES = {
    "ratio_vs_assisted_generation": ASSISTED,
    "ratio_vs_best_static_delayed": BEST_STATIC,
    "ratio_vs_static_traversal_wall": AT_ROOT,
}
LEVEL = 0.95


def paired(logs_XR: Tensor, source_X: Tensor) -> tuple[float, list[float]]:
    """The geometric mean of speeds or ratios that were each measured on one prompt in one round,
    and its 95% interval: a t-interval of the mean logarithm over sources; 0 and infinity for a
    single source, unless the mean is exactly 1.

    `logs_XR` are their logarithms. A prompt counts with the mean of its rounds, and a source with
    the mean of its prompts. `source_X` are int64.
    """
    names, group_X = source_X.unique(return_inverse=True)
    sums_G = torch.zeros(len(names), dtype=torch.float64).index_add_(
        0, group_X, logs_XR.double().mean(-1)
    )
    means_G = sums_G / group_X.bincount()
    value = math.exp(means_G.mean())
    if len(names) == 1:
        if value == 1:
            return value, [1.0, 1.0]
        return value, [0.0, math.inf]
    error = float(means_G.std()) / math.sqrt(len(names))
    factor = math.exp(stats.t.isf((1 - LEVEL) / 2, len(names) - 1) * error)
    return value, [value / factor, value * factor]


class Figure(NamedTuple):
    """One figure. `low` and `high` are None where a single source leaves them open, or where there
    are none."""

    setting: str
    method: str
    kind: str
    measure: str
    value: float
    low: float | None = None
    high: float | None = None

    def __str__(self) -> str:
        return self.text(2)

    @property
    def ratio(self) -> Ratio:
        """Of a figure with a standard error."""
        return Ratio(self.value, math.inf if self.high is None else self.high - self.value)

    def text(self, digits: int) -> str:
        """The figure with its error or its interval."""
        if self.low is None or self.high is None:
            return f"{self.value:.{digits}f}"
        if self.measure.startswith(("replayed", "optimal", "drafted", "labelled")):
            return f"{self.value:.{digits}f} ±{self.high - self.value:.{digits}f}"
        return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


def shares(rows: Rows) -> dict[str, float] | None:
    """The share of the new tokens by where they come from: drafted and accepted, copied and
    accepted, or added by the target, one at the end of each step. What a last step yields beyond
    the limit is left out. None without steps."""
    counts = dict.fromkeys(ORIGINS, 0)
    for row in rows:
        places = pairwise([*row["step_roots"], row["block_tokens"]])
        for values, (begin, end) in zip(row["drafted"], places, strict=True):
            accepted = COPIED if Action.of(values).copies else DRAFTED
            counts[accepted] += max(0, min(end - 1, row["tokens"]) - begin)
            if end <= row["tokens"]:
                counts[TARGET] += 1
    total = sum(counts.values())
    if not total:
        return None
    return {origin: count / total for origin, count in counts.items()}


def setting_name(temperature: float, top_p: float) -> str:
    return str(Sampling(temperature, top_p))


def decoded(rival: str) -> str:
    """The measure of a decoded speed over a rival's."""
    return f"decoded over {rival}"


def replayed(rival: str, clock: str = "") -> str:
    """The measure of a replayed speed over a rival's; `clock` is that of another machine."""
    if clock:
        return f"{ON} {clock} over {rival}"
    return f"replayed over {rival}"


def replayed_figure(
    setting: str, method: str, measure: str, ratio: Ratio, kind: str = ALL
) -> Figure:
    if not math.isfinite(ratio.error):
        return Figure(setting, method, kind, measure, ratio.value)
    low = ratio.value - ratio.error
    high = ratio.value + ratio.error
    return Figure(setting, method, kind, measure, ratio.value, low, high)


def compared(
    setting: str,
    replays: Mapping[str, Any],
    over: Callable[[Any, Any], Ratio],
    bases: Collection[str],
    kind: str = ALL,
    clock: str = "",
) -> Iterator[Figure]:
    """The replayed speed of every method over each of the `bases`, and of the selectors over every
    method."""
    for name, replay in replays.items():
        rivals: Collection[str] = replays if name.startswith(SELECTOR) else bases
        for rival in rivals:
            if rival != name:
                ratio = over(replay, replays[rival])
                yield replayed_figure(setting, name, replayed(rival, clock), ratio, kind)


class Table:
    """Figures by setting, method, kind and measure."""

    def __init__(self, figures: Iterable[Figure]) -> None:
        self.figures = list(figures)
        self._at = {figure[:4]: figure for figure in self.figures}

    def get(self, setting: str, method: str, measure: str, kind: str = ALL) -> Figure | None:
        return self._at.get((setting, method, kind, measure))

    def of(self, setting: str, method: str, measure: str, kind: str = ALL) -> Figure:
        """A figure; KeyError where it was not measured."""
        return self._at[setting, method, kind, measure]

    def methods(self, setting: str, measure: str) -> list[str]:
        """Those with this measure over all kinds, the largest figure first."""
        measured = [
            figure
            for figure in self.figures
            if (figure.setting, figure.kind, figure.measure) == (setting, ALL, measure)
        ]
        return [figure.method for figure in sorted(measured, key=lambda figure: -figure.value)]

    @property
    def settings(self) -> list[str]:
        return list(dict.fromkeys(figure.setting for figure in self.figures))

    def kinds(self, setting: str) -> list[str]:
        """The kinds of prompts, `ALL` first."""
        kinds = {figure.kind for figure in self.figures if figure.setting == setting}
        return [ALL, *sorted(kinds - {ALL})]

    def write(self, path: Path) -> None:
        """Write a Parquet file whole or not at all."""
        with atomically(path) as partial_path:
            pandas.DataFrame(self.figures, columns=Figure._fields).to_parquet(
                partial_path, index=False
            )

    @classmethod
    def read(cls, path: Path) -> Table:
        frame = pandas.read_parquet(path).astype(object)
        frame = frame.where(frame.notna(), None)
        return cls(map(Figure._make, frame.itertuples(index=False, name=None)))


def replays(
    methods: Mapping[Sampling, list[Method]], texts: Texts, profile: LatencyProfile, clock: str = ""
) -> Iterator[Figure]:
    """The speed of every method over plain decoding and the best static tree, and of the selector
    over each of the others; `clock` names another machine's profile."""
    words = "replaying held-out texts"
    if clock:
        words += f", {clock}"
    for setting, setting_methods in watched(methods.items(), words):
        setting_texts = texts.setting_of(setting)
        replay_by_method = {
            method.name: method.replay(setting_texts, profile) for method in setting_methods
        }
        speed_over = partial(ratio_of_speeds, source_X=setting_texts.source_number_X)
        name = setting_name(setting.temperature, setting.top_p)
        yield from compared(name, replay_by_method, speed_over, (PLAIN, BEST_STATIC), clock=clock)


def figures(rows: Rows) -> Iterator[Figure]:
    for setting in dict.fromkeys(row["setting"] for row in rows):
        setting_rows = [row for row in rows if row["setting"] == setting]
        kinds = sorted({row["kind"] for row in setting_rows})
        if len(kinds) == 1:
            kinds = []  # its figures are those of all kinds
        for kind in [ALL, *kinds]:
            rows_by_method: dict[str, Rows] = {}
            for row in setting_rows:
                if kind in (ALL, row["kind"]):
                    rows_by_method.setdefault(row["method"], []).append(row)
            yield from _of_kind(setting, kind, rows_by_method)


def _of_kind(setting: str, kind: str, methods: dict[str, Rows]) -> Iterator[Figure]:
    for method, rows in methods.items():
        at = setting, method, kind
        rounds_XR2 = torch.tensor([row["rounds"] for row in rows], dtype=torch.float64)
        tokens_XR, seconds_XR = rounds_XR2.unbind(-1)
        yield Figure(*at, TOKENS_PER_SECOND, *_interval((tokens_XR / seconds_XR).log(), rows))
        yield Figure(*at, EFFICIENCY, total(rows, "tokens") / total(rows, "steps"))
        share_by_origin = shares(rows) or {}
        for origin, share in share_by_origin.items():
            yield Figure(*at, f"{SHARE} {origin}", share)
        rivals: Collection[str] = methods if method == SELECTOR else (PLAIN, BEST_STATIC)
        for rival in rivals:
            if rival != method:
                yield Figure(*at, decoded(rival), *over(rows, methods[rival]))


def over(mine: Rows, other: Rows) -> tuple[float, float | None, float | None]:
    """The paired speed of one method over another on the prompts of its rows, and its 95%
    interval."""
    theirs = {row["prompt"]: row["rounds"] for row in other}
    both_X2R2 = torch.tensor(
        [[row["rounds"], theirs[row["prompt"]]] for row in mine], dtype=torch.float64
    )
    speed_XR, other_speed_XR = (both_X2R2[..., 0] / both_X2R2[..., 1]).unbind(1)
    return _interval((speed_XR / other_speed_XR).log(), mine)


def _interval(logs_XR: Tensor, rows: Rows) -> tuple[float, float | None, float | None]:
    names = sorted({row["source"] for row in rows})
    source_X = torch.tensor([names.index(row["source"]) for row in rows])
    value, (low, high) = paired(logs_XR, source_X)
    if math.isfinite(high):
        return value, low, high
    return value, None, None


def summary(config: Config, table: Table, rows: Rows) -> dict[str, Any]:
    """The selector's speed over its rivals', as means over sampling settings and for each; and its
    decisions' share of the time. A bound or an error that a single source leaves open is None."""
    selector_rows = [row for row in rows if row["method"] == SELECTOR]
    seconds = total(selector_rows, "seconds")
    outcome: dict[str, Any] = {
        "selector_time_share": total(selector_rows, "select_seconds") / seconds
    }
    for name, values in _ratios(table).items():
        if values:
            outcome[name] = statistics.mean(values)
    outcome["by_setting"] = []
    for sampling in config.sampling:
        setting = setting_name(sampling.temperature, sampling.top_p)
        wall = table.of(setting, SELECTOR, decoded(BEST_STATIC))
        replay = table.of(setting, SELECTOR, replayed(BEST_STATIC))
        outcome["by_setting"].append(
            {
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "wall_ratio": wall.value,
                "wall_interval_95": [wall.low, wall.high],
                "replay_ratio": replay.value,
                "replay_error": None if replay.high is None else replay.high - replay.value,
            }
        )
    return outcome


def _ratios(table: Table) -> dict[str, list[float]]:
    """The selector's speed over its rivals' under each setting, by figure of the summary."""
    selector_figures = [
        figure for figure in table.figures if (figure.method, figure.kind) == (SELECTOR, ALL)
    ]
    ratios: dict[str, list[float]] = {}
    for name, rival in FIGURES.items():
        measure = decoded(rival)
        ratios[name] = [figure.value for figure in selector_figures if figure.measure == measure]
    ratios["ratio_vs_static_traversal_gpu_like"] = [
        figure.value
        for figure in selector_figures
        if figure.measure.startswith(ON) and figure.measure.endswith(f" over {AT_ROOT}")
    ]
    return ratios


def entries(table: Table, rows: Rows) -> Rows:
    rows_by_method: dict[tuple[str, str], Rows] = {}
    for row in rows:
        rows_by_method.setdefault((row["setting"], row["method"]), []).append(row)
    listed = []
    for at, method_rows in rows_by_method.items():
        per_second = table.of(*at, TOKENS_PER_SECOND)
        first_row = method_rows[0]
        listed.append(
            {
                "setting": first_row["setting"],
                "method": first_row["method"],
                "verifier": first_row["verifier"],
                "drafts": first_row["drafts"],
                "temperature": first_row["temperature"],
                "top_p": first_row["top_p"],
                "tokens_per_second": per_second.value,
                "interval_95": [per_second.low, per_second.high],
                "block_efficiency": table.of(*at, EFFICIENCY).value,
                "tokens": total(method_rows, "tokens"),
                "prompts": len(method_rows),
            }
        )
    return listed


def total(rows: Rows, key: str) -> float:
    return sum(row[key] for row in rows)
