"""The stages that need no training, through the real entry point: `quick`, `audit` and `bench`."""

from __future__ import annotations

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
import torch

from pipelines.quick.stage import best_tree
from selector.actions import ActionSpace
from tests.pipelines.runs import ROOT, SMALL, espalier


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


AUDIT = [
    "audit.sampling=[{temperature: 0.5}, {top_p: 0.9}]",
    "audit.roots=16",
    "audit.acceptance_roots=2",
    "audit.bootstrap=100",
    f"audit.topologies=[{ROOT}/configs/trees/binary.json]",
]


def test_the_audit_leaves_tables_plots_and_a_page(paired: Path) -> None:
    folder = paired
    output = espalier(folder, "audit", *SMALL, *AUDIT)
    assert "The best verifier here, " in output and "MDSD, no published rule reaches the bound: " in output
    assert "DDTE, NSS last: holds" in output
    audit = folder / "runs" / "demo" / "audit"
    for name in ("verifiers", "variants", "acceptance", "depth", "best_trees", "efficiency"):
        rows = list(csv.DictReader((audit / f"{name}.csv").open()))
        assert rows and {row["setting"] for row in rows} >= {"T=0.5", "T=1, top-p=0.9"}
    ours = [row for row in csv.DictReader((audit / "variants.csv").open()) if row["variant"] == "iid"]
    assert {row["of traversal"] for row in ours if row["verifier"] == "traversal"} == {"1.0"}
    assert {row["verifier"] for row in ours} >= {"specinfer", "lifted_uniform", "khisti"}
    optimum = {(r["setting"], r["style"], r["k"]): r for r in csv.DictReader((audit / "acceptance.csv").open())}
    assert {k for _, _, k in optimum} == {"1", "2", "3", "4"}
    assert all((audit / f"{name}.png").stat().st_size > 1000 for name in ("depth", "verifiers", "efficiency"))
    page = (audit / "audit.html").read_text()
    lead = re.search("class='lead'>(.*?)</p>", page)
    assert lead is not None and lead[1].startswith("The best verifier here, ")
    assert page.count("<img alt='") == 3 and page.count("<tr>") < 60
    assert "reusing" in espalier(folder, "audit", *SMALL, *AUDIT)


def test_an_interrupted_audit_goes_on_with_what_is_measured(paired: Path) -> None:
    folder = paired
    audit = folder / "runs" / "demo" / "audit"
    if not (audit / "audit.html").exists():
        espalier(folder, "audit", *SMALL, *AUDIT)
    (folder / "runs" / "demo" / "stages" / "audit.json").unlink()
    (audit / "roots-1.parquet").unlink()
    kept, table = (audit / "roots-0.parquet").stat().st_mtime_ns, (audit / "verifiers.csv").read_bytes()
    espalier(folder, "audit", *SMALL, *AUDIT)
    assert (audit / "roots-0.parquet").stat().st_mtime_ns == kept
    assert (audit / "verifiers.csv").read_bytes() == table


def test_the_quick_audit_gives_a_verdict(paired: Path) -> None:
    output = espalier(paired, "quick", *SMALL, "quick.texts=8", "quick.verifiers=[block,traversal,lifted_uniform]")
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


def test_the_bench_compares_with_transformers(tmp_path: Path) -> None:
    output = espalier(tmp_path, "bench", "bench.vocabularies=[64]", "bench.repeats=3")
    rows = json.loads((tmp_path / "runs" / "demo" / "bench.json").read_text())["rows"]
    assert {row["what"] for row in rows} >= {"transformers, chain", "naive, chain", "lifted_uniform", "khisti"}
    assert "lifted_uniform" in output
