from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from data_gen.traces import ROWS_VERSION, TraceStore, root_schema, row_bytes, to_table
from selector.actions import ActionSpace
from selector.data import read_split
from selector.schema import SCHEMA_VERSION, TRACE_SCALARS, TRUNK_COLUMNS, InputError, label_columns

ROOT = Path(__file__).parents[2]
SPACE = ActionSpace(1, 2, 2)
SCHEMA = root_schema([4, 3, 3], ["traversal"], SPACE, samples=2)
NAME = "train/part-00000.parquet"


def rows(count: int = 3, value: float = 1.5) -> list[dict]:
    row = {
        "prompt": "p",
        "kind": "code",
        "root_kind": "stride",
        "root_token": 7,
        "weight": 1.0,
        "target_hidden_prev": np.ones(4),
        "draft_hidden_prev": np.ones(3),
        "draft_hidden_root": np.ones(3),
        **dict.fromkeys(TRACE_SCALARS, value),
        **{
            column: np.full((2, 5) if kind == "trunk" else 5, 2 if kind == "realised" else value)
            for kind, column in label_columns("traversal").items()
        },
        **{column: np.full((2, 3, 3) if name == "hidden" else (2, 3), value) for name, column in TRUNK_COLUMNS.items()},
        **dict.fromkeys(("decoded_verifier", "decoded_action", "decoded_expected", "decoded_realised")),
    }
    return [dict(row) for _ in range(count)]


def table(changed: list[dict] | None = None) -> pa.Table:
    return to_table(rows() if changed is None else changed, SCHEMA)


def store(folder: Path, **depends: object) -> TraceStore:
    return TraceStore(folder, {"pair": "abc", **depends})


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    made = store(tmp_path)
    made.write(NAME, table())
    assert made.holds(NAME) and made.rows() == made.rows("train/") == 3
    read = read_split(tmp_path, "train")
    assert read["traversal.mean"].to_pylist() == [[1.5] * 5] * 3
    assert read["traversal.realised"].to_pylist() == [[2] * 5] * 3
    assert not list(tmp_path.rglob("*.tmp"))


def test_datasets_reads_a_shard(tmp_path: Path) -> None:
    from datasets import load_dataset

    store(tmp_path / "traces").write(NAME, table())
    data = load_dataset(
        "parquet",
        data_files={"train": str(tmp_path / "traces" / "train" / "*.parquet")},
        cache_dir=str(tmp_path / "cache"),
    )["train"]
    assert len(data) == 3
    assert data[0]["traversal.mean"] == [1.5] * 5
    assert data.features["target_hidden_prev"].length == 4


def test_the_predicted_size_is_that_of_the_columns() -> None:
    strings, numbers, hidden = 4 * 24, 4 + 4, 2 * (4 + 3 + 3)
    labels, decoded = 5 * (3 * 2 + 1 + 2 * 2), 2 + 4 + 1
    trunk = 2 * 2 * SPACE.decisions * (3 + 3)
    assert row_bytes(SCHEMA) == strings + numbers + hidden + 4 * len(TRACE_SCALARS) + labels + trunk + decoded


def test_a_value_that_is_not_finite_is_never_written(tmp_path: Path) -> None:
    for bad in (np.nan, 1e6):  # the second one is infinite in half precision
        with pytest.raises(InputError, match=r"traversal\.mean: a value is not finite"):
            store(tmp_path).write(NAME, table([{**rows()[0], "traversal.mean": np.full(5, bad)}]))
    with pytest.raises(InputError, match=r"traversal\.mean: a value is not finite"):
        store(tmp_path).write(NAME, table([*rows(value=1.0), {**rows()[0], "traversal.mean": np.full(5, np.nan)}]))
    assert not store(tmp_path).holds(NAME)


def test_every_column_is_checked_for_finite_values(tmp_path: Path) -> None:
    for column in ("target_hidden_prev", "l1_prev", "decoded_expected"):
        value = np.full(4, np.inf) if column == "target_hidden_prev" else np.nan
        with pytest.raises(InputError, match=rf"part-00000.parquet: {column}: a value is not finite"):
            store(tmp_path).write(NAME, table([{**rows()[0], column: value}]))
    store(tmp_path).write(NAME, table([]))
    assert store(tmp_path).rows() == 0 and store(tmp_path).holds(NAME)


def test_traces_of_other_inputs_are_refused(tmp_path: Path) -> None:
    store(tmp_path, seed=1)
    changes = 'pair: "abc" -> "xyz"; seed: 1 -> 2'
    with pytest.raises(InputError, match=rf"other inputs \({changes}\); choose another name= or remove it"):
        TraceStore(tmp_path, {"pair": "xyz", "seed": 2})


def test_traces_of_another_program_are_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(tmp_path).write(NAME, table())
    monkeypatch.setattr("data_gen.traces.ROWS_VERSION", ROWS_VERSION + 1)
    with pytest.raises(InputError, match=f"rows_version: {ROWS_VERSION} -> {ROWS_VERSION + 1}"):
        store(tmp_path)


@pytest.mark.parametrize("damage", ["truncate", "flip"])
def test_a_damaged_shard_is_named(tmp_path: Path, damage: str) -> None:
    made = store(tmp_path)
    made.write(NAME, table())
    content = bytearray((tmp_path / NAME).read_bytes())
    content = content[:-20] if damage == "truncate" else content[:50] + bytes([content[50] ^ 1]) + content[51:]
    (tmp_path / NAME).write_bytes(bytes(content))
    for use in (lambda: store(tmp_path).holds(NAME), lambda: read_split(tmp_path, "train")):
        with pytest.raises(InputError, match=r"part-00000.parquet is damaged .*: remove it and run the data"):
            use()
    (tmp_path / NAME).unlink()
    assert not store(tmp_path).holds(NAME)


def test_a_shard_of_another_schema_version_is_refused(tmp_path: Path) -> None:
    store(tmp_path).write(NAME, table())
    manifest = tmp_path / "manifest.json"
    manifest.write_text(manifest.read_text().replace(f'"schema_version": {SCHEMA_VERSION}', '"schema_version": 0'))
    with pytest.raises(InputError, match=f"schema version 0; this program reads {SCHEMA_VERSION}"):
        read_split(tmp_path, "train")
    with pytest.raises(InputError, match="schema_version"):
        store(tmp_path)


def test_a_full_disk_names_the_file_and_loses_nothing(tmp_path: Path) -> None:
    """RLIMIT_FSIZE stands in for a full disk."""
    store(tmp_path).write(NAME, table())
    program = f"""
import resource, signal
from pathlib import Path
from tests.data_gen.test_traces import store, table
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
made = store(Path({str(tmp_path)!r}))
resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000))
try:
    made.write("train/part-00001.parquet", table())
except ValueError as error:
    print(type(error).__name__, error)
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.startswith("InputError") and "part-00001.parquet.tmp: cannot be written" in result.stdout
    again = store(tmp_path)
    assert again.holds(NAME) and not again.holds("train/part-00001.parquet")
    again.write("train/part-00001.parquet", table())
    assert again.rows() == 6
