"""A run with an EAGLE-3 head, through the real entry point."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from pipelines.config.reading import load_config
from selector.runtime import load_selector
from selector.schema import InputError
from tests.pipelines.runs import ROOT, SMALL, espalier, outcome

needs_heads = pytest.mark.skipif(find_spec("speculators") is None, reason="the extra `heads` is not installed")


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    """A small run with a random head for a random target."""
    from tests.data_gen.heads import save_head, save_target

    target = save_target(tmp_path / "target")
    own = [f"pair.target={target}", f"pair.head={save_head(tmp_path / 'head', target)}", "data.texts=20"]
    return [*(each for each in SMALL if not each.startswith(("pair.target", "pair.draft"))), *own]


@needs_heads
def test_a_run_with_a_head(given: list[str], tmp_path: Path) -> None:
    """All stages: traces hold chains alone, the decoder agrees with generate(), a selector drafts chains."""
    assert "by the head 16 times" in espalier(tmp_path, "data", *given, "--plan")
    espalier(tmp_path, "demo", *given)
    run = tmp_path / "runs" / "demo"
    shard = next((run / "traces" / "train").glob("*.parquet"))
    row = pq.read_table(shard).slice(0, 1).to_pylist()[0]
    assert len(row["traversal.survivals"]) == 16 * row["roots"]
    assert len(load_selector(run / "selector").actions) == 17 + 4
    assert (run / "report.html").exists()


def test_without_the_library_a_head_is_refused_in_one_line(tmp_path: Path) -> None:
    if find_spec("speculators") is not None:
        pytest.skip("the extra `heads` is installed")
    code, said = outcome(tmp_path, "pair", "pair.head=some/head")
    assert code == 2 and "pair.head: speculators is not installed" in said


def test_a_head_takes_the_place_of_a_draft() -> None:
    with pytest.raises(InputError, match="draft: a head takes its place"):
        load_config(ROOT / "configs" / "demo.yaml", ["pair.head=some/head", "pair.draft=some/small"])


def test_quick_names_what_it_lacks(tmp_path: Path) -> None:
    code, said = outcome(tmp_path, "quick", "pair.head=some/head")
    assert code == 2 and "pair.head: quick compares trees of draft models" in said
