"""Stage `quick`, through the real entry point."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from pipelines.quick.stage import best_tree
from selector.actions import ActionSpace
from tests.pipelines.runs import SMALL, espalier


@pytest.fixture(scope="module")
def paired(demo: tuple[Path, str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained pair and nothing else."""
    folder = tmp_path_factory.mktemp("paired")
    for name in ("pair", "stages/pair.json", "stages/prompts.json"):
        source, copy = (each / "runs" / "demo" / name for each in (demo[0], folder))
        copy.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, copy)
        else:
            shutil.copy(source, copy)
    return folder


def test_quick_gives_a_verdict(paired: Path) -> None:
    output = espalier(paired, "quick", *SMALL, "quick.texts=8")
    assert "speculation pays" in output or "speculation does not pay" in output
    assert "Does a selector pay here?" in output and "explained variance" in output


@pytest.mark.parametrize("verifier", ["naive", "block", "traversal"])
def test_only_chains_are_recommended_to_verifiers_of_the_first_path(verifier: str) -> None:
    """By chance branching trees may seem the fastest; their other branches are never accepted."""
    space = ActionSpace.default()
    survivals_RS = torch.full((40, len(space.sums_SA)), 0.5, dtype=torch.float64)
    seconds_A = torch.tensor([0.01 if action.K == 1 else 0.005 for action in space])
    found = best_tree(verifier, survivals_RS, seconds_A, torch.tensor([10, 10, 10, 10]))
    assert (found.action.K == 1) == (verifier != "traversal")
    assert found.speed == pytest.approx(found.efficiency / float(seconds_A[space.index(found.action)]), rel=1e-5)
