"""Stage `compare`: the papers' tables on the run's traces (`make papers`).

DDTE (arXiv 2602.16994) compares verifiers with static trees from the root (Tables 2 and 3), with
delayed trees and with a selector (Tables 4 to 7). Here each of them decodes the same held-out texts
by exact replay, under every sampling setting, on this machine's step times, on those of
`evaluate.clocks`, and by the paper's own model of time (equation 11). Means are over *cells*, a
kind of prompts under a setting, and errors, one standard error, over sources.

A stopped stage goes on where it was: networks and replays are parts of it.

Legend: X texts, C cells, D depth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import pandas
import torch
from matplotlib.figure import Figure as Picture
from torch import Tensor

from pipelines.compare.cells import (
    BOTH,
    BY_STEPS,
    HERE,
    OF,
    RIVAL,
    TREES,
    Network,
    asked,
    of_verifier,
    replays,
)
from pipelines.compare.roots import drafted
from pipelines.config import Config
from pipelines.data.recorded import load_traces, settings_of
from pipelines.evaluate.stage import clocks
from pipelines.evaluate.table import ALL, Figure, Table, replayed_figure
from pipelines.latency.stage import load_profile
from pipelines.pair.stage import load_pair
from pipelines.run import Parts, Stage, console, made, table, watched
from pipelines.tracking import describe, mlflow_run
from pipelines.train.fitting import OWN, fitted, module_of, seen
from pipelines.train.judging import statics
from pipelines.train.result import inputs
from pipelines.train.stage import trained
from selector import latency
from selector.actions import Action
from selector.files import atomically
from selector.latency import LatencyProfile, Verification
from selector.schema import sha256
from selector.train.data import Texts, Timed
from selector.train.module import SelectorModule
from selector.train.replay import Ratio, jackknifed, speed_ratio

T = TypeVar("T")
Totals = Mapping[tuple[str, str], Tensor]  # as `replays` returns
IDEAL = "eq. 11, draft pass 1/10"
# words of the measures that are only in the file
NOT_SHOWN = ("least cell", "its own", "per second", "its selector")


def plan(config: Config) -> list[str]:
    replayed = f"{len(config.verifiers)} verifiers x {len(config.sampling)} sampling settings"
    return [
        f"{replayed} x {2 + len(config.evaluate.clocks)} clocks: static trees, selectors, "
        "oracles, with networks"
    ]


def stage_of(config: Config) -> Stage:
    """The stage with what it depends on; InputError without a latency profile or traces."""
    profile = load_profile(config)
    depends = {
        **inputs(config, profile),
        "clocks": {path.stem: sha256(path) for path in clocks(config, profile)},
        "verifiers": list(config.verifiers),
    }
    outputs = config.folder / "papers.parquet", config.folder / "figure1.png"
    return Stage("compare", config, depends, outputs)


def run(config: Config) -> None:
    stage = stage_of(config)
    table_path, picture_path = stage.outputs
    labelled = config.verifiers[0]
    if stage.begin():
        pair = load_pair(config)
        profile = load_profile(config, pair)
        splits = load_traces(config)
        with mlflow_run(config, "compare") as mlflow:
            parts = stage.parts()
            stage.replace()
            profiles = all_clocks(config, profile)
            totals = kept_replays(config, profiles, splits, parts)
            drafts = parts.get(
                "drafts", lambda: [tuple(figure) for figure in drafted(config, pair, labelled)]
            )
            figures = [*by_depth(config, splits["test"]), *map(Figure._make, drafts)]
            figures += speeds(config, splits["test"], totals)
            Table(figures).write(table_path)
            draw(Table(figures), config, picture_path)
            for path in stage.outputs:
                mlflow.log_artifact(str(path))
            describe(mlflow, f"{len(figures)} figures: {table_path.name}")
        stage.finish()
    show(Table.read(table_path))


def kept_replays(
    config: Config,
    profiles: Mapping[str, LatencyProfile],
    splits: Mapping[str, Texts],
    parts: Parts,
) -> dict[tuple[str, str], Totals]:
    """What `replays` returns by verifier and sampling setting, with networks that are trained
    first."""
    networks = asked(config.verifiers, config.data.features)
    modules = {
        regressor: network(config, regressor, splits, parts)
        for regressor in watched(networks, "training regressors")
    }
    # bottom-up verifiers have no policy
    with_policy = [name for name in config.verifiers if (name, BOTH) not in networks]
    policies: dict[tuple[str, str], SelectorModule] = {}
    for name, clock in watched(list(product(with_policy, profiles)), "training policies"):
        policies[name, clock] = policy_of_ddte(
            config,
            modules[Network(name, TREES)],
            name,
            clock,
            profiles[clock],
            splits,
            parts,
        )
    work: dict[tuple[str, str], Callable[[], Any]] = {}
    for name, sampling in product(config.verifiers, settings_of(config)):
        verifier_modules = {
            regressor: module for regressor, module in modules.items() if regressor.verifier == name
        }
        policy_by_clock = {
            clock: policy for (verifier, clock), policy in policies.items() if verifier == name
        }
        replay = partial(
            replays, name, sampling, splits, profiles, verifier_modules, policy_by_clock
        )
        work[name, str(sampling)] = partial(parts.get, f"replay {name} {sampling}", replay)
    for _ in zip(
        watched(work, "replays"),
        made(lambda get: bool(get()), work, config.processes),
        strict=True,
    ):
        pass  # it is kept; each tensor that a process sent would take an open file
    return {key: get() for key, get in work.items()}


def kept_module(
    parts: Parts,
    name: str,
    module: SelectorModule,
    train: Callable[[Path, str], SelectorModule],
) -> SelectorModule:
    """An untrained module as `train` returns it, which is given a folder and an MLflow run."""
    import mlflow  # takes seconds

    def make() -> dict[str, Tensor]:
        with mlflow.start_run(run_name=name, nested=True) as nested:
            return train(parts.folder / name, nested.info.run_id).state_dict()

    module.load_state_dict(parts.get(name, make))
    return module.eval()


def all_clocks(config: Config, profile: LatencyProfile) -> dict[str, LatencyProfile]:
    """Latency profiles by name: this machine's, those of `evaluate.clocks`, and DDTE's equation 11,
    by which a pass takes as long for many tokens as for one, and nothing else takes any time."""
    profiles = {HERE: profile}
    for path, clock_profile in clocks(config, profile).items():
        profiles[path.stem] = clock_profile
    profiles[IDEAL] = replace(
        profile,
        drafting=latency.FREE,
        nucleus=0.0,
        lag=latency.FREE,
        draft=latency.Table([1], [1], [[0.1]]),
        target=latency.Table([1], [1], [[1.0]]),
        verify=dict.fromkeys(config.verifiers, Verification()),
        decide=dict.fromkeys(profile.decide, 0.0),
    )
    return profiles


def network(
    config: Config, own: Network, splits: Mapping[str, Texts], parts: Parts
) -> SelectorModule:
    module = module_of(
        config, "regressor", *seen(own.level, splits["train"]), space=OF[own.actions].to_json()
    )
    train = partial(fitted, config, module, of_verifier(splits, *own), own.verifier, [])
    return kept_module(parts, ", ".join(own), module, train)


@torch.no_grad()
def with_expected(
    splits: Mapping[str, Texts], module: SelectorModule, verifier: str
) -> dict[str, Texts]:
    """The texts with a regressor's survivals for labels, which are of one text: the logarithm
    punishes their noise."""
    relabelled = of_verifier(splits, verifier, TREES)
    for split in OWN:
        expected = torch.cat(
            [log_survivals.exp().half() for log_survivals in module.outputs(relabelled[split])]
        )
        relabelled[split] = replace(relabelled[split], survivals={verifier: expected})
    return relabelled


def policy_of_ddte(
    config: Config,
    regressor: SelectorModule,
    name: str,
    clock: str,
    profile: LatencyProfile,
    splits: Any,
    parts: Parts,
) -> SelectorModule:
    """Equation 12, trained for one clock and a verifier's labels, with the hidden states that the
    traces have."""
    verifier_config = config.model_copy(
        update={"train": config.train.model_copy(update={"verifier": name})}
    )
    module = module_of(
        verifier_config,
        "policy",
        *seen(config.data.features, splits["train"]),
        space=OF[TREES].to_json(),
    )

    def train(folder: Path, run_id: str) -> SelectorModule:
        expected = with_expected(splits, regressor, name)
        timed: dict[str, list[Timed]] = {}
        for split in OWN:
            timed[split] = [
                Timed(expected[split].setting_of(sampling), name, profile)
                for sampling in settings_of(config)
            ]
        bases = statics(timed["train"])
        return trained(
            verifier_config, module, expected, timed["validation"], bases, folder, run_id
        )

    return kept_module(parts, f"{name}, policy, {clock}", module, train)


def speeds(
    config: Config, texts: Texts, parts: Mapping[tuple[str, str], Totals]
) -> Iterator[Figure]:
    """Tokens per step and per second of every verifier with every method, on each clock; and its
    speed over Traversal's static trees at the root, over its own, and of selectors over that of
    i.i.d. trees alone: means over cells, the least cell, and over Traversal each cell."""
    names, cell_X, source_X = _cells(config, texts)
    settings = [str(sampling) for sampling in settings_of(config)]
    sums: dict[tuple[str, str, str], Tensor] = {}
    for name in config.verifiers:
        for clock, method in parts[name, settings[0]]:
            columns_3X = [parts[name, setting][clock, method] for setting in settings]
            sums[clock, name, method] = torch.cat(columns_3X, dim=1).T
    rival = RIVAL
    if RIVAL[0] not in config.verifiers:
        rival = config.verifiers[0], RIVAL[1]
    for (clock, name, method), totals_X3 in sums.items():
        label = f"{name}: {method}"
        if clock == HERE:
            per_step = over_cells(totals_X3[:, ::2], cell_X, source_X)
            yield replayed_figure(ALL, label, "replayed tokens per step", per_step)
        if method.endswith(BY_STEPS):
            continue
        speed = over_cells(totals_X3[:, :2], cell_X, source_X)
        yield replayed_figure(ALL, label, f"replayed tokens per second on {clock}", speed)
        rivals = {" ".join(rival): rival, "its own root tree": (name, RIVAL[1])}
        if method.startswith("selector"):
            rivals["its selector of trees"] = name, f"selector, {TREES}"
        for words, other in rivals.items():
            measure = f"replayed on {clock} over {words}"
            columns_X4 = torch.cat([totals_X3[:, :2], sums[clock, *other][:, :2]], dim=1)
            yield replayed_figure(ALL, label, measure, over_cells(columns_X4, cell_X, source_X))
            ratios = []
            for number in range(len(names)):
                in_cell = cell_X == number
                ratios.append(jackknifed(columns_X4[in_cell], source_X[in_cell]))
            if other == rival:
                for (setting, kind), ratio in zip(names, ratios, strict=True):
                    yield replayed_figure(setting, label, measure, ratio, kind)
            least = min(ratios, key=lambda ratio: ratio.value)
            yield replayed_figure(ALL, label, f"{measure}, least cell", least)


def _cells(config: Config, texts: Texts) -> tuple[list[tuple[str, str]], Tensor, Tensor]:
    """The cells, by setting and kind of prompts; and of each text, one setting after another, the
    number of its cell and of its source, int64 [X]."""
    cells: list[tuple[str, str]] = []
    sources: list[str] = []
    for sampling in settings_of(config):
        setting_texts = texts.setting_of(sampling)
        cells += [(str(sampling), kind) for kind in setting_texts.kind_X]
        sources += setting_texts.source_X
    names = list(dict.fromkeys(cells))
    source_names = sorted(set(sources))
    cell_X = torch.tensor([names.index(cell) for cell in cells])
    source_X = torch.tensor([source_names.index(source) for source in sources])
    return names, cell_X, source_X


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
        return (sums_CN[..., 0] / sums_CN[..., 1]).nanmean(-1)

    return jackknifed(spread_XCN.flatten(1), source_X, mean)


def by_depth(config: Config, texts: Texts) -> Iterator[Figure]:
    """DDTE, Figure 1: the acceptance at each depth of K branches from the root, given that the
    depth above was accepted; over all roots of the held-out texts, by setting and verifier."""
    space = OF[TREES]
    for sampling, name in product(settings_of(config), config.verifiers):
        setting_texts = of_verifier({"": texts}, name, TREES)[""].setting_of(sampling)
        labels_RS = setting_texts.labels(name, slice(None), space)
        # the last column counts the roots, which are reached for sure
        reached_RS = torch.nn.functional.pad(labels_RS.double(), (0, 1), value=1.0)
        sums_XS = torch.zeros(len(setting_texts), reached_RS.shape[1], dtype=torch.float64)
        sums_XS.index_add_(0, setting_texts.text_R, reached_RS)
        for K in range(1, space.max_K + 1):
            action = space.chain(space.max_L2)
            if K > 1:
                action = Action(K, 0, space.max_L2)
            paths = space.survival_of_AD[space.index(action)][: space.max_L2].tolist()
            above = -1  # the root's column
            for depth, column in enumerate(paths, 1):
                ratio = jackknifed(
                    sums_XS[:, [column, above]],
                    setting_texts.source_number_X,
                    lambda sums: sums[..., 0] / sums[..., 1],
                )
                above = column
                measure = f"replayed acceptance at depth {depth}, K={K}"
                yield replayed_figure(str(sampling), name, measure, ratio)


def draw(found: Table, config: Config, path: Path) -> None:
    """Figure 1 of DDTE as a picture: acceptance by depth, a panel for each verifier, and the
    distance of draft and target; means over settings."""
    picture = Picture(figsize=(14, 8), layout="constrained")
    columns = math.ceil((len(config.verifiers) + 1) / 2)  # in two rows
    panels = picture.subplots(2, columns, squeeze=False).flat
    figures = pandas.DataFrame(found.figures)
    measures = figures["measure"].str.extract(
        r"(?P<what>.*) at depth (?P<depth>\d+)(?:, )?(?P<K>.*)"
    )
    by_panel = measures.dropna().join(figures).groupby(["what", "method"])
    for ((what, method), rows), panel in zip(by_panel, panels, strict=False):
        values = rows.astype({"depth": int}).pivot_table("value", "depth", "K")  # a mean
        highest = 2 if what.startswith("L1") else 1  # of an L1 distance, and of a probability
        values.plot(ax=panel, title=method, ylabel=what, ylim=(0, highest))
    with atomically(path) as partial_path:
        picture.savefig(partial_path, format="png")


def show(found: Table) -> None:
    """Print tokens per step, and speeds over the rival's on each clock; the other figures are in
    the file."""
    measures = [figure.measure for figure in found.figures if figure.setting == figure.kind == ALL]
    for measure in dict.fromkeys(measures):
        if any(words in measure for words in NOT_SHOWN):
            continue
        rows = []
        for method in found.methods(ALL, measure):
            mean = found.of(ALL, method, measure)
            least = found.get(ALL, method, f"{measure}, least cell")
            rows.append(
                {
                    "method": method,
                    "mean": mean.text(3),
                    "least cell": least.text(3) if least else "",
                }
            )
        console.print(table(rows, measure))
