"""The trace store: Parquet shards, one folder per split, and a manifest with their checksums and
what they depend on.

A row is a text, of a pair of models or of an engine's log. Features are not in it: `texts_of`
computes them from the tokens, entropies and probabilities, and `data_gen.texts.log_labels` from the
tokens and hits. The schema's metadata hold the format, and the action space that is labelled, as
JSON.

    prompt, kind, source     string         the prompt's id, kind and source
    temperature, top_p, min_p, draft_temperature
                             float64        its sampling setting; the draft's own may be null
    top_k                    int32          likewise; 0 keeps the whole vocabulary
    tokens                   int32 list     prompt and continuation
    start                    int32          position of the last prompt token, the first root
    roots                    int32          labelled roots: `start` and the positions after it
    draft_entropy            float32 list   roots: of the draft after the root's token, at
                                            temperature 1, nats
    target_prob, draft_prob  float32 list   roots: of the text's next token, after temperature and
                                            filtering
    hit                      float32 list   instead of these three, of a log: whether the drafter
                                            predicted it
    lookup.right             uint8 list     roots: how many tokens of a lookup agree with the text
    draft_rank               uint8 list     the draft's ranks of the tokens after the first root, up
                                            to `MOST_DEPTH` behind the last root; empty of a log
    <verifier>.survivals     float16 list   roots x survivals P(tau >= t | text) of the space's
                                            trees; NaN where a log does not tell them
    target_hidden_prev, ..   float16 list   roots x width, if recorded; every `hidden_stride`-th
                                            root from the second on
    hidden_stride            int32
    step_root, step_action, step_accepted
                             int32 lists    of the steps that decoded it; empty if there were none
    step_verifier            string         null likewise: the target alone sampled the text
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from data_gen.features.root import ROW_NUMBERS, scalars_along
from data_gen.models.sampling import Sampling
from data_gen.text_labels.copies import lookup_lengths
from selector.actions import ActionSpace
from selector.files import atomically
from selector.schema import (
    FORMAT,
    HIDDEN_STATES,
    LOOKUP_COLUMN,
    PAIR,
    RANK_COLUMN,
    InputError,
    sha256,
    survival_column,
)
from selector.train.data import Texts, to_texts

SPACE_KEY = "espalier_action_space"
HIT = "hit"


def text_schema(
    verifiers: Sequence[str], hidden: bool, space: ActionSpace, numbers: Sequence[str] = ROW_NUMBERS
) -> pa.Schema:
    """Schema of a trace row; `space` is that of the labelled trees, and `numbers` are the features'
    columns."""
    halves = [survival_column(verifier) for verifier in verifiers]
    if hidden:
        halves += HIDDEN_STATES
    fields = [
        ("prompt", pa.string()),
        ("kind", pa.string()),
        ("source", pa.string()),
        ("temperature", pa.float64()),
        ("top_p", pa.float64()),
        ("min_p", pa.float64()),
        ("draft_temperature", pa.float64()),
        ("top_k", pa.int32()),
        ("tokens", pa.list_(pa.int32())),
        ("start", pa.int32()),
        ("roots", pa.int32()),
        *((name, pa.list_(pa.float32())) for name in numbers),
        (LOOKUP_COLUMN, pa.list_(pa.uint8())),
        (RANK_COLUMN, pa.list_(pa.uint8())),
        *((name, pa.list_(pa.float16())) for name in halves),
        ("hidden_stride", pa.int32()),
        ("step_root", pa.list_(pa.int32())),
        ("step_action", pa.list_(pa.int32())),
        ("step_accepted", pa.list_(pa.int32())),
        ("step_verifier", pa.string()),
    ]
    metadata = {"espalier_format": str(FORMAT), SPACE_KEY: json.dumps(space.to_json())}
    return pa.schema(fields, metadata=metadata)


def space_of(table: pa.Table) -> ActionSpace:
    return ActionSpace.of_json(json.loads(table.schema.metadata[SPACE_KEY.encode()]))


def text_row(
    name: str,
    source: str,
    kind: str,
    sampling: Sampling,
    tokens: Sequence[int],
    start: int,
    roots: int,
    longest_copy: int,
) -> dict[str, Any]:
    """What a row holds without a model's numbers; no steps, and no stride."""
    return {
        "prompt": name,
        "kind": kind,
        "source": source,
        **asdict(sampling),
        "tokens": tokens,
        "start": start,
        "roots": roots,
        LOOKUP_COLUMN: lookup_lengths(tokens, start, roots, longest_copy),
        RANK_COLUMN: (),
        "hidden_stride": 0,
        "step_root": (),
        "step_action": (),
        "step_accepted": (),
        "step_verifier": None,
    }


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a trace store: `depends` (the inputs of its rows) and `shards` (rows, bytes,
    sha256); InputError where it is missing, damaged or of another version."""
    path = folder / "manifest.json"
    try:
        manifest = json.loads(path.read_text())
        recorded_format = manifest["depends"].get("format")
        if "shards" not in manifest:
            raise KeyError("shards")
    except FileNotFoundError as error:
        raise InputError(f"{path} does not exist: run the data stage first") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(
            f"{path} is damaged: remove {folder} and run the data stage again"
        ) from error
    if recorded_format != FORMAT:
        reason = f"traces of format {recorded_format}; this program reads {FORMAT}"
        raise InputError(
            f"{folder}: {reason}: remove it, or choose another name=, and run the data stage again"
        )
    return dict(manifest)


def check_shard(folder: Path, name: str, listed: dict[str, Any]) -> None:
    """InputError where the file is missing or its checksum is not the listed one."""
    path = folder / name
    if not path.exists():
        raise InputError(f"{path} is missing: run the data stage again")
    if sha256(path) != listed["sha256"]:
        raise InputError(
            f"{path} is damaged (truncated or changed): remove it and run the data stage again"
        )


def differences(recorded: dict[str, Any], current: dict[str, Any]) -> str:
    """`key: old -> new` for the first two dotted keys whose value differs, and how many more do;
    empty if none does."""
    old = flat(recorded)
    new = flat(json.loads(json.dumps(current)))
    descriptions = []
    for key in sorted({*old, *new}):
        old_value, new_value = old.get(key), new.get(key)
        if old_value != new_value:
            values = [json.dumps(value)[:60] for value in (old_value, new_value)]
            descriptions.append(f"{key}: {values[0]} -> {values[1]}")
    summary = "; ".join(descriptions[:2])
    if len(descriptions) > 2:
        summary += f"; and {len(descriptions) - 2} more"
    return summary


def flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    result: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            result.update(flat(value, f"{prefix}{key}."))
        else:
            result[f"{prefix}{key}"] = value
    return result


class TraceStore:
    """The shards in one folder, which the first one makes, listed in `manifest.json`; `depends` is
    everything that the rows depend on, as JSON values. InputError where the folder's traces were
    made from other inputs; says what differs."""

    def __init__(self, folder: Path, depends: dict[str, Any]) -> None:
        self.folder = folder
        self.path = folder / "manifest.json"
        depends = json.loads(json.dumps({"format": FORMAT, **depends}))
        if self.path.exists():
            self.manifest = read_manifest(folder)
            changes = differences(self.manifest["depends"], depends)
            if changes:
                raise InputError(
                    f"{folder}: made from other inputs ({changes}); choose another name= or "
                    "remove it"
                )
        else:
            self.manifest = {"depends": depends, "shards": {}}

    def holds(self, name: str) -> bool:
        """Whether a shard is finished and its file exists; InputError if the file has changed."""
        listed = self.manifest["shards"].get(name)
        if listed is None or not (self.folder / name).exists():
            return False
        check_shard(self.folder, name, listed)
        return True

    def write(self, name: str, table: pa.Table) -> None:
        """Write a shard under a temporary name, then list it; InputError where a value is not
        finite, or the file cannot be written."""
        _check_finite(name, table)
        with atomically(self.folder / name) as partial:
            pq.write_table(table, partial, compression="zstd")
            size = partial.stat().st_size
            digest = sha256(partial)
        self.manifest["shards"][name] = {
            "rows": table.num_rows,
            "bytes": size,
            "sha256": digest,
        }
        self._write_manifest()

    def total(self, what: str) -> int:
        """The `rows` or the `bytes` of all finished shards."""
        return sum(shard[what] for shard in self.manifest["shards"].values())

    def _write_manifest(self) -> None:
        with atomically(self.path) as partial:
            partial.write_text(json.dumps(self.manifest, indent=1, sort_keys=True) + "\n")


def read_texts(folder: Path, split: str, verifiers: Sequence[str]) -> Texts:
    """The texts of a split of a pair's trace store; InputError as `read_rows`, and where labels are
    missing."""
    return texts_of(read_rows(folder, split), verifiers)


def read_rows(folder: Path, split: str) -> pa.Table:
    """The rows of a split that have roots; InputError for none, and for a damaged file or one of
    another version."""
    manifest = read_manifest(folder)
    names = sorted(name for name in manifest["shards"] if name.startswith(f"{split}/"))
    if not names:
        raise InputError(f"{folder / split}: no traces there: run the data stage first")
    for name in names:
        check_shard(folder, name, manifest["shards"][name])
    table = pa.concat_tables([pq.read_table(folder / name) for name in names])
    # a short text has no root with its look-ahead
    table = table.filter(pc.greater(table["roots"], 0))
    if table.num_rows == 0:
        raise InputError(f"{folder / split}: its texts end before any root has its look-ahead")
    return table


def texts_of(table: pa.Table, verifiers: Sequence[str]) -> Texts:
    """Rows of a trace store, all with roots; InputError where labels are missing."""
    scalars = []
    for number in range(table.num_rows):
        tokens = table["tokens"][number].values.to_pylist()
        start = table["start"][number].as_py()
        temperature = table["temperature"][number].as_py()
        sampling = Sampling(temperature, table["top_p"][number].as_py())
        numbers = {name: table[name][number].values.to_numpy() for name in ROW_NUMBERS}
        scalars.append(scalars_along(tokens, start, sampling, numbers))
    scalars_RF = np.concatenate(scalars)
    wrong = []
    for name, column_R in zip(PAIR.names, scalars_RF.T, strict=True):
        if not np.isfinite(column_R).all():
            wrong.append(name)
    if wrong:
        raise ValueError(f"scalars that were not computed, or are not finite: {', '.join(wrong)}")
    lookups = ActionSpace.with_lookups().lookups
    return to_texts(table, verifiers, torch.from_numpy(scalars_RF), space_of(table), lookups)


def to_table(rows: Sequence[dict[str, Any]], schema: pa.Schema) -> pa.Table:
    """Rows, each a dictionary by column name, as a table."""
    columns = []
    for field in schema:
        values = [row[field.name] for row in rows]
        if pa.types.is_list(field.type):
            dtype = field.type.value_type.to_pandas_dtype()
            with np.errstate(over="ignore"):
                values = [np.asarray(value).reshape(-1).astype(dtype) for value in values]
        columns.append(pa.array(values, field.type))
    return pa.table(columns, schema=schema)


def _check_finite(name: str, table: pa.Table) -> None:
    is_log = HIT in table.column_names
    for field in table.schema:
        is_list = pa.types.is_list(field.type)
        if is_log and is_list and pa.types.is_float16(field.type.value_type):
            continue  # labels that a log does not tell are NaN
        column = table[field.name].combine_chunks()
        values = column.flatten() if is_list else column.drop_null()
        if not pa.types.is_floating(values.type):
            continue
        if not np.isfinite(values.to_numpy(zero_copy_only=False)).all():
            reason = (
                "a value is not finite in the column's precision; the models gave NaN or too large "
                "numbers"
            )
            raise InputError(f"{name}: {field.name}: {reason}")
