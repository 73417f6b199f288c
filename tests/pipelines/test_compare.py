"""The papers' tables on a small run: every method stands there, ratios are what they say, and means
are over cells."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest
import torch

from pipelines.compare.cells import (
    AT_ROOT,
    BOTH,
    COPYING,
    DELAYED,
    GREEDY,
    HERE,
    HIDDEN,
    KEPT,
    ORACLE,
    PRINTED,
)
from pipelines.compare.stage import IDEAL, over_cells
from pipelines.evaluate.table import ALL, Table
from tests.pipelines.runs import SMALL, at_call, espalier, outcome

CLOCK = str(Path(__file__).parents[2] / "configs" / "clocks" / "h100_qwen2.5-32b_qwen2.5-0.5b.csv")


def test_every_method_of_every_verifier_is_compared_on_every_clock(copy: Path) -> None:
    own, words = (
        copy / "runs" / "full",
        [*SMALL, f"evaluate.clocks=[{CLOCK}]", "data.features=full", "name=full"],
    )
    said = [espalier(copy, stage, *words) for stage in ("latency", "data", "compare")][-1]
    found = Table.read(own / "papers.parquet")
    for clock in (HERE, Path(CLOCK).stem, IDEAL):
        measure = f"replayed on {clock} over traversal {AT_ROOT}"
        methods = found.methods(ALL, measure)
        assert (
            f"specinfer: {PRINTED}" in methods and len(methods) == 3 * 6 + 2 * (3 + 1 + 2 + 3) + 1
        )
        assert found.of(ALL, f"traversal: {AT_ROOT}", measure).value == 1
        assert {f"{name}: selector, {HIDDEN}" for name in ("specinfer", "traversal")} <= {*methods}
        for name in ("specinfer", "traversal", "lifted_uniform"):
            oracle = found.of(ALL, f"{name}: {ORACLE}", measure).value
            assert oracle >= found.of(ALL, f"{name}: {DELAYED}", measure).value > 0
            assert (
                found.of(
                    ALL, f"{name}: {AT_ROOT}", f"replayed on {clock} over its own root tree"
                ).value
                == 1
            )
        of = {
            m: [own.value for own in found.figures if (own.measure, own.method) == (measure, m)]
            for m in methods
        }
        mean, *each = of[f"specinfer: {AT_ROOT}"]
        assert mean == pytest.approx(sum(each) / len(each)) and len(each) >= 2
        assert found.of(
            ALL, f"specinfer: {AT_ROOT}", f"{measure}, least cell"
        ).value == pytest.approx(min(each))
        among = (
            f"selector, {BOTH}{KEPT}",
            f"selector, {BOTH}",
            f"{COPYING}, {GREEDY}",
            f"{DELAYED} or {GREEDY}",
        )
        assert all(
            kept in three
            for kept, *three in zip(*(of[f"traversal: {m}"][1:] for m in among), strict=True)
        )
    depth = [
        own.value for own in found.figures if own.measure == "replayed acceptance at depth 1, K=4"
    ]
    assert len(depth) == 6 and 0 < min(depth) <= max(depth) <= 1 + 1e-6
    figure = {
        each.measure: each.value
        for each in found.figures
        if each.setting == "T=1" and each.method == "drafts"
    }
    assert (
        figure["optimal acceptance, K=2, iid"]
        < figure["optimal acceptance, K=2, without_replacement"]
        <= 1
    )
    # of 16 draws
    assert all(
        0 < value < 1.5 for measure, value in figure.items() if "over the optimum" in measure
    )
    assert 0 < figure["L1 distance at depth 0"] < 2 and "reusing" in espalier(
        copy, "compare", *words
    )
    assert "least cell" in said and (own / "figure1.png").stat().st_size


def test_a_stopped_comparison_goes_on(copy: Path) -> None:
    """What is kept is not made again."""
    ended = partial(signal.raise_signal, signal.SIGKILL)
    stopped = partial(at_call, "pipelines.compare.stage.draw", 1, ended)
    assert outcome(copy, "compare", *SMALL, prepare=stopped)[0] == -signal.SIGKILL
    again = partial(at_call, "pipelines.compare.stage.replays", 1, ended)
    code, said = outcome(copy, "compare", *SMALL, prepare=again)
    assert code == 0, said
    assert (copy / "runs/demo/papers.parquet").exists()


def test_means_are_over_cells_and_errors_over_sources() -> None:
    """Two cells of two sources each: ratios of sums within a cell, then their mean."""
    # tokens, seconds; the rival's
    columns = torch.tensor([[4.0, 2, 2, 2], [2, 2, 2, 2], [9, 3, 3, 3], [3, 1, 1, 1]])
    cells, sources = torch.tensor([0, 0, 1, 1]), torch.tensor([0, 1, 0, 1])
    found = over_cells(columns, cells, sources)
    assert found.value == pytest.approx(((6 / 4) / (4 / 4) + (12 / 4) / (4 / 4)) / 2)
    without = torch.tensor([(2 / 2 + 3) / 2, (4 / 2 + 3) / 2])  # the first source, the second one
    assert found.error == pytest.approx(
        float((0.5 * (without - without.mean()).square().sum()).sqrt())
    )
