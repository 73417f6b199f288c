from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from data_gen.features.root import ROW_NUMBERS
from data_gen.traces import TraceStore, read_texts, text_schema, to_table
from selector.actions import ActionSpace
from selector.schema import HIDDEN_STATES, LOOKUP_COLUMN, InputError, survival_column

ROOT = Path(__file__).parents[2]
SURVIVALS = len(ActionSpace.recorded().sums_SA)
LABELS = survival_column("traversal")
SCHEMA = text_schema(["traversal"], True, ActionSpace.recorded())
NAME = "train/part-00000.parquet"


def row(roots: int = 2, value: float = 0.5) -> dict:
    """A text of 20 tokens with so many roots."""
    return {
        **{"prompt": "p", "kind": "code", "source": "file"},
        **{"temperature": 0.7, "top_p": 0.9, "top_k": 0, "min_p": 0.0, "draft_temperature": None},
        **{"tokens": list(range(20)), "start": 3, "roots": roots},
        **{name: np.full(roots, value) for name in ROW_NUMBERS},
        LOOKUP_COLUMN: np.full(roots, 3),
        LABELS: np.full((roots, SURVIVALS), value),
        **{name: np.full((max(0, roots - 1), 4), value) for name in HIDDEN_STATES},
        "hidden_stride": 1,
        **{"step_root": [0, 4], "step_action": [7, 0], "step_accepted": [3, 0], "step_verifier": "traversal"},
    }


def table(rows: list[dict] | None = None) -> pa.Table:
    return to_table([row(), row(3), row()] if rows is None else rows, SCHEMA)


def store(folder: Path, **depends: object) -> TraceStore:
    return TraceStore(folder, {"pair": "abc", **depends})


def test_every_column_keeps_what_it_is_given() -> None:
    """Lists of any shape lie flat, row by row; nothing is lost of tokens and steps; labels are in half precision."""
    labels = np.linspace(0, 1, 3 * SURVIVALS).reshape(3, SURVIVALS)
    rows = [{**row(), "step_verifier": None, "draft_temperature": 1.5}, {**row(3), LABELS: labels}]
    made = table([*rows, {**row(0), "tokens": [], "step_root": [], "step_action": [], "step_accepted": []}])
    assert made.schema == SCHEMA
    assert made["tokens"].to_pylist() == [list(range(20))] * 2 + [[]]
    assert made["step_root"].to_pylist() == [[0, 4], [0, 4], []]
    assert made["step_verifier"].to_pylist() == [None, "traversal", "traversal"]
    assert made["draft_temperature"].to_pylist() == [1.5, None, None]
    assert [len(each) for each in made["target_prob"].to_pylist()] == [2, 3, 0]
    assert np.array_equal(made[LABELS][1].values.to_numpy(), labels.astype(np.float16).reshape(-1))
    assert len(made["target_hidden_prev"][1]) == 2 * 4


def test_a_value_that_is_not_finite_is_never_written(tmp_path: Path) -> None:
    """In no column; the first label is infinite in half precision alone."""
    spoilt: dict[str, object] = {LABELS: np.full((2, SURVIVALS), 1e6)}
    spoilt |= dict.fromkeys(("temperature", "draft_temperature"), np.inf)
    eight = np.where(np.arange(8) == 5, np.nan, 1.0)
    spoilt |= dict.fromkeys(("target_hidden_prev", "draft_hidden_root", "draft_prob"), eight)
    for column, value in spoilt.items():
        with pytest.raises(InputError, match=rf"part-00000.parquet: {column}: a value is not finite"):
            store(tmp_path).write(NAME, table([row(value=1.0), {**row(), column: value}]))
    assert not store(tmp_path).holds(NAME)
    store(tmp_path).write(NAME, table([]))
    assert store(tmp_path).total("rows") == 0 and store(tmp_path).holds(NAME)


@pytest.mark.parametrize("damage", ["truncate", "flip"])
def test_a_damaged_shard_is_named(tmp_path: Path, damage: str) -> None:
    made = store(tmp_path)
    made.write(NAME, table())
    assert made.total("bytes") == (tmp_path / NAME).stat().st_size
    content = bytearray((tmp_path / NAME).read_bytes())
    content = content[:-20] if damage == "truncate" else content[:50] + bytes([content[50] ^ 1]) + content[51:]
    (tmp_path / NAME).write_bytes(bytes(content))
    for use in (lambda: store(tmp_path).holds(NAME), lambda: read_texts(tmp_path, "train", ["traversal"])):
        with pytest.raises(InputError, match=r"part-00000.parquet is damaged .*: remove it and run the data"):
            use()
    (tmp_path / NAME).unlink()
    assert not store(tmp_path).holds(NAME)
