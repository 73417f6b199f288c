"""The trace store: Parquet shards, one folder per split, and a manifest that says what they were made from.

A shard is written under a temporary name, read back, and renamed; the manifest then lists its checksum. A shard that
the manifest lists and that has changed since is an error, never silently used or made again.

Columns of a root (schema version in `selector.schema`; K, A as there):

    prompt, kind         string      the prompt's id and kind
    root_kind            string      'step': a root of the decoder itself; 'stride': every n-th token
    root_token           int32
    weight               float32     how many of its trajectory's own steps the root stands for
    target_hidden_prev, draft_hidden_prev, draft_hidden_root   float16 lists
    <scalar features>    float32     the names of `selector.schema.TRACE_SCALARS`: pass times belong to a machine
    <verifier>.mean, .error, .half   float16 lists, one value per action
    <verifier>.realised  uint8 list
    trunk.hidden         float16 list, samples x trunk tokens x width: what is known while drafting (`TRUNK_COLUMNS`)
    trunk.token_entropy, trunk.token_logprob, trunk.accept     float16 lists, samples x trunk tokens
    <verifier>.trunk     float16 list, samples x actions: labels given each sample's own trunk
    decoded_verifier, decoded_action, decoded_expected, decoded_realised
                         of the tree really decoded at this root; null at 'stride' roots
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from selector.actions import ActionSpace
from selector.schema import (
    HIDDEN_STATES,
    SCHEMA_VERSION,
    TRACE_SCALARS,
    TRUNK_COLUMNS,
    InputError,
    check_shard,
    label_columns,
    read_manifest,
    sha256,
)

ROWS_VERSION = 4  # bump it when this program gives other rows for the same inputs: a store never holds both
METADATA = {"espalier_schema_version": str(SCHEMA_VERSION)}


def root_schema(hidden_widths: Sequence[int], verifiers: Sequence[str], space: ActionSpace, samples: int) -> pa.Schema:
    """Schema of a trace row."""
    tokens = samples * space.decisions
    fields = [
        ("prompt", pa.string()),
        ("kind", pa.string()),
        ("root_kind", pa.string()),
        ("root_token", pa.int32()),
        ("weight", pa.float32()),
        *((name, pa.list_(pa.float16(), d)) for name, d in zip(HIDDEN_STATES, hidden_widths, strict=True)),
        *((name, pa.float32()) for name in TRACE_SCALARS),
    ]
    for verifier in verifiers:
        for kind, column in label_columns(verifier).items():
            size = len(space) * (samples if kind == "trunk" else 1)
            fields.append((column, pa.list_(pa.uint8() if kind == "realised" else pa.float16(), size)))
    fields += [
        (column, pa.list_(pa.float16(), tokens * (hidden_widths[-1] if name == "hidden" else 1)))
        for name, column in TRUNK_COLUMNS.items()
    ]
    fields += [
        ("decoded_verifier", pa.string()),
        ("decoded_action", pa.int16()),
        ("decoded_expected", pa.float32()),
        ("decoded_realised", pa.uint8()),
    ]
    return pa.schema(fields, metadata=METADATA)


STEP_SCHEMA = pa.schema(
    [
        ("prompt", pa.string()),
        ("verifier", pa.string()),
        ("temperature", pa.float32()),
        ("top_p", pa.float32()),
        ("length", pa.int32()),
        ("action", pa.int16()),
        ("nodes", pa.int16()),
        ("expected", pa.float64()),  # E[tau + 1] given the tree
        ("variance", pa.float64()),  # of tau given the tree
        ("realised", pa.int16()),
    ],
    metadata=METADATA,
)


def versions() -> dict[str, int]:
    """What every manifest depends on beside its own inputs."""
    return {"schema_version": SCHEMA_VERSION, "rows_version": ROWS_VERSION}


def row_bytes(schema: pa.Schema) -> int:
    """Bytes of one row before compression; strings count as 24."""
    total = 0
    for field in schema:
        if pa.types.is_fixed_size_list(field.type):
            total += field.type.list_size * field.type.value_type.bit_width // 8
        else:
            total += 24 if pa.types.is_string(field.type) else field.type.bit_width // 8
    return total


def differences(recorded: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """`key: old -> new` for every dotted key whose value differs."""
    old, new = flat(recorded), flat(json.loads(json.dumps(current)))
    return [
        f"{key}: {_short(old.get(key))} -> {_short(new.get(key))}"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]


def listed_changes(changes: list[str]) -> str:
    """The first of them in one line."""
    more = f"; and {len(changes) - 2} more" if len(changes) > 2 else ""
    return "; ".join(changes[:2]) + more


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as dotted keys."""
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            result |= flat(value, f"{prefix}{key}.")
        else:
            result[f"{prefix}{key}"] = value
    return result


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


class TraceStore:
    """Shards below one folder, listed in `manifest.json`.

    Args:
        depends: everything the rows follow from; JSON values.

    Raises:
        InputError: the folder's manifest was made from something else; says what differs.
    """

    def __init__(self, folder: Path, depends: dict[str, Any]) -> None:
        self.folder = folder
        self.path = folder / "manifest.json"
        depends = json.loads(json.dumps({**versions(), **depends}))
        if self.path.exists():
            self.manifest = read_manifest(folder)
            recorded = self.manifest["depends"]
            changes = differences(recorded, depends)
            if changes:
                what = listed_changes(changes)
                raise InputError(f"{folder} was made from other inputs ({what}); choose another name= or remove it")
        elif any(folder.rglob("*.parquet")):
            raise InputError(f"{folder} holds shards but no manifest.json; choose another name= or remove it")
        else:
            self.manifest = {"depends": depends, "shards": {}}
            folder.mkdir(parents=True, exist_ok=True)
            self._write_manifest()

    def holds(self, name: str) -> bool:
        """Whether a shard is finished; one whose file was removed is not. InputError if the file has changed."""
        listed = self.manifest["shards"].get(name)
        if listed is None or not (self.folder / name).exists():
            return False
        check_shard(self.folder, name, listed)
        return True

    def write(self, name: str, table: pa.Table) -> None:
        """Write a shard under a temporary name, read it back and check it, then list it.

        Raises:
            InputError: a value is not finite, or the file cannot be written; names the column or the file.
        """
        _check_finite(name, table)
        path = self.folder / name
        partial = path.with_name(path.name + ".tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            pq.write_table(table, partial, compression="zstd")
            back = pq.read_table(partial)
            if back.schema.metadata != table.schema.metadata or not back.equals(table):
                raise InputError(f"{partial}: reads back differently from what was written")
            listed = {"rows": table.num_rows, "bytes": partial.stat().st_size, "sha256": sha256(partial)}
            _publish(partial, path)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise InputError(f"{partial}: cannot be written: {error}") from error
        self.manifest["shards"][name] = listed
        self._write_manifest()

    def rows(self, prefix: str = "") -> int:
        """Rows in finished shards whose names start with `prefix`."""
        return sum(s["rows"] for name, s in self.manifest["shards"].items() if name.startswith(prefix))

    def bytes(self, prefix: str = "") -> int:
        """Bytes of finished shards whose names start with `prefix`."""
        return sum(s["bytes"] for name, s in self.manifest["shards"].items() if name.startswith(prefix))

    def _write_manifest(self) -> None:
        partial = self.path.with_name("manifest.json.tmp")
        try:
            partial.write_text(json.dumps(self.manifest, indent=1, sort_keys=True) + "\n")
            _publish(partial, self.path)
        except OSError as error:
            raise InputError(f"{partial}: cannot be written: {error}") from error


def _publish(partial: Path, path: Path) -> None:
    """Rename, once the contents are on the disk: a file with its final name is whole, whatever happens."""
    with partial.open("rb") as file:
        os.fsync(file.fileno())
    partial.replace(path)


def to_table(rows: Sequence[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    """Rows by column name as a table."""
    return pa.table([_column(rows, field) for field in schema], schema=schema)


def _column(rows: Sequence[dict[str, Any]], field: pa.Field) -> pa.Array:
    values = [row[field.name] for row in rows]
    if not pa.types.is_fixed_size_list(field.type):
        return pa.array(values, field.type)
    own = field.type.value_type.to_pandas_dtype()
    flat = np.concatenate([np.zeros(0, own), *(np.asarray(value).reshape(-1) for value in values)])
    with np.errstate(over="ignore"):
        return pa.FixedSizeListArray.from_arrays(
            pa.array(flat.astype(own), field.type.value_type), field.type.list_size
        )


def _check_finite(name: str, table: pa.Table) -> None:
    for field in table.schema:
        column = table[field.name].combine_chunks()
        values = column.flatten() if pa.types.is_fixed_size_list(field.type) else column.drop_null()
        if pa.types.is_floating(values.type) and not np.isfinite(values.to_numpy(zero_copy_only=False)).all():
            raise InputError(
                f"{name}: {field.name}: a value is not finite in the column's precision; the models gave NaN or too "
                f"large numbers"
            )
