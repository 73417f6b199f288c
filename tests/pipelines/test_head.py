"""A run with an EAGLE-3 head, through the real entry point."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from selector.runtime import load_selector
from tests.pipelines.runs import SMALL, espalier, outcome

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
