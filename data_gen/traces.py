"""The trace store: Parquet shards, one folder per split, and a manifest that says what they were made from.

A shard is written under a temporary name, read back, and renamed; the manifest then lists its checksum. A shard that
the manifest lists and that has changed since is an error, never silently used or made again.

Columns of a root (schema version in `selector.schema`; K, A as there):

    prompt, kind         string      the prompt's id and kind
    root_kind            string      'step': a root of the decoder itself; 'stride': every n-th token
    root_token           int32
    target_hidden_prev, draft_hidden_prev, draft_hidden_root   float16 lists
    <scalar features>    float32     the names of `selector.schema.TRACE_SCALARS`: pass times belong to a machine
    <verifier>.mean, .error, .half   float16 lists, one value per action
    <verifier>.realised  uint8 list
    decoded_verifier, decoded_action, decoded_expected, decoded_realised
                         of the tree really decoded at this root; null at 'stride' roots
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from selector.schema import (
    HIDDEN_STATES,
    SCHEMA_VERSION,
    TRACE_SCALARS,
    InputError,
    check_shard,
    label_columns,
    read_manifest,
    sha256,
)

METADATA = {"espalier_schema_version": str(SCHEMA_VERSION)}


def root_schema(hidden_widths: Sequence[int], verifiers: Sequence[str], actions: int) -> pa.Schema:
    """Schema of a trace row."""
    fields = [
        ("prompt", pa.string()),
        ("kind", pa.string()),
        ("root_kind", pa.string()),
        ("root_token", pa.int32()),
        *((name, pa.list_(pa.float16(), d)) for name, d in zip(HIDDEN_STATES, hidden_widths, strict=True)),
        *((name, pa.float32()) for name in TRACE_SCALARS),
    ]
    for verifier in verifiers:
        for kind, column in label_columns(verifier).items():
            fields.append((column, pa.list_(pa.uint8() if kind == "realised" else pa.float16(), actions)))
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
        ("seconds", pa.float64()),
    ],
    metadata=METADATA,
)


def row_bytes(schema: pa.Schema) -> int:
    """Bytes of one row before compression; strings count as 24."""
    total = 0
    for field in schema:
        if pa.types.is_fixed_size_list(field.type):
            total += field.type.list_size * field.type.value_type.bit_width // 8
        else:
            total += 24 if pa.types.is_string(field.type) else field.type.bit_width // 8
    return total


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
        depends = json.loads(json.dumps({"schema_version": SCHEMA_VERSION, **depends}))
        if self.path.exists():
            self.manifest = read_manifest(folder)
            recorded = self.manifest["depends"]
            differing = sorted(k for k in {*recorded, *depends} if recorded.get(k) != depends.get(k))
            if differing:
                raise InputError(
                    f"{folder} was made with other values of {', '.join(differing)}; choose another name= or remove it"
                )
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

    def write(self, name: str, rows: list[dict[str, Any]], schema: pa.Schema) -> None:
        """Write a shard, read it back and check it, then list it.

        Raises:
            InputError: a value is not finite, or the file cannot be written; names the file.
        """
        path = self.folder / name
        partial = path.with_name(path.name + ".tmp")
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pa.table([_column(rows, field) for field in schema], schema=schema)
        try:
            pq.write_table(table, partial, compression="zstd")
            back = pq.read_table(partial)
        except OSError as error:
            raise InputError(f"{partial}: cannot be written: {error}") from error
        if not back.equals(table):
            raise InputError(f"{partial}: reads back differently from what was written")
        partial.replace(path)
        self.manifest["shards"][name] = {"rows": len(rows), "bytes": path.stat().st_size, "sha256": sha256(path)}
        self._write_manifest()

    def rows(self, prefix: str = "") -> int:
        """Rows in finished shards whose names start with `prefix`."""
        return sum(s["rows"] for name, s in self.manifest["shards"].items() if name.startswith(prefix))

    def bytes(self, prefix: str = "") -> int:
        """Bytes of finished shards whose names start with `prefix`."""
        return sum(s["bytes"] for name, s in self.manifest["shards"].items() if name.startswith(prefix))

    def _write_manifest(self) -> None:
        partial = self.path.with_name("manifest.json.tmp")
        partial.write_text(json.dumps(self.manifest, indent=1, sort_keys=True) + "\n")
        partial.replace(self.path)


def _column(rows: list[dict[str, Any]], field: pa.Field) -> pa.Array:
    values = [row[field.name] for row in rows]
    if not pa.types.is_fixed_size_list(field.type):
        return pa.array(values, field.type)
    flat = np.concatenate([np.asarray(value) for value in values])
    with np.errstate(over="ignore"):
        flat = flat.astype(field.type.value_type.to_pandas_dtype())
    if flat.dtype.kind == "f" and not np.isfinite(flat).all():
        raise InputError(
            f"{field.name}: a value is not finite in half precision; the models gave NaN or too large numbers"
        )
    return pa.FixedSizeListArray.from_arrays(pa.array(flat, field.type.value_type), field.type.list_size)
