"""From decoded prompts and replayed texts to the figures of an evaluation: one tidy table, which
all that shows them reads.

Decoded speeds are geometric means over prompts and rounds, and so their ratios are paired. Their
bounds are those of a 95% interval over *sources* (files that prompts come from), which leaves out
clock noise, the training seed and the choice of the pair; what was replayed has one standard error
to each side. Tokens count up to the limit of a text.

Legend: X prompts, R rounds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import pandas
import torch
from scipy import stats
from torch import Tensor

from pipelines import terminal
from pipelines.config import Config
from pipelines.evaluate.methods import ASSISTED, AT_ROOT, BASES, BEST_STATIC, SELECTOR
from selector.actions import Action
from selector.files import atomically
from selector.sampling import Sampling
from selector.train.replay import Ratio

H = TypeVar("H", bound=Hashable)
Rows = list[dict[str, Any]]  # of decoded prompts, one for each method
Cells = dict[str, str]  # of one row of a table that is shown, by column
# where new tokens come from
DRAFTED = "drafted"
COPIED = "copied"
TARGET = "target"
ORIGINS = (DRAFTED, COPIED, TARGET)
HERE = "this machine"
ALL = "all"  # sampling settings, or kinds of prompts
# how a figure was found
DECODED = "decoded"
REPLAYED = "replayed"
# statistics
SPEED = "tokens per second"
EFFICIENCY = "tokens per step"
CORRELATION = "rank correlation"
SHARE = "share of the tokens: "  # and where they come from
# by figure of the summary: the method that the selector's speed is compared with
FIGURES = {
    "ratio_vs_assisted_generation": ASSISTED,
    "ratio_vs_best_static_delayed": BEST_STATIC,
    "ratio_vs_static_traversal_wall": AT_ROOT,
}
CONFIDENCE = 0.95


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
    factor = math.exp(stats.t.isf((1 - CONFIDENCE) / 2, len(names) - 1) * error)
    return value, [value / factor, value * factor]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One figure. Columns that do not apply to it have their defaults. `low` and `high` are None
    where a single source leaves them open, or where there are none."""

    setting: str = ALL  # of sampling
    batch: int = 1  # requests of a step
    is_mixed: bool = False  # whether the requests of a step have different texts
    kind: str = ALL  # of prompts
    method: str
    rival: str = ""  # where the value is a ratio, the method that it is over
    basis: str = REPLAYED
    clock: str = HERE  # the machine, where the basis is replay
    statistic: str = SPEED
    value: float
    low: float | None = None
    high: float | None = None

    @classmethod
    def of_ratio(cls, ratio: Ratio, **columns: Any) -> Figure:
        """A figure with one standard error to each side."""
        if not math.isfinite(ratio.error):
            return cls(**columns, value=ratio.value)
        low = ratio.value - ratio.error
        return cls(**columns, value=ratio.value, low=low, high=ratio.value + ratio.error)

    @property
    def ratio(self) -> Ratio:
        """The value with its standard error, of a figure that was not decoded."""
        return Ratio(self.value, math.inf if self.high is None else self.high - self.value)

    def text(self, digits: int = 2) -> str:
        """The value with its error or its interval."""
        if self.low is None or self.high is None:
            return f"{self.value:.{digits}f}"
        if self.basis == DECODED:
            return f"{self.value:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"
        return f"{self.value:.{digits}f} ±{self.high - self.value:.{digits}f}"

    @property
    def label(self) -> str:
        """What the value is, in words, but for the method, the setting and the kind of prompts."""
        words = self.basis
        if self.statistic != SPEED or not self.rival:
            words += f" {self.statistic}"
        if self.clock != HERE:
            words += f" on {self.clock}"
        if self.rival:
            words += f" over {self.rival}"
        return words


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


def sampling_name_of(temperature: float, top_p: float) -> str:
    return str(Sampling(temperature, top_p))


def quotient(sums_C: Tensor) -> Tensor:
    """The sum of a column over that of the next one, for `jackknifed`."""
    return sums_C[..., 0] / sums_C[..., 1]


class Table:
    """Figures, which are found by their columns."""

    def __init__(self, figures: Iterable[Figure]) -> None:
        self.figures = list(figures)
        self._by_columns = {}
        for figure in self.figures:
            self._by_columns[replace(figure, value=0.0, low=None, high=None)] = figure

    def get(self, **columns: Any) -> Figure | None:
        """The figure with these columns, and the defaults of all others."""
        return self._by_columns.get(Figure(**columns, value=0.0))

    def of(self, **columns: Any) -> Figure:
        """As `get`; KeyError where it was not measured."""
        return self._by_columns[Figure(**columns, value=0.0)]

    def select(self, **columns: object) -> list[Figure]:
        """All figures with these columns."""
        wanted = columns.items()
        return [figure for figure in self.figures if wanted <= vars(figure).items()]

    def kinds(self, **columns: object) -> list[str]:
        """The kinds of prompts of the figures with these columns, `ALL` first."""
        kinds = {figure.kind for figure in self.select(**columns)}
        return [ALL, *sorted(kinds - {ALL})]

    def write(self, path: Path) -> None:
        """Write a Parquet file whole or not at all."""
        names = [column.name for column in fields(Figure)]
        with atomically(path) as partial_path:
            pandas.DataFrame(map(vars, self.figures), columns=names).to_parquet(
                partial_path, index=False
            )

    @classmethod
    def read(cls, path: Path) -> Table:
        frame = pandas.read_parquet(path, dtype_backend="pyarrow").astype(object)
        rows = frame.where(frame.notna(), None).to_dict("records")
        return cls(Figure(**row) for row in rows)


def show_grids(cells: Iterable[tuple[str, str, str, str]]) -> None:
    """Print a table for each title, from the title, method, column and text of every cell."""
    grids: dict[str, dict[str, dict[str, str]]] = {}
    for title, method, column, text in cells:
        rows = grids.setdefault(title, {})
        rows.setdefault(method, {"method": method})[column] = text
    for title, rows in grids.items():
        terminal.console.print(terminal.table(list(rows.values()), title))


def correlations_in_words(table: Table) -> Iterator[str]:
    """What a network's predictions have to do with what happened; nothing without a regressor."""
    correlations = table.select(statistic=CORRELATION)
    if correlations:
        values = [
            f"{figure.value:+.2f} at {figure.setting} ({figure.method})" for figure in correlations
        ]
        yield (
            "The rank correlation of what the network predicts with what was accepted, over the "
            f"positions of held-out texts, is {', '.join(values)}: 1 would order them as they are, "
            "and 0 says nothing of them."
        )


def text_of(figure: Figure | None, digits: int = 2) -> str:
    """Empty where it was not measured."""
    return "" if figure is None else figure.text(digits)


def fastest_first(rows: Iterable[tuple[float, str, Cells]]) -> list[Cells]:
    """Rows of methods by their speed; one for those that draft the same and are exactly as
    fast."""
    cells_by_method: dict[tuple[float, str], Cells] = {}
    for speed, drafts, cells in sorted(rows, key=lambda row: -row[0]):
        earlier = cells_by_method.get((speed, drafts))
        if earlier:
            cells = {name: cell or cells[name] for name, cell in earlier.items()} | {
                "method": f"{earlier['method']} = {cells['method']}"
            }
        cells_by_method[speed, drafts] = cells
    return list(cells_by_method.values())


def figures(rows: Rows) -> Iterator[Figure]:
    """The figures of decoded prompts."""
    for sampling_name in dict.fromkeys(row["setting"] for row in rows):
        sampling_rows = [row for row in rows if row["setting"] == sampling_name]
        kinds = sorted({row["kind"] for row in sampling_rows})
        if len(kinds) == 1:
            kinds = []  # its figures are those of all kinds
        for kind in [ALL, *kinds]:
            rows_by_method: dict[str, Rows] = {}
            for row in sampling_rows:
                if kind in (ALL, row["kind"]):
                    rows_by_method.setdefault(row["method"], []).append(row)
            yield from _of_kind(rows_by_method, {"setting": sampling_name, "kind": kind})


def _of_kind(methods: dict[str, Rows], cell: dict[str, str]) -> Iterator[Figure]:
    for method, rows in methods.items():
        columns: dict[str, Any] = {**cell, "method": method, "basis": DECODED}
        yield paired_figure(rows, log_speeds(rows), **columns)
        efficiency = total(rows, "tokens") / total(rows, "steps")
        yield Figure(**columns, statistic=EFFICIENCY, value=efficiency)
        share_by_origin = shares(rows) or {}
        for origin, share in share_by_origin.items():
            yield Figure(**columns, statistic=SHARE + origin, value=share)
    for method, rival in with_rivals(methods, BASES, [SELECTOR]):
        columns = {**cell, "method": method, "rival": rival, "basis": DECODED}
        yield paired_figure(methods[method], log_ratios(methods[method], methods[rival]), **columns)


def with_rivals(
    methods: Iterable[str], bases: Collection[str], selectors: Collection[str]
) -> Iterator[tuple[str, str]]:
    """Every method with each of the `bases`, and the selectors with all methods, but none with
    itself."""
    methods = list(methods)
    for method in methods:
        for rival in methods if method in selectors else bases:
            if rival != method:
                yield method, rival


def log_speeds(rows: Rows) -> Tensor:
    """Logarithms of the tokens per second of every prompt in every round, float64 [X, R]."""
    rounds_XR2 = torch.tensor([row["rounds"] for row in rows], dtype=torch.float64)
    return (rounds_XR2[..., 0] / rounds_XR2[..., 1]).log()


def log_ratios(rows: Rows, others: Rows) -> Tensor:
    """Logarithms of a method's speed over another's, prompt by prompt and round by round, float64
    [X, R]."""
    other_by_prompt = {row["prompt"]: row for row in others}
    return log_speeds(rows) - log_speeds([other_by_prompt[row["prompt"]] for row in rows])


def numbered(labels: Sequence[H]) -> tuple[list[H], Tensor]:
    """The distinct labels in the order in which they come, and the number of each one's, int64."""
    number_of: dict[H, int] = {}
    for label in labels:
        number_of.setdefault(label, len(number_of))
    return list(number_of), torch.tensor([number_of[label] for label in labels])


def paired_figure(rows: Rows, logs_XR: Tensor, **columns: Any) -> Figure:
    """The geometric mean of what was measured on the prompts of some rows, and its 95%
    interval."""
    _, source_X = numbered([row["source"] for row in rows])
    value, (low, high) = paired(logs_XR, source_X)
    if not math.isfinite(high):
        return Figure(**columns, value=value)
    return Figure(**columns, value=value, low=low, high=high)


def summary(config: Config, table: Table, rows: Rows) -> dict[str, Any]:
    """The selector's speed over its rivals', as means over sampling settings and for each; and its
    decisions' share of the time. A bound or an error that a single source leaves open is None."""
    selector_rows = [row for row in rows if row["method"] == SELECTOR]
    seconds = total(selector_rows, "seconds")
    outcome: dict[str, Any] = {
        "selector_time_share": total(selector_rows, "select_seconds") / seconds
    }
    selector: dict[str, Any] = {"method": SELECTOR, "kind": ALL}
    ratios = {
        name: table.select(**selector, rival=rival, basis=DECODED)
        for name, rival in FIGURES.items()
    }
    at_root = table.select(**selector, rival=AT_ROOT, basis=REPLAYED)
    ratios["ratio_vs_static_traversal_gpu_like"] = [
        figure for figure in at_root if figure.clock != HERE
    ]
    for name, selected in ratios.items():
        if selected:
            outcome[name] = statistics.mean(figure.value for figure in selected)
    outcome["by_setting"] = []
    for sampling in config.sampling:
        sampling_name = sampling_name_of(sampling.temperature, sampling.top_p)
        columns = {"setting": sampling_name, "method": SELECTOR, "rival": BEST_STATIC}
        wall = table.of(**columns, basis=DECODED)
        replay = table.of(**columns, basis=REPLAYED)
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


def entries(table: Table, rows: Rows) -> Rows:
    """What `evaluation.json` says of every method that was decoded."""
    rows_by_method: dict[tuple[str, str], Rows] = {}
    for row in rows:
        rows_by_method.setdefault((row["setting"], row["method"]), []).append(row)
    listed = []
    for (sampling_name, method), method_rows in rows_by_method.items():
        columns = {"setting": sampling_name, "method": method, "basis": DECODED}
        speed = table.of(**columns)
        described = ("setting", "method", "verifier", "drafts", "temperature", "top_p")
        entry = {name: method_rows[0][name] for name in described}
        entry |= {
            "tokens_per_second": speed.value,
            "interval_95": [speed.low, speed.high],
            "block_efficiency": table.of(**columns, statistic=EFFICIENCY).value,
            "tokens": total(method_rows, "tokens"),
            "prompts": len(method_rows),
        }
        listed.append(entry)
    return listed


def total(rows: Rows, key: str) -> float:
    return sum(row[key] for row in rows)
