"""The figures of an evaluation as one tidy table. The terminal, the report, MLflow and the pages read it.

A measure of speed names its rival and, unless it is this machine's, the clock: "replayed over plain decoding". Bounds
of what was decoded are those of a 95% interval; what was replayed has one standard error to each side.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pandas

from data_gen.models.sampling import Sampling
from selector.files import atomically
from selector.train.replay import Ratio

ALL = "all"  # kinds of prompts
ON = "replayed on"  # a synthetic clock
TOKENS_PER_SECOND, EFFICIENCY, SHARE = "tokens per second", "tokens per step", "share"


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
    """The measure of a replayed speed over a rival's; `clock` is a synthetic one."""
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
