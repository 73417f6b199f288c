"""Traces as tensors: texts with the features and labels of all their roots; `Timed` adds the times
of a machine.

Legend: X texts, R roots of all texts, F scalar features, D hidden width, S survivals, A actions, L
    context lengths.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import compress
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from selector.actions import MOST_DEPTH, Action, ActionSpace
from selector.latency import LatencyProfile
from selector.runtime.tokens import TokenStatistics
from selector.sampling import Sampling
from selector.schema import (
    HIDDEN_STATES,
    LOOKUP_COLUMN,
    PAIR,
    RANK_COLUMN,
    InputError,
    Schema,
    survival_column,
)
from selector.tables import interpolated_at, places
from selector.train.ranked import along_ranks
from selector.train.replay import monotone

SPLITS = ("train", "validation", "test")


@dataclass
class Texts:
    """Texts of one split. The roots of a text follow one another.

    Attributes:
        size_X: the number of roots, int64.
        setting_X: a position in `settings`, int64.
        scalars_RF: float32; those of a pair begin at second roots, and are zeros at first ones.
        length_R: committed tokens, the root token included, int64.
        survivals: of trees, by verifier, float16 [R, S].
        lookup_R: how many tokens of a lookup agree with the text, uint8.
        rank_RD: the draft's ranks of the next D tokens of the text, each after the tokens before
            it, uint8 [R, D]; no columns of a log.
        drafted_R: of the chain's survivals, how many were observed; the others are imputed from a
            log's steps, uint8.
        hidden: by name, float16 [rows, D]; empty where the traces hold none.
        hidden_R: a row of `hidden`, int64; -1 where there is none.
        schema: of the scalars.
        tokens: of a log, the statistics by token of its training texts, which features hold.
    """

    samplings: list[Sampling]
    size_X: Tensor
    sampling_X: Tensor
    kind_X: list[str]
    source_X: list[str]
    prompt_X: list[str]
    scalars_RF: Tensor
    length_R: Tensor
    survivals: dict[str, Tensor]
    lookup_R: Tensor
    drafted_R: Tensor
    rank_RD: Tensor = field(default_factory=lambda: torch.zeros(0, 0, dtype=torch.uint8))
    hidden: dict[str, Tensor] = field(default_factory=dict)
    hidden_R: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64))
    schema: Schema = PAIR
    # the actions that may be chosen
    space: ActionSpace = field(default_factory=ActionSpace.of_pairs)
    # the delayed trees whose survivals are there
    labelled: ActionSpace = field(default_factory=ActionSpace.recorded)
    tokens: TokenStatistics | None = None

    def __len__(self) -> int:
        return len(self.size_X)

    @cached_property
    def text_R(self) -> Tensor:
        """The text of each root, int64."""
        return torch.arange(len(self)).repeat_interleave(self.size_X)

    @cached_property
    def number_R(self) -> Tensor:
        """How many roots of the same text come before each root, int64."""
        return torch.arange(len(self.text_R)) - (self.size_X.cumsum(0) - self.size_X)[self.text_R]

    @cached_property
    def unknown_R(self) -> Tensor:
        """Whether a root has no features, bool: the first one of a pair's text."""
        return (self.number_R == 0) & (self.schema is PAIR)

    @cached_property
    def source_number_X(self) -> Tensor:
        """The source of each text as a number, int64."""
        return torch.from_numpy(np.unique(self.source_X, return_inverse=True)[1])

    def of_sampling(self, sampling: Sampling) -> Texts:
        """The texts of one sampling setting; InputError where there are none."""
        if sampling not in self.samplings:
            raise InputError(f"the traces hold no texts of {sampling}")
        return self.take((self.sampling_X == self.samplings.index(sampling)).nonzero()[:, 0])

    def take(self, index_X: Tensor) -> Texts:
        """Some of the texts, in the order of the whole."""
        chosen = torch.zeros(len(self), dtype=torch.bool)
        chosen[index_X] = True
        rows_R = chosen[self.text_R]
        survivals = {name: labels_RS[rows_R] for name, labels_RS in self.survivals.items()}
        taken: dict[str, Any] = {"survivals": survivals}
        for attribute in fields(self):
            name = attribute.name
            values = getattr(self, name)
            if name.endswith("_X") and isinstance(values, list):
                taken[name] = list(compress(values, chosen.tolist()))
            elif name.endswith("_X"):
                taken[name] = values[chosen]
            elif name.endswith(("_R", "_RF", "_RD")) and len(values):
                taken[name] = values[rows_R]
        return replace(self, **taken)

    def labels(self, verifier: str, rows: Tensor | slice, space: ActionSpace) -> Tensor:
        """Survivals of a space's actions at some roots, float32 [rows, S]. Those of lookups and of
        shapes by rank are 0 or 1: their nodes are certain, so the path along the text is accepted
        as far as the tree has it, and in one tree the longer of two paths is."""
        drafted_RS = self.survivals[verifier][rows]
        copied_R = self.lookup_R[rows]
        labels_RS = torch.zeros(len(copied_R), len(space.survivals))
        labels_RS[:, : space.tree_survivals] = drafted_RS[:, space.positions_in(self.labelled)]
        for action in (Action.copy(max(space.lookups, default=0)), *space.ranked):
            accepted_R = copied_R.clamp(max=action.copied)
            if action.ranks:
                along_R = along_ranks(self.rank_RD[rows], action.ranks)
                accepted_R = torch.maximum(accepted_R, along_R)
            is_reached_RD = accepted_R.unsqueeze(-1) >= torch.arange(1, action.depth + 1)
            labels_RS[:, space.positions(action)] = is_reached_RD.float()
        return labels_RS

    def observed(self, verifier: str, rows: Tensor | slice, space: ActionSpace) -> Tensor:
        """The labels of some roots as `labels` gives them, but NaN where they were imputed."""
        labels_RS = self.labels(verifier, rows, space)
        depth_D = torch.arange(1, space.depth + 1)
        is_imputed_RD = depth_D > self.drafted_R[rows].unsqueeze(-1)
        labels_RS[:, : space.depth].masked_fill_(is_imputed_RD, torch.nan)
        return labels_RS

    def scalar(self, name: str) -> Tensor:
        """One scalar feature, float32 [R]."""
        return self.scalars_RF[:, self.schema.index(name)]

    def features(self, rows: Tensor | slice, full: bool) -> tuple[Tensor, list[Tensor]]:
        """Scalars and hidden states of some roots, as `RootNetwork` takes them."""
        states: list[Tensor] = []
        if full:
            hidden_rows = self.hidden_R[rows]
            states = [self.hidden[name][hidden_rows].float() for name in HIDDEN_STATES]
        return self.scalars_RF[rows], states


@dataclass
class Timed:
    """Texts of one sampling setting with a verifier's labels and a machine's times for a batch
    size."""

    texts: Texts
    verifier: str
    profile: LatencyProfile
    batch: int = 1  # requests that are decoded together

    @property
    def space(self) -> ActionSpace:
        return self.texts.space

    @property
    def sampling(self) -> Sampling:
        return self.texts.samplings[int(self.texts.sampling_X[0])]

    def on(self, profile: LatencyProfile, batch: int = 1) -> Timed:
        """The same texts and labels with other times: of another machine, or batch size."""
        moved = replace(self, profile=profile, batch=batch)
        # the cached labels do not depend on times
        moved.__dict__["survivals_RS"] = self.survivals_RS
        return moved

    @cached_property
    def survivals_RS(self) -> Tensor:
        """Labels as laws of tau, float32."""
        return monotone(self.texts.labels(self.verifier, slice(None), self.space), self.space)

    def seconds(self, feature_levels: Sequence[str] = ()) -> Tensor:
        """Predicted step times in seconds, float32 [R, A]; `feature_levels` as in
        `LatencyProfile.action_seconds`."""
        lengths_L, seconds_LA = self._table(feature_levels)
        at_R = torch.zeros_like(self.texts.length_R)
        return interpolated_at(seconds_LA.unsqueeze(0), lengths_L, at_R, self.texts.length_R)

    def seconds_of(self, action_R: Tensor, feature_levels: Sequence[str] = ()) -> Tensor:
        """The time of one action at each root, float32 [R], without the times of the others."""
        lengths_L, seconds_LA = self._table(feature_levels)
        upper_R, share_R = places(lengths_L, self.texts.length_R)
        below_R, above_R = seconds_LA[upper_R - 1, action_R], seconds_LA[upper_R, action_R]
        return below_R * (1 - share_R) + above_R * share_R

    @cached_property
    def lag_M(self) -> Tensor:
        """`LatencyProfile.lag` by the number of tokens, float64 [M]."""
        lag = self.profile.lag
        seconds = [lag.at(0, tokens) for tokens in range(lag.sizes[-1] + 1)]
        return torch.tensor(seconds, dtype=torch.float64)

    def _table(self, feature_levels: Sequence[str]) -> tuple[Tensor, Tensor]:
        return self.profile.table(self.space.actions, self.verifier, feature_levels, self.sampling)


def offering(splits: Mapping[str, Texts], space: ActionSpace) -> dict[str, Texts]:
    """The same texts where these actions may be chosen."""
    return {split: replace(texts, space=space) for split, texts in splits.items()}


def to_texts(
    table: pa.Table,
    verifiers: Sequence[str],
    scalars_RF: Tensor,
    labelled: ActionSpace,
    lookups: tuple[int, ...],
    schema: Schema = PAIR,
) -> Texts:
    """Texts of a trace store's rows, with the roots' scalars, the space of the labelled trees, and
    the lengths of lookups; InputError without labels."""
    for verifier in verifiers:
        if survival_column(verifier) not in table.column_names:
            raise InputError(
                f"the traces hold no labels for {verifier}: add it to verifiers and make them again"
            )
    names = [attribute.name for attribute in fields(Sampling)]
    sampling_of_X = [Sampling(**numbers) for numbers in table.select(names).to_pylist()]
    samplings = list(dict.fromkeys(sampling_of_X))
    size_X = _integers(table, "roots")
    start_X = _integers(table, "start")
    stride_X = _integers(table, "hidden_stride")
    number_R = torch.cat([torch.arange(size) for size in size_X.tolist()])
    hidden = {name: _flat(table, name) for name in HIDDEN_STATES if name in table.column_names}
    stride_R = stride_X.clamp(min=1).repeat_interleave(size_X)
    has_R = (number_R >= 1) & ((number_R - 1) % stride_R == 0) & (len(hidden) > 0)
    hidden_rows = int(has_R.sum())
    survivals_shape = int(size_X.sum()), labelled.tree_survivals
    survivals = {}
    for verifier in verifiers:
        survivals[verifier] = _flat(table, survival_column(verifier)).view(survivals_shape)
    chain_RD = survivals[verifiers[0]][:, : labelled.depth]
    return Texts(
        samplings=samplings,
        size_X=size_X,
        sampling_X=torch.tensor([samplings.index(sampling) for sampling in sampling_of_X]),
        kind_X=table["kind"].to_pylist(),
        source_X=table["source"].to_pylist(),
        prompt_X=table["prompt"].to_pylist(),
        scalars_RF=scalars_RF,
        length_R=start_X.repeat_interleave(size_X) + number_R + 1,
        survivals=survivals,
        lookup_R=_flat(table, LOOKUP_COLUMN),
        rank_RD=_ranks(table, size_X),
        drafted_R=(~chain_RD.isnan()).sum(1, dtype=torch.uint8),
        hidden={name: values.view(hidden_rows, -1) for name, values in hidden.items()},
        hidden_R=torch.where(has_R, has_R.cumsum(0) - 1, -1),
        schema=schema,
        space=replace(labelled, lookups=lookups, ranked=()),
        labelled=labelled,
    )


def _ranks(table: pa.Table, size_X: Tensor) -> Tensor:
    """`Texts.rank_RD`, from the ranks of all of a text's tokens after its first root."""
    parts: list[Tensor] = []
    for number, size in enumerate(size_X.tolist()):
        values = table[RANK_COLUMN][number].values.to_numpy()
        if len(values) == 0:
            parts.append(torch.zeros(size, 0, dtype=torch.uint8))
        else:
            parts.append(torch.from_numpy(values.copy()).unfold(0, MOST_DEPTH, 1)[:size])
    return torch.cat(parts)


def _integers(table: pa.Table, column: str) -> Tensor:
    return torch.from_numpy(np.asarray(table[column]).astype(np.int64))


def _flat(table: pa.Table, column: str) -> Tensor:
    values = pa.concat_arrays([chunk.flatten() for chunk in table[column].chunks])
    return torch.from_numpy(values.to_numpy(zero_copy_only=False).copy())
