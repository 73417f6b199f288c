"""Recorded texts as a learner takes them, with the features of all their roots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import torch

from data_gen.features.recorded import ROW_NUMBERS, scalars_along
from data_gen.models.sampling import Sampling
from data_gen.traces import check_shard, read_manifest
from selector.schema import PAIR, InputError
from selector.train.data import Texts, to_texts


def read_texts(folder: Path, split: str, verifiers: Sequence[str]) -> Texts:
    """The texts of a split of a trace store that have roots.

    Raises:
        InputError: there is none, a file is damaged or of another version, or labels are missing.
    """
    manifest = read_manifest(folder)
    names = sorted(name for name in manifest["shards"] if name.startswith(f"{split}/"))
    if not names:
        raise InputError(f"{folder / split}: no traces there: run the data stage first")
    for name in names:
        check_shard(folder, name, manifest["shards"][name])
    table = pa.concat_tables([pq.read_table(folder / name) for name in names])
    table = table.filter(pc.greater(table["roots"], 0))  # a text may end before its first look-ahead does
    if table.num_rows == 0:
        raise InputError(f"{folder / split}: its texts end before any root has its look-ahead")
    return texts_of(table, verifiers)


def texts_of(table: pa.Table, verifiers: Sequence[str]) -> Texts:
    """Rows of a trace store, all with roots; InputError where labels are missing."""
    found_RF = np.concatenate([_scalars(table.slice(number, 1)) for number in range(table.num_rows)])
    wrong = [name for name, finite in zip(PAIR.names, np.isfinite(found_RF).all(0), strict=True) if not finite]
    if wrong:
        raise ValueError(f"scalars that were not computed, or are not finite: {', '.join(wrong)}")
    return to_texts(table, verifiers, torch.from_numpy(found_RF))


def _scalars(row: pa.Table) -> np.ndarray[Any, np.dtype[np.float32]]:
    value = {name: row[name][0] for name in ("tokens", "start", "temperature", "top_p", *ROW_NUMBERS)}
    sampling = Sampling(value["temperature"].as_py(), value["top_p"].as_py())
    numbers = {name: value[name].values.to_numpy() for name in ROW_NUMBERS}
    return scalars_along(value["tokens"].values.to_pylist(), value["start"].as_py(), sampling, numbers)
