"""The papers' tables on a small run: every method stands there, ratios are what they say, and means
are over cells."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from pipelines.compare.cells import (
    ALL_ACTIONS,
    ANY_TREE,
    AT_ROOT,
    DELAYED,
    DELAYED_OR_GREEDY,
    HERE,
    HIDDEN,
    KEPT,
    ONE_TREE,
    ORACLE,
    PRINTED,
    RULE_OF_SHAPES,
    RULE_OF_TREES,
    SELECTORS,
    SHAPE,
    WIDE_ROOT,
)
from pipelines.compare.networks import IDEAL
from pipelines.compare.stage import LEAST, method_of, over_cells
from pipelines.evaluate.table import ALL, Table
from selector.actions import ActionSpace
from selector.latency import LatencyProfile
from tests.pipelines.runs import ROOT, SMALL, at_call, espalier, outcome

STEP_TIMES = ROOT / "configs" / "clocks" / "h100_qwen2.5-32b_qwen2.5-0.5b.csv"


def test_every_method_of_every_verifier_is_compared_on_every_machine(copy: Path) -> None:
    words = [*SMALL, f"evaluate.clocks=[{STEP_TIMES}]", "data.features=full", "name=full"]
    for stage in ("latency", "data", "compare"):
        output = espalier(copy, stage, *words)
    assert "least cell" in output and "reusing" in espalier(copy, "compare", *words)
    folder = copy / "runs" / "full"
    table = Table.read(folder / "papers.parquet")
    rival = method_of("traversal", AT_ROOT)
    for machine in (HERE, STEP_TIMES.stem, IDEAL):
        columns = {"clock": machine, "rival": rival}
        means = {f.method: f.value for f in table.select(**columns, setting=ALL, kind=ALL)}
        assert len(means) == 3 * 5 + 2 + 1 + 2 * (4 + 3 + 2)
        assert method_of("specinfer", PRINTED) in means and means[rival] == 1
        assert {method_of(v, SELECTORS[HIDDEN]) for v in ("specinfer", "traversal")} <= {*means}
        for verifier in ("specinfer", "traversal", "lifted_uniform"):
            at_root = method_of(verifier, AT_ROOT)
            delayed = means[method_of(verifier, DELAYED)]
            assert means[method_of(verifier, ORACLE)] >= delayed > 0
            assert table.of(clock=machine, method=at_root, rival=at_root).value == 1
        cells = {
            method: [f.value for f in table.select(**columns, method=method) if f.setting != ALL]
            for method in means
        }
        at_root = method_of("specinfer", AT_ROOT)
        assert len(cells[at_root]) >= 2
        assert means[at_root] == pytest.approx(sum(cells[at_root]) / len(cells[at_root]))
        least = table.of(**columns, method=at_root, kind=LEAST).value
        assert least == pytest.approx(min(cells[at_root]))
        names = (KEPT, SELECTORS[ALL_ACTIONS], ONE_TREE, ANY_TREE)
        for kept, *others in zip(*(cells[method_of("traversal", n)] for n in names), strict=True):
            assert kept in others
        # what has more to choose from is no slower on the texts that it is chosen on, and hardly so
        # on others
        for fewer, more in ((SHAPE, ANY_TREE), (DELAYED_OR_GREEDY, ANY_TREE), (AT_ROOT, WIDE_ROOT)):
            assert means[method_of("traversal", more)] > 0.9 * means[method_of("traversal", fewer)]
        over_wide = {"clock": machine, "rival": method_of("traversal", WIDE_ROOT)}
        for rule in (RULE_OF_TREES, RULE_OF_SHAPES, ONE_TREE):
            assert table.of(**over_wide, method=method_of("traversal", rule), kind=ALL).value > 0


def test_wide_trees_are_timed_labelled_and_compared_without_networks(copy: Path) -> None:
    words = [*SMALL, "data.trees=wide", "evaluate.networks=false", "name=wide"]
    for stage in ("latency", "data", "compare"):
        espalier(copy, stage, *words)
    folder = copy / "runs" / "wide"
    counts = {str(K) for grid in ActionSpace.with_wide_trees().grids for K in grid.widths}
    for distinct in LatencyProfile.load(folder / "latency.json").distinct.values():
        assert counts <= distinct.keys() and distinct["32"][0] >= distinct["2"][0]
    figures = Table.read(folder / "papers.parquet").select(setting=ALL, kind=ALL)
    methods = {figure.method for figure in figures}
    assert method_of("traversal", WIDE_ROOT) in methods
    assert not methods & {method_of("traversal", name) for name in SELECTORS.values()}


def test_a_stopped_comparison_goes_on(copy: Path) -> None:
    """What is kept is not made again."""
    ended = partial(signal.raise_signal, signal.SIGKILL)
    stopped = partial(at_call, "pipelines.compare.stage.speeds", 1, ended)
    assert outcome(copy, "compare", *SMALL, prepare=stopped)[0] == -signal.SIGKILL
    again = partial(at_call, "pipelines.compare.stage.replays", 1, ended)
    code, output = outcome(copy, "compare", *SMALL, prepare=again)
    assert code == 0, output
    assert (copy / "runs/demo/papers.parquet").exists()


def test_means_are_over_cells_and_errors_over_sources() -> None:
    """Two cells of two sources each: ratios of sums within a cell, then their mean."""
    # tokens, seconds; the rival's
    columns = torch.tensor([[4.0, 2, 2, 2], [2, 2, 2, 2], [9, 3, 3, 3], [3, 1, 1, 1]])
    cells, sources = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
    mean = over_cells(columns, cells, sources)
    assert mean.value == pytest.approx(((6 / 4) / (4 / 4) + (12 / 4) / (4 / 4)) / 2)
    without = torch.tensor([(2 / 2 + 3) / 2, (4 / 2 + 3) / 2])  # the first source, the second one
    assert mean.error == pytest.approx(
        float((0.5 * (without - without.mean()).square().sum()).sqrt())
    )
