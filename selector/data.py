"""Traces as tensors for training.

Legend: B roots, D hidden width, F scalars, A actions, O options (every action with each verifier), S samples of a root,
T trunk tokens, U verifiers.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

from selector.actions import ActionSpace
from selector.baselines import best_static, worth_most
from selector.latency import LatencyProfile, interpolated
from selector.network import picked
from selector.schema import (
    CONTEXT,
    HIDDEN_STATES,
    SCALAR_NAMES,
    SCHEMA_VERSION,
    TRACE_SCALARS,
    TRUNK_COLUMNS,
    TRUNK_SCALARS,
    InputError,
    check_shard,
    label_columns,
    read_manifest,
)
from selector.speed import by_text, over_texts

VALIDATION_BATCH = 4096  # roots at once in one process


@dataclass
class Roots:
    """Roots of one split, and the trunks drafted there.

    `setting_B` numbers the sampling settings, `kind_B` the kinds of prompts, `prompt_B` the prompts; `base_B` is the
    baseline's action index; `weight_B` is how many decoding steps a root stands for, in sums over roots. Labels and
    times of actions are those with the verifier that each action has under the root's setting, `verifier_BA`.
    """

    target_hidden_prev: Tensor
    draft_hidden_prev: Tensor
    draft_hidden_root: Tensor
    scalars: Tensor
    mean_BA: Tensor
    error_BA: Tensor
    half_BA: Tensor
    realised_BA: Tensor
    seconds_BA: Tensor  # with a selector in the loop
    static_seconds_BA: Tensor  # without one
    setting_B: Tensor
    step_B: Tensor  # bool: a decoder's own step, not every n-th token
    kind_B: Tensor
    prompt_B: Tensor
    weight_B: Tensor
    base_B: Tensor
    trunk_hidden_BSTD: Tensor  # half precision, as stored
    trunk_scalars_BSTF: Tensor  # in the order of TRUNK_SCALARS
    trunk_entropy_BST: Tensor  # of what each token was drawn from, in nats
    trunk_accept_BST: Tensor  # P(each token is accepted | the tokens before it are), min(1, p/q)
    trunk_BSA: Tensor  # E[tau + 1] given each sample's own trunk
    verifier_BA: Tensor  # int64
    every_mean_BO: Tensor  # with all verifiers, as are those that follow: what a network learns
    every_half_BO: Tensor
    every_error_BO: Tensor
    every_trunk_BSO: Tensor

    def __len__(self) -> int:
        return len(self.setting_B)

    def features(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in (*HIDDEN_STATES, "scalars")}

    def rows(self, index: Tensor | slice) -> Roots:
        return Roots(**{f.name: getattr(self, f.name)[index] for f in fields(self)})

    def speeds(self, tokens_BX: Tensor, seconds_BX: Tensor) -> Tensor:
        """Tokens per second over whole texts, where steps at these roots yield and take so much; [X]."""
        weight_B1 = self.weight_B.unsqueeze(-1)
        texts_2B = torch.stack([self.setting_B, self.prompt_B])
        text_B = texts_2B.unique(dim=1, return_inverse=True)[1]
        return over_texts(by_text(weight_B1 * tokens_BX, text_B), by_text(weight_B1 * seconds_BX, text_B))

    def efficiencies(self, tokens_BX: Tensor) -> Tensor:
        """Tokens per step, over whole texts, [X]."""
        return self.speeds(tokens_BX, torch.ones(len(self), 1))

    def best_static(self, allowed_A: Tensor | None = None) -> tuple[int, float]:
        """The fastest action, by index, if always the same is taken; and its tokens per second."""
        speed_A = self.speeds(self.mean_BA, self.static_seconds_BA)
        action = best_static(speed_A, allowed_A)
        return action, float(speed_A[action])

    def along_trunks(self, tokens: slice) -> tuple[Tensor, Tensor]:
        """What is known after so many trunk tokens, 0 the root: hidden states [B, S, t, D], scalars [B, S, t, F]."""
        hidden, scalars = self.trunk_hidden_BSTD, self.trunk_scalars_BSTF
        root_F = torch.tensor([scalar in CONTEXT for scalar in TRUNK_SCALARS], device=scalars.device)
        at_root = scalars[:, :, :1] * root_F  # what the first token was drawn from is the root's own state
        hidden = torch.cat([hidden[:, :, :1], hidden], dim=2)
        return hidden[:, :, tokens].float(), torch.cat([at_root, scalars], dim=2)[:, :, tokens]

    def sampling(self) -> tuple[float, float]:
        """Temperature and top-p of the first root."""
        temperature, top_p = (self.scalars[0, SCALAR_NAMES.index(name)].item() for name in ("temperature", "top_p"))
        return round(temperature, 6), round(top_p, 6)

    def base_tokens_B(self) -> Tensor:
        return self.mean_BA.gather(-1, self.base_B.unsqueeze(-1))[:, 0]

    def base_seconds_B(self) -> Tensor:
        return self.static_seconds_BA.gather(-1, self.base_B.unsqueeze(-1))[:, 0]


def met_in_decoding(roots: Roots) -> Roots:
    """The decoder's own steps: what trees and speeds are tuned on, and judged by. All roots where there are none.

    Each step follows a rejection, so a decoder meets hard roots more often than every n-th token does, and easy text is
    covered in few of them.
    """
    return roots.rows(roots.step_B.nonzero().flatten()) if bool(roots.step_B.any()) else roots


def of_setting(roots: Roots, setting: int) -> Roots:
    """The roots of one sampling setting."""
    return roots.rows((roots.setting_B == setting).nonzero().flatten())


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


def matrix(table: pa.Table, column: str, dtype: type[np.floating[Any]] = np.float32) -> Tensor:
    """A column of equally long lists as [B, n], or of numbers as [B]."""
    array = table[column].combine_chunks()
    if pa.types.is_fixed_size_list(array.type):
        flat = array.flatten().to_numpy(zero_copy_only=False).astype(dtype)
        return torch.from_numpy(flat).view(len(array), -1)
    return torch.from_numpy(array.to_numpy(zero_copy_only=False).astype(dtype))


def to_roots(
    table: pa.Table,
    verifiers: Sequence[str],
    profile: LatencyProfile,
    space: ActionSpace,
    verifier_of: Mapping[int, Sequence[int]] | None = None,
) -> Roots:
    """Roots without baselines (`base_B` is 0 until `TracesModule.setup` has chosen them).

    Args:
        verifier_of: as from `fastest_verifiers`; the first verifier verifies everything if None.
    """
    setting_B, length_B = _settings(table), matrix(table, "context_length")
    verifier_BA = torch.zeros(len(table), len(space), dtype=torch.int64)
    for setting, verifier_A in (verifier_of or {}).items():
        verifier_BA[setting_B == setting] = torch.tensor(verifier_A)

    def labels(kind: str) -> Tensor:
        return torch.cat([_labels(table, verifier, kind) for verifier in verifiers], dim=-1)

    def seconds(selector: bool) -> Tensor:
        every = [_seconds(table, verifier, profile, space, selector) for verifier in verifiers]
        return picked(torch.cat(every, dim=-1), verifier_BA)

    passes_B2 = torch.tensor([profile.pass_seconds(length) for length in length_B.tolist()])
    samples = len(_labels(table, verifiers[0], "trunk")[0]) // len(space)
    trunks = [_labels(table, verifier, "trunk").unflatten(-1, (samples, -1)) for verifier in verifiers]
    mean_BO, half_BO, error_BO = (labels(kind) for kind in ("mean", "half", "error"))
    trunk_BSO = torch.cat(trunks, dim=-1)
    return Roots(
        **{name: matrix(table, name) for name in HIDDEN_STATES},
        scalars=torch.cat([torch.stack([matrix(table, name) for name in TRACE_SCALARS], dim=-1), passes_B2], dim=-1),
        mean_BA=picked(mean_BO, verifier_BA),
        error_BA=picked(error_BO, verifier_BA),
        half_BA=picked(half_BO, verifier_BA),
        realised_BA=picked(labels("realised"), verifier_BA),
        seconds_BA=seconds(selector=True),
        static_seconds_BA=seconds(selector=False),
        setting_B=setting_B,
        weight_B=matrix(table, "weight"),
        step_B=_steps(table),
        kind_B=torch.tensor([kind_number(kind) for kind in table["kind"].to_pylist()]),
        prompt_B=_prompts(table),
        base_B=torch.zeros(len(table), dtype=torch.int64),
        trunk_BSA=picked(trunk_BSO, verifier_BA.unsqueeze(1)),
        verifier_BA=verifier_BA,
        every_mean_BO=mean_BO,
        every_half_BO=half_BO,
        every_error_BO=error_BO,
        every_trunk_BSO=trunk_BSO,
        **_trunks(table, samples, space),
    )


def fastest_verifiers(
    table: pa.Table, verifiers: Sequence[str], profile: LatencyProfile, space: ActionSpace
) -> dict[int, tuple[int, ...]]:
    """For every sampling setting the position of each action's verifier: the one with which it is worth most."""
    result = {}
    for setting in _settings(table).unique().tolist():
        mine = table.filter(pa.array((_settings(table) == setting).numpy()))
        mine = mine.filter(pa.array(_steps(mine).numpy())) if bool(_steps(mine).any()) else mine
        weight_B1, text_B = matrix(mine, "weight").unsqueeze(-1), _prompts(mine)
        steps_P1 = by_text(weight_B1, text_B)
        tokens, seconds = [], []
        for verifier in verifiers:
            tokens_PA = by_text(weight_B1 * _labels(mine, verifier, "mean"), text_B)
            seconds_PA = by_text(weight_B1 * _seconds(mine, verifier, profile, space, selector=False), text_B)
            tokens.append(over_texts(tokens_PA, steps_P1))
            seconds.append(tokens[-1] / over_texts(tokens_PA, seconds_PA))
        result[setting] = worth_most(torch.stack(tokens), torch.stack(seconds))
    return result


def _labels(table: pa.Table, verifier: str, kind: str) -> Tensor:
    column = label_columns(verifier)[kind]
    if column not in table.column_names:
        raise InputError(f"the traces hold no labels for {verifier}: add it to verifiers and run the data stage again")
    return matrix(table, column)


def _seconds(table: pa.Table, verifier: str, profile: LatencyProfile, space: ActionSpace, selector: bool) -> Tensor:
    """Predicted step times, [B, A]."""
    length_B, filtered_B1 = matrix(table, "context_length"), matrix(table, "top_p").unsqueeze(-1) < 1
    tables = [profile.table(space.actions, verifier, selector, filtered=filtered) for filtered in (True, False)]
    filtered_BA, plain_BA = (interpolated(seconds_LA, lengths_L, length_B) for lengths_L, seconds_LA in tables)
    return torch.where(filtered_B1, filtered_BA, plain_BA)


def _prompts(table: pa.Table) -> Tensor:
    """A number for the prompt of each root, int64 [B]."""
    return torch.from_numpy(np.unique(table["prompt"].to_numpy(zero_copy_only=False), return_inverse=True)[1])


def _steps(table: pa.Table) -> Tensor:
    """Whether a root is one of the decoder's own steps, bool [B]."""
    return torch.tensor([kind == "step" for kind in table["root_kind"].to_pylist()])


def _trunks(table: pa.Table, samples: int, space: ActionSpace) -> dict[str, Tensor]:
    """What is known along every sample's trunk."""
    shape = (samples, space.decisions)
    entropy_BST, logprob_BST, accept_BST = (
        matrix(table, TRUNK_COLUMNS[name]).unflatten(-1, shape) for name in ("token_entropy", "token_logprob", "accept")
    )
    known = {
        "drafted": torch.arange(1.0, space.decisions + 1).expand_as(logprob_BST),
        "token_logprob": logprob_BST,
        "path_logprob": logprob_BST.cumsum(-1),
        **{
            name: matrix(table, name)[:, None, None].expand_as(logprob_BST)
            for name in (scalar.name for scalar in CONTEXT)
        },
    }
    hidden_B = matrix(table, TRUNK_COLUMNS["hidden"], np.float16)
    return {
        "trunk_hidden_BSTD": hidden_B.unflatten(-1, (*shape, -1)),
        "trunk_scalars_BSTF": torch.stack([known[scalar.name] for scalar in TRUNK_SCALARS], dim=-1),
        "trunk_entropy_BST": entropy_BST,
        "trunk_accept_BST": accept_BST,
    }


def kind_number(kind: str) -> int:
    """A number for a kind of prompts, the same in every split."""
    return zlib.crc32(kind.encode())


def setting_number(temperature: float, top_p: float) -> int:
    """A number for a sampling setting, the same in every split."""
    return round(1e4 * temperature) * 100_000 + round(1e4 * top_p)


def _settings(table: pa.Table) -> Tensor:
    """A number for the sampling setting of each root, the same in every split; int64 [B]."""
    pairs = zip(matrix(table, "temperature").tolist(), matrix(table, "top_p").tolist(), strict=True)
    return torch.tensor([setting_number(temperature, top_p) for temperature, top_p in pairs])


class TracesModule(pl.LightningDataModule):
    """Training and validation roots of one verifier, or of several of which each action has its own.

    What is tuned is tuned on the training split alone: baselines, and every action's verifier. Where several processes
    train, each takes its part of every batch; and of the validation split its own roots, each root once, so that what
    is summed over the processes is that of the whole split.

    Args:
        batch: roots of a training step, over all processes.

    Attributes:
        verifier_of: by sampling setting, the position in `verifiers` of every action's own.
    """

    def __init__(self, folder: Path, verifiers: Sequence[str], profile: LatencyProfile, batch: int, seed: int) -> None:
        super().__init__()
        self.folder, self.verifiers, self.profile, self.batch, self.seed = folder, verifiers, profile, batch, seed
        self.space = ActionSpace.default()
        self.verifier_of: dict[int, tuple[int, ...]] = {}

    def setup(self, stage: str | None = None) -> None:
        if hasattr(self, "train"):
            return
        tables = [read_split(self.folder, split) for split in ("train", "validation")]
        self.verifier_of = fastest_verifiers(tables[0], self.verifiers, self.profile, self.space)
        self.train, self.validation = (
            to_roots(table, self.verifiers, self.profile, self.space, self.verifier_of) for table in tables
        )
        for setting in self.train.setting_B.unique().tolist():
            tuned = met_in_decoding(of_setting(self.train, setting))
            base, _ = tuned.best_static()
            for split in (self.train, self.validation):
                split.base_B[split.setting_B == setting] = base

    def with_roots(self, train: Roots, validation: Roots) -> TracesModule:
        """The same traces, set up with other roots; baselines stay as they are."""
        other = TracesModule(self.folder, self.verifiers, self.profile, self.batch, self.seed)
        other.verifier_of = self.verifier_of
        other.train, other.validation = train, validation
        return other

    def train_dataloader(self) -> DataLoader[Roots]:
        processes, rank = self._process()
        if processes == 1:
            generator = torch.Generator().manual_seed(self.seed)
            return _loader(self.train, batch_size=self.batch, shuffle=True, generator=generator)
        every = range(len(self.train))
        sampler: DistributedSampler[int] = DistributedSampler(every, processes, rank, seed=self.seed)  # type: ignore[arg-type]
        return _loader(self.train, batch_size=self.batch // processes, sampler=sampler)

    def val_dataloader(self) -> DataLoader[Roots]:
        return _loader(self.validation, batch_sampler=shares(len(self.validation), *self._process()))

    def _process(self) -> tuple[int, int]:
        """How many processes there are, and the number of this one."""
        return (self.trainer.world_size, self.trainer.global_rank) if self.trainer is not None else (1, 0)


def shares(roots: int, processes: int, rank: int) -> list[list[int]]:
    """Batches of one process's own roots, none twice; as many in every process, which wait for one another.

    Raises:
        InputError: there are fewer roots than processes.
    """
    if roots < processes:
        raise InputError(f"train.devices: {processes} processes for {roots} validation roots")
    batches = -(-roots // (processes * VALIDATION_BATCH))
    return [part.tolist() for part in torch.arange(rank, roots, processes).tensor_split(batches)]


def _loader(roots: Roots, **kwargs: Any) -> DataLoader[Roots]:
    """Batches of rows; the data are small enough to stay in memory."""
    return DataLoader(range(len(roots)), collate_fn=partial(_rows, roots), **kwargs)  # type: ignore[arg-type]


def _rows(roots: Roots, index: list[int]) -> Roots:
    return roots.rows(torch.tensor(index))
