"""A run with an EAGLE-3 head for the embedded target, through the real entry point."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipelines.config.reading import load_config
from pipelines.export.engines import Range, Served, engine_of
from selector.runtime import load_selector
from selector.schema import InputError
from tests.pipelines.runs import ROOT, SMALL, espalier, evaluation_of, outcome

HEAD = ROOT / "configs" / "head.yaml"
OF_THE_TARGET = ("pair.embedded.hidden", "pair.embedded.layers", "pair.embedded.steps")
SMALL_HEAD = [
    *(each for each in SMALL if each.partition("=")[0] not in OF_THE_TARGET),
    "pair.embedded.draft_steps=3",
    "sampling=[{temperature: 0.0}, {temperature: 1.0}]",
    "data.texts=20",
]
needs_heads = pytest.mark.skipif(find_spec("speculators") is None, reason="the extra `heads` is not installed")
SERVED = Served("big", "head", True, False, [Range(1, 4, 6), Range(5, 64, 2)], head=True)


@needs_heads
def test_a_run_with_a_head(tmp_path: Path) -> None:
    """All stages: traces hold chains alone, the decoder agrees with generate(), a selector drafts chains."""
    assert "by the head 16 times" in espalier(tmp_path, "data", *SMALL_HEAD, "--plan", config="head.yaml")
    espalier(tmp_path, "demo", *SMALL_HEAD, config="head.yaml")
    run = tmp_path / "runs" / "head"
    shard = next((run / "traces" / "train").glob("*.parquet"))
    row = pq.read_table(shard).slice(0, 1).to_pylist()[0]
    assert len(row["traversal.survivals"]) == 16 * row["roots"]
    evaluation = evaluation_of(tmp_path, "head")
    assert evaluation["greedy"]["differing"] == []
    selector = load_selector(run / "selector")
    assert len(selector.actions) == 17 + 4
    assert len(json.loads((run / "pair" / "manifest.json").read_text())["overlaps"]) == 4
    assert (run / "report.html").exists()


def test_without_the_library_a_head_is_refused_in_one_line(tmp_path: Path) -> None:
    if find_spec("speculators") is not None:
        pytest.skip("the extra `heads` is installed")
    code, said = outcome(tmp_path, "pair", config="head.yaml")
    assert code == 2 and "pair.head: speculators is not installed" in said


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["pair.draft=org/small"], "draft: a head takes its place"),
        (["pair.embedded.layers=4"], "embedded.layers: a head is trained for the target as it is"),
        (["pair.target=org/big"], "'embedded' is for the embedded target: name a head for org/big"),
    ],
)
def test_what_a_head_excludes(overrides: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said):
        load_config(HEAD, overrides)


def test_a_head_is_part_of_the_plan(tmp_path: Path) -> None:
    assert "train the head for " in espalier(tmp_path, "pair", "--plan", config="embedded_head.yaml")


@needs_heads
def test_the_head_that_comes_with_espalier_is_loaded(tmp_path: Path) -> None:
    said = espalier(tmp_path, "pair", "data.texts=20", config="head.yaml")
    assert "embedded and embedded load" in said


@needs_heads
def test_quick_names_what_it_lacks(tmp_path: Path) -> None:
    code, said = outcome(tmp_path, "quick", config="head.yaml")
    assert code == 2 and "pair.head: quick compares trees of draft models" in said


def test_tables_of_engines_for_heads() -> None:
    vllm, sglang = engine_of("vllm", True), engine_of("sglang", True)
    assert vllm.settings(SERVED)["method"] == "eagle3"
    assert vllm.settings(SERVED)["num_speculative_tokens_per_batch_size"] == [[1, 4, 6], [5, 64, 2]]
    assert sglang.settings(SERVED)["speculative-algorithm"] == "EAGLE3"
    assert sglang.steps is not None
    assert sglang.steps(SERVED) == {"1": {"candidate_steps": [6]}, "5": {"candidate_steps": [2]}}
    assert sglang.command(SERVED, "t.yaml").endswith("--speculative-adaptive-config t.steps.json")
    assert list(sglang.lengths(3)) == [0, 1, 2, 3]
    with pytest.raises(InputError, match="there is no file for tensorrt-llm with a head"):
        engine_of("tensorrt-llm", True)
