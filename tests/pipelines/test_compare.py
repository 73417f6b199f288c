"""The papers' tables on a small run: every method stands there, ratios are what they say, and means
are over cells."""

from __future__ import annotations

import signal
from functools import partial
from itertools import product
from pathlib import Path

import pytest
import torch

from data_gen.models.pair import CachedModel, ModelPair
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
from pipelines.compare.dynamic import DEPTH, DYNAMIC, STATIC_SHAPE, WIDTH, expand
from pipelines.compare.networks import IDEAL
from pipelines.compare.roots import DISTANCE, DRAFTED, OPTIMAL
from pipelines.compare.stage import LEAST, method_of, over_cells
from pipelines.compare.wide import CHARGED, NAMES
from pipelines.evaluate.table import ACCEPTANCE, ALL, EFFICIENCY, SPEED, Table
from selector.actions import GREEDY as GREEDY_STYLE
from selector.actions import IID, ActionSpace
from tests.pipelines.runs import ROOT, SMALL, at_call, espalier, outcome

STEP_TIMES = ROOT / "configs" / "clocks" / "h100_qwen2.5-32b_qwen2.5-0.5b.csv"


def test_every_method_of_every_verifier_is_compared_on_every_machine(copy: Path) -> None:
    words = [*SMALL, f"evaluate.clocks=[{STEP_TIMES}]", "data.features=full", "name=full"]
    for stage in ("latency", "data", "compare"):
        output = espalier(copy, stage, *words)
    assert "least cell" in output and "reusing" in espalier(copy, "compare", *words)
    folder = copy / "runs" / "full"
    assert (folder / "figure1.png").stat().st_size
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
        for method in DYNAMIC:
            dynamic = table.select(clock=machine, method=method, rival=STATIC_SHAPE)
            assert len(dynamic) == 2 and all(0.3 < figure.value < 3 for figure in dynamic)
    acceptances = table.select(statistic=ACCEPTANCE, depth=1, K=4)
    assert len(acceptances) == 6 and all(0 < f.value <= 1 + 1e-6 for f in acceptances)
    optimal = {"setting": "T=1", "basis": OPTIMAL, "statistic": ACCEPTANCE, "K": 2}
    without_replacement = table.of(**optimal, method="without_replacement").value
    assert table.of(**optimal, method=IID).value < without_replacement <= 1
    # of 16 draws
    assert all(0 < f.value < 1.5 for f in table.select(basis=DRAFTED, rival=OPTIMAL))
    distances = table.select(statistic=DISTANCE, depth=0)
    assert len(distances) == 2 and all(0 < f.value < 2 for f in distances)


def test_verifiers_are_compared_on_wide_trees(copy: Path) -> None:
    """Tokens per step of every number of branches, and the fastest trees on every machine; with
    greedy branches all bottom-up verifiers are alike."""
    verifiers = ("specinfer", "traversal", "lifted_uniform")
    words = [*SMALL, f"evaluate.clocks=[{STEP_TIMES}]", "data.trees=wide", "name=wide"]
    words.append("evaluate.networks=false")
    for stage in ("latency", "data", "compare"):
        output = espalier(copy, stage, *words)
    assert "the fastest tree" in output and "reusing" in espalier(copy, "compare", *words)
    table = Table.read(copy / "runs" / "wide" / "wide.parquet")
    counts = [K for grid in ActionSpace.with_wide_trees().grids for K in grid.widths]
    for verifier, K in product(verifiers, counts):
        columns = {"setting": "T=1", "statistic": EFFICIENCY, "K": K, "depth": 3}
        for name in NAMES.values():
            mine = table.of(**columns, method=f"{verifier}, {name}")
            rival = table.of(**columns, method=f"traversal, {name}")
            over = table.of(**columns, method=mine.method, rival=rival.method)
            assert over.value == pytest.approx(mine.value / rival.value)
            if name == NAMES[GREEDY_STYLE] and verifier != "specinfer":
                assert over.value == 1
    machines = {HERE, STEP_TIMES.stem, IDEAL, STEP_TIMES.stem + CHARGED, IDEAL + CHARGED}
    for machine, verifier in product(machines, verifiers):
        method = f"{verifier}, {NAMES[IID]}"
        (speed,) = table.select(setting="T=1", clock=machine, method=method, statistic=SPEED)
        assert speed.value > 0 and speed.K in (1, *counts)
        if verifier == "traversal":
            assert speed.value == 1


@torch.inference_mode()
def test_a_dynamic_tree_has_the_most_probable_paths(pair: ModelPair) -> None:
    """Each level's most probable nodes are expanded, and every node's probability is that of its
    path by forward passes over whole texts."""
    text = [5, 17, 203, 44, 91, 5, 17]
    draft = CachedModel(pair.draft)
    tree, joint_N = expand(draft, draft.extend(text).logits_WV[-1])

    def probs_after(path: list[int]) -> torch.Tensor:
        return pair.draft(torch.tensor([text + path])).logits[0, -1].softmax(-1)

    widths = [len(nodes) for nodes in tree.nodes_by_depth]
    assert widths == [1, WIDTH, *[WIDTH**2] * (DEPTH - 1)]
    for nodes in tree.nodes_by_depth[1:-1]:
        expanded = [node for node in nodes if tree.children(node)]
        others = [node for node in nodes if not tree.children(node)]
        assert len(expanded) == WIDTH
        assert not others or joint_N[expanded].min() >= joint_N[others].max()
    for node in (1, WIDTH, len(tree) // 2, len(tree) - 1):
        path = [tree.token(passed) for passed in tree.path_to(node)]
        joint = 1.0
        for depth, token in enumerate(path):
            joint *= float(probs_after(path[:depth])[token])
        assert joint_N[node] == pytest.approx(joint, rel=1e-3)


def test_a_stopped_comparison_goes_on(copy: Path) -> None:
    """What is kept is not made again."""
    ended = partial(signal.raise_signal, signal.SIGKILL)
    stopped = partial(at_call, "pipelines.compare.stage.draw", 1, ended)
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
