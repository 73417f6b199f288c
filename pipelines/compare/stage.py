"""Stage `compare`: the papers' tables on the run's traces (`make papers`).

DDTE (arXiv 2602.16994) compares verifiers with static trees from the root (Tables 2 and 3), with
delayed trees and with a selector (Tables 4 to 7). Here each of them decodes the same held-out texts
by exact replay, under every sampling setting, on this machine's step times, on those of
`evaluate.clocks`, and by the paper's own model of time (equation 11). Means are over *cells*, a
kind of prompts under a setting, and errors, one standard error, over sources.

A stopped stage goes on where it was: networks and replays are parts of it.

Legend: X texts, C cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from pipelines.compare.cells import (
    AT_ROOT,
    BY_STEPS,
    SELECTING,
    SELECTORS,
    TREES,
    WIDE_ROOT,
    replays,
)
from pipelines.compare.networks import IDEAL, Networks
from pipelines.config import Config
from pipelines.data.recorded import load_traces, samplings_of
from pipelines.evaluate.stage import other_profiles
from pipelines.evaluate.table import (
    ALL,
    EFFICIENCY,
    HERE,
    Figure,
    Table,
    numbered,
    quotient,
    show_grids,
    text_of,
)
from pipelines.latency.stage import load_profile
from pipelines.run import Stage
from pipelines.terminal import made, watched
from pipelines.tracking import describe, mlflow_run
from pipelines.train.result import inputs
from selector import tables
from selector.latency import LatencyProfile, Verification
from selector.schema import sha256
from selector.train.data import Texts
from selector.train.replay import Ratio, jackknifed, speed_ratio

Totals = Mapping[tuple[str, str], Tensor]  # as `replays` returns
LEAST = "least cell"  # among the kinds of a figure


def plan(config: Config) -> list[str]:
    replayed = f"{len(config.verifiers)} verifiers x {len(config.sampling)} sampling settings"
    return [
        f"{replayed} x {2 + len(config.evaluate.clocks)} machines: static trees, selectors, "
        "oracles, with networks"
    ]


def stage_of(config: Config) -> Stage:
    """The stage with what it depends on; InputError without a latency profile or traces."""
    profile = load_profile(config)
    depends = {
        **inputs(config, profile),
        "networks": config.evaluate.networks,
        "clocks": {path.stem: sha256(path) for path in other_profiles(config, profile)},
        "verifiers": list(config.verifiers),
    }
    return Stage("compare", config, depends, (config.folder / "papers.parquet",))


def run(config: Config) -> None:
    stage = stage_of(config)
    (path,) = stage.outputs
    if stage.begin():
        profile = load_profile(config)
        splits = load_traces(config)
        with mlflow_run(config, "compare") as mlflow:
            parts = stage.parts()
            stage.replace()
            profiles = all_profiles(config, profile)
            totals = kept_replays(Networks(config, profiles, splits, parts))
            figures = list(speeds(config, splits["test"], totals))
            Table(figures).write(path)
            mlflow.log_artifact(str(path))
            describe(mlflow, f"{len(figures)} figures: {path.name}")
        stage.finish()
    show(Table.read(path), config)


def kept_replays(networks: Networks) -> dict[tuple[str, str], Totals]:
    """What `replays` returns by verifier and sampling setting, with networks that are trained
    first."""
    config, parts = networks.config, networks.parts
    work: dict[tuple[str, str], Callable[[], Totals]] = {}
    for verifier in watched(config.verifiers, "training networks"):
        contenders = networks.of(verifier)
        for sampling in samplings_of(config):
            replay = partial(
                replays, verifier, sampling, networks.splits, networks.profiles, contenders
            )
            name = f"replay {verifier} {sampling}"
            work[verifier, str(sampling)] = partial(parts.get, name, replay)
    for _ in zip(
        watched(work, "replays"),
        made(lambda get: bool(get()), work, config.processes),
        strict=True,
    ):
        pass  # it is kept; each tensor that a process sent would take an open file
    return {key: get() for key, get in work.items()}


def all_profiles(config: Config, profile: LatencyProfile) -> dict[str, LatencyProfile]:
    """Latency profiles by name: this machine's, those of `evaluate.clocks`, and DDTE's equation 11,
    by which a pass takes as long for many tokens as for one, and nothing else takes any time."""
    profiles = {HERE: profile}
    for path, other_profile in other_profiles(config, profile).items():
        profiles[path.stem] = other_profile
    profiles[IDEAL] = replace(
        profile,
        drafting=tables.FREE,
        nucleus=0.0,
        lag=tables.FREE,
        draft=tables.Table([1], [1], [[0.1]]),
        target=tables.Table([1], [1], [[1.0]]),
        verify=dict.fromkeys(config.verifiers, Verification()),
        decide=dict.fromkeys(profile.decide, 0.0),
    )
    return profiles


@dataclass(frozen=True)
class Cells:
    """The cells by setting and kind of prompts; and of each text, setting by setting, the numbers
    of its cell and of its source, int64."""

    names: list[tuple[str, str]]
    cell_X: Tensor
    source_X: Tensor

    @classmethod
    def of(cls, config: Config, texts: Texts) -> Cells:
        cells: list[tuple[str, str]] = []
        sources: list[str] = []
        for sampling in samplings_of(config):
            sampling_texts = texts.of_sampling(sampling)
            cells += [(str(sampling), kind) for kind in sampling_texts.kind_X]
            sources += sampling_texts.source_X
        names, cell_X = numbered(cells)
        return cls(names, cell_X, numbered(sources)[1])

    def ratios(self, columns_XN: Tensor, **columns: Any) -> list[Figure]:
        """What `over_cells` averages, cell by cell."""
        figures = []
        for number, (sampling_name, kind) in enumerate(self.names):
            in_cell = self.cell_X == number
            ratio = jackknifed(columns_XN[in_cell], self.source_X[in_cell])
            figures.append(Figure.of_ratio(ratio, **columns, setting=sampling_name, kind=kind))
        return figures

    def mean(self, columns_XN: Tensor, **columns: Any) -> Figure:
        ratio = over_cells(columns_XN, self.cell_X, self.source_X)
        return Figure.of_ratio(ratio, **columns)


def speeds(
    config: Config, texts: Texts, totals: Mapping[tuple[str, str], Totals]
) -> Iterator[Figure]:
    """Tokens per step and per second of every verifier with every method, on each machine; and its
    speed over Traversal's static trees at the root, over its own, and of selectors over that of
    i.i.d. trees alone: means over cells, the least cell, and over Traversal each cell."""
    cells = Cells.of(config, texts)
    samplings = [str(sampling) for sampling in samplings_of(config)]
    columns_X3: dict[tuple[str, str, str], Tensor] = {}
    for name in config.verifiers:
        for machine, method in totals[name, samplings[0]]:
            columns_X3[machine, name, method] = torch.cat(
                [totals[name, sampling_name][machine, method] for sampling_name in samplings]
            )
    first_rival = rival_of(config)
    wide_rival = first_rival[0], WIDE_ROOT
    for (machine, name, method), totals_X3 in columns_X3.items():
        columns = {"method": method_of(name, method), "clock": machine}
        if machine == HERE:
            yield cells.mean(totals_X3[:, ::2], **columns, statistic=EFFICIENCY)
        if method in BY_STEPS.values():
            continue
        yield cells.mean(totals_X3[:, :2], **columns)
        rivals = [first_rival, (name, AT_ROOT)]
        if (machine, *wide_rival) in columns_X3:
            rivals.append(wide_rival)
        if method in SELECTING:
            rivals.append((name, SELECTORS[TREES]))
        for rival in dict.fromkeys(rivals):
            columns["rival"] = method_of(*rival)
            both_X4 = torch.cat([totals_X3[:, :2], columns_X3[machine, *rival][:, :2]], dim=1)
            yield cells.mean(both_X4, **columns)
            ratios = cells.ratios(both_X4, **columns)
            least = min(ratios, key=lambda figure: figure.value)
            yield replace(least, setting=ALL, kind=LEAST)
            if rival == first_rival:
                yield from ratios


def over_cells(columns_XN: Tensor, cell_X: Tensor, source_X: Tensor) -> Ratio:
    """Mean over cells of `sum(column 0) / sum(column 1)`, with four columns over
    `sum(column 2) / sum(column 3)`, and its standard error by the jackknife over sources. A cell
    whose only source is left out does not count."""
    spread_XCN = torch.zeros(
        len(columns_XN), int(cell_X.max()) + 1, columns_XN.shape[1], dtype=torch.float64
    )
    spread_XCN[torch.arange(len(columns_XN)), cell_X] = columns_XN.double()

    def mean(sums_C: Tensor) -> Tensor:
        sums_CN = sums_C.unflatten(-1, spread_XCN.shape[1:])
        if sums_CN.shape[-1] == 4:
            return speed_ratio(sums_CN).nanmean(-1)
        return quotient(sums_CN).nanmean(-1)

    return jackknifed(spread_XCN.flatten(1), source_X, mean)


def show(figures: Table, config: Config) -> None:
    """Print tokens per step, and speeds over the rival's on each machine; the other figures are in
    the file."""
    rival = method_of(*rival_of(config))
    means = [
        figure
        for figure in figures.select(setting=ALL, kind=ALL)
        if figure.statistic == EFFICIENCY or figure.rival == rival
    ]
    cells = []
    for mean in sorted(means, key=lambda figure: (figure.label, -figure.value)):
        least = figures.get(method=mean.method, rival=mean.rival, clock=mean.clock, kind=LEAST)
        cells.append((mean.label, mean.method, "mean", mean.text(3)))
        cells.append((mean.label, mean.method, "least cell", text_of(least, 3)))
    show_grids(cells)


def rival_of(config: Config) -> tuple[str, str]:
    """The verifier and the method that all speeds are over."""
    verifier = "traversal" if "traversal" in config.verifiers else config.verifiers[0]
    return verifier, AT_ROOT


def method_of(verifier: str, method: str) -> str:
    return f"{verifier}: {method}"
