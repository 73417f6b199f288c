"""Traces as tensors for training.

Legend: B roots, D hidden width, F scalars, A actions.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from selector.actions import ActionSpace
from selector.baselines import best_static
from selector.latency import LatencyProfile, interpolated
from selector.schema import (
    HIDDEN_STATES,
    SCHEMA_VERSION,
    TRACE_SCALARS,
    InputError,
    check_shard,
    label_columns,
    read_manifest,
)


@dataclass
class Roots:
    """Roots of one split. `setting_B` numbers the sampling settings; `base_B` is the baseline's action index."""

    target_hidden_prev: Tensor
    draft_hidden_prev: Tensor
    draft_hidden_root: Tensor
    scalars: Tensor
    mean_BA: Tensor
    half_BA: Tensor
    realised_BA: Tensor
    seconds_BA: Tensor  # with a selector in the loop
    static_seconds_BA: Tensor  # without one
    setting_B: Tensor
    base_B: Tensor

    def __len__(self) -> int:
        return len(self.setting_B)

    def features(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in (*HIDDEN_STATES, "scalars")}

    def rows(self, index: Tensor | slice) -> Roots:
        return Roots(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def base_tokens_B(self) -> Tensor:
        return self.mean_BA.gather(-1, self.base_B.unsqueeze(-1))[:, 0]

    def base_seconds_B(self) -> Tensor:
        return self.static_seconds_BA.gather(-1, self.base_B.unsqueeze(-1))[:, 0]


def read_split(folder: Path, split: str) -> pa.Table:
    """All rows of a split of a trace store.

    Raises:
        InputError: there are none, or a file is damaged or of another schema version; names the file.
    """
    manifest = read_manifest(folder)
    found = manifest["depends"].get("schema_version")
    if found != SCHEMA_VERSION:
        raise InputError(f"{folder}: traces of schema version {found}; this program reads {SCHEMA_VERSION}")
    names = sorted(name for name in manifest["shards"] if name.startswith(f"{split}/"))
    if not names:
        raise InputError(f"{folder / split}: no traces there: run the data stage first")
    for name in names:
        check_shard(folder, name, manifest["shards"][name])
    return pa.concat_tables([pq.read_table(folder / name) for name in names])


def matrix(table: pa.Table, column: str) -> Tensor:
    """A column of equally long lists as float32 [B, n], or of numbers as float32 [B]."""
    array = table[column].combine_chunks()
    if pa.types.is_fixed_size_list(array.type):
        flat = array.flatten().to_numpy(zero_copy_only=False).astype(np.float32)
        return torch.from_numpy(flat).view(len(array), -1)
    return torch.from_numpy(array.to_numpy(zero_copy_only=False).astype(np.float32))


def to_roots(table: pa.Table, verifier: str, profile: LatencyProfile, space: ActionSpace) -> Roots:
    """Roots without baselines (`base_B` is 0 until `TracesModule.setup` has chosen them)."""
    columns = label_columns(verifier)
    if columns["mean"] not in table.column_names:
        raise InputError(f"the traces hold no labels for {verifier}: add it to verifiers and run the data stage again")
    length_B = matrix(table, "context_length")
    times = [profile.table(space.actions, verifier, selector) for selector in (True, False)]
    with_selector, without = (interpolated(seconds_LA, lengths_L, length_B) for lengths_L, seconds_LA in times)
    passes_B2 = torch.tensor([profile.pass_seconds(length) for length in length_B.tolist()])
    return Roots(
        **{name: matrix(table, name) for name in HIDDEN_STATES},
        scalars=torch.cat([torch.stack([matrix(table, name) for name in TRACE_SCALARS], dim=-1), passes_B2], dim=-1),
        mean_BA=matrix(table, columns["mean"]),
        half_BA=matrix(table, columns["half"]),
        realised_BA=matrix(table, columns["realised"]),
        seconds_BA=with_selector,
        static_seconds_BA=without,
        setting_B=_settings(table),
        base_B=torch.zeros(len(table), dtype=torch.int64),
    )


def _settings(table: pa.Table) -> Tensor:
    """A number for the sampling setting of each root, the same in every split; int64 [B]."""
    pairs = zip(matrix(table, "temperature").tolist(), matrix(table, "top_p").tolist(), strict=True)
    return torch.tensor([round(1e4 * temperature) * 100_000 + round(1e4 * top_p) for temperature, top_p in pairs])


class TracesModule(pl.LightningDataModule):
    """Training and validation roots of one verifier. Baselines are chosen on the training split alone."""

    def __init__(self, folder: Path, verifier: str, profile: LatencyProfile, batch: int, seed: int) -> None:
        super().__init__()
        self.folder, self.verifier, self.profile, self.batch, self.seed = folder, verifier, profile, batch, seed
        self.space = ActionSpace.default()

    def setup(self, stage: str | None = None) -> None:
        if hasattr(self, "train"):
            return
        self.train, self.validation = (
            to_roots(read_split(self.folder, split), self.verifier, self.profile, self.space)
            for split in ("train", "validation")
        )
        for setting in self.train.setting_B.unique().tolist():
            rows = self.train.setting_B == setting
            base = best_static(self.train.mean_BA[rows], self.train.static_seconds_BA[rows])
            for split in (self.train, self.validation):
                split.base_B[split.setting_B == setting] = base

    def train_dataloader(self) -> DataLoader[Roots]:
        generator = torch.Generator().manual_seed(self.seed)
        return _loader(self.train, self.batch, shuffle=True, generator=generator)

    def val_dataloader(self) -> DataLoader[Roots]:
        return _loader(self.validation, 4096)


def _loader(roots: Roots, batch: int, **kwargs: Any) -> DataLoader[Roots]:
    """Batches of rows; the data are small enough to stay in memory."""
    return DataLoader(range(len(roots)), batch, collate_fn=lambda index: roots.rows(torch.tensor(index)), **kwargs)  # type: ignore[arg-type]
