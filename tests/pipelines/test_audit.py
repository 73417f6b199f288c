"""The stages that need no training, through the real entry point: `quick`, `audit` and `bench`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from data_gen.verification import VERIFIERS
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
    "sampling=[{temperature: 0.5}, {top_p: 0.9}]",
    "audit.roots=16",
    f"audit.topologies=[{ROOT}/configs/trees/binary.json]",
]


def test_the_audit_leaves_tables_and_a_page(paired: Path) -> None:
    output = espalier(paired, "audit", *SMALL, *AUDIT)
    assert "The best verifier here, " in output
    folder = paired / "runs" / "demo"
    audit = json.loads((folder / "audit.json").read_text())
    for rows in (audit["block_efficiency"], audit["acceptance"]):
        assert {row["setting"] for row in rows} == {"T=0.5", "T=1, top-p=0.9", "mean"}
        assert all(row["interval_95"][0] <= row["interval_95"][1] for row in rows)
    ratio = {
        (r["drafts"], r["verifier"]): r["of_traversal"] for r in audit["block_efficiency"] if r["setting"] == "mean"
    }
    assert ratio["iid", "traversal"] == 1
    assert {name for drafts, name in ratio if drafts == "iid"} == set(VERIFIERS)
    assert ratio["iid", "nss"] == min(value for (drafts, _), value in ratio.items() if drafts == "iid")
    assert {"without_replacement", "greedy", "draft 0.7x as hot", "binary"} < {drafts for drafts, _ in ratio}
    accepted = {(r["drafts"], r["verifier"], r["k"]): r["acceptance"] for r in audit["acceptance"]}
    assert {(drafts, k) for drafts, name, k in accepted if name == "optimum"} == {
        *(("iid", k) for k in (1, 2, 3, 4)),
        *(("without_replacement", k) for k in (1, 2, 3, 4)),
        *(("greedy", k) for k in (2, 3, 4)),
    }
    assert all(0 < value < 1 + 1e-9 for value in accepted.values())
    page = (folder / "audit.html").read_text()
    assert f"class='lead'>{audit['found']}</p>" in page
    assert page.count("<table>") == 3
    assert "reusing" in espalier(paired, "audit", *SMALL, *AUDIT)


def test_an_interrupted_audit_goes_on_with_what_is_measured(paired: Path) -> None:
    folder = paired / "runs" / "demo"
    if not (folder / "audit.json").exists():
        espalier(paired, "audit", *SMALL, *AUDIT)
    whole = json.loads((folder / "audit.json").read_text())
    (folder / "stages" / "audit.json").unlink()
    journal = folder / "audit-roots.jsonl"
    header, first, _ = journal.read_text().splitlines()
    changed = json.loads(first)
    for root in changed:
        root["efficiency"]["iid"]["block"] = 3.0  # what is there must not be measured again
    journal.write_text(f"{header}\n{json.dumps(changed)}\n")
    espalier(paired, "audit", *SMALL, *AUDIT)
    again = json.loads((folder / "audit.json").read_text())
    for before, after in zip(whole["block_efficiency"], again["block_efficiency"], strict=True):
        if (before["drafts"], before["verifier"]) != ("iid", "block"):
            assert before == after
        elif before["setting"] == "T=0.5":
            assert after["block_efficiency"] == 3


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
