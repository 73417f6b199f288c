"""The Lightning module: a network under one of two objectives, judged by replay.

Legend: B roots of a batch, R roots of a split, F scalars, D hidden width, A actions, S survivals.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from selector.actions import ActionSpace
from selector.decision import Mode
from selector.schema import FULL, MATCH, PAIR, SCHEMAS, Schema
from selector.train.data import Texts, Timed
from selector.train.network import RootNetwork, SurvivalNetwork
from selector.train.objective import policy_loss, policy_ratios, survival_loss
from selector.train.tuning import replay_mode

ROWS_AT_ONCE = 1 << 14


@dataclass
class Batch:
    """Training roots: features, labels, and what a policy is trained with, empty for a regressor."""

    scalars_BF: Tensor
    hidden: list[Tensor]
    survivals_BS: Tensor
    seconds_BA: Tensor
    base_speed_B: Tensor


class SelectorModule(pl.LightningModule):
    """`regressor` learns the survivals of all trees, `policy` action probabilities for one machine (DDTE eq. 12).

    A regressor knows nothing of times: they enter when it chooses (`selector.decision`).

    Args:
        objective: "regressor" or "policy".
        level: "light", scalars alone, or "full", of a pair's selector; "drafter" of a log's. Each may also be asked
            with the first level of its schema.
        hidden_widths: of the hidden states, in schema order; empty for a light selector.
        network: further keyword arguments of `RootNetwork`.
        worst_weight, worst_share: lambda and alpha of DDTE eq. 12.
        schema: the name of its scalars, of `schema.SCHEMAS`.
        squared_weight: see `objective.survival_loss`.
        space: what it chooses from, as `ActionSpace.to_json` has it; None for the trees and lookups of a pair.
    """

    def __init__(
        self,
        objective: str,
        level: str,
        hidden_widths: list[int],
        network: dict[str, Any],
        learning_rate: float,
        weight_decay: float,
        worst_weight: float = 1.0,
        worst_share: float = 0.05,
        schema: str = PAIR.name,
        space: dict[str, Any] | None = None,
        squared_weight: float = 1.0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        own = self.schema
        outputs = len(self.space.sums_SA) if self.is_regressor else len(self.space)
        body = RootNetwork(len(own.scalars), own.counts, own.unseen, own.first, hidden_widths, outputs, **network)
        self.network: SurvivalNetwork | RootNetwork = SurvivalNetwork(body, self.space) if self.is_regressor else body
        self.judged: list[tuple[Timed, Mode]] = []  # validation texts by sampling setting, and how decisions are made

    @property
    def is_regressor(self) -> bool:
        return self.hparams["objective"] == "regressor"

    @property
    def schema(self) -> Schema:
        return SCHEMAS[self.hparams["schema"]]

    @property
    def space(self) -> ActionSpace:
        values = self.hparams["space"]
        return ActionSpace.with_lookups() if values is None else ActionSpace.of_json(values)

    @property
    def level(self) -> str:
        return str(self.hparams["level"])

    @property
    def is_full(self) -> bool:
        return self.level == FULL

    @property
    def asked(self) -> tuple[str, ...]:
        """What it may be asked with: a policy with all that it sees, a regressor with the first level as well."""
        return (self.schema.levels[0], self.level) if self.is_regressor else (self.level,)

    def begin_at(self, texts: Texts, survivals_RS: Tensor, rows: Tensor) -> None:
        """Scaling of the inputs, and where training begins, from the training roots alone."""
        body = self.network.body if isinstance(self.network, SurvivalNetwork) else self.network
        assert isinstance(body, RootNetwork)
        body.standardise(texts.scalars_RF[rows])
        if isinstance(self.network, SurvivalNetwork):
            self.network.begin_at(survivals_RS[rows].nanmean(0).nan_to_num())  # NaN: what no log tells

    def loss(self, batch: Batch) -> Tensor:
        """Of what is said where all is known; a regressor's, of what is said with the first level as well."""
        passed_B1 = torch.ones(len(batch.scalars_BF), 1)
        outputs = self.network(batch.scalars_BF, batch.hidden, passed_B1)
        if self.is_regressor:
            early = self.network(batch.scalars_BF, batch.hidden, 0 * passed_B1)
            weight = self.hparams["squared_weight"]
            both = [survival_loss(each, batch.survivals_BS, self.space, weight) for each in (outputs, early)]
            return both[0] + both[1]
        efficiency_BA = self.space.efficiencies(batch.survivals_BS)
        ratio_B = policy_ratios(outputs, efficiency_BA, batch.seconds_BA, batch.base_speed_B)
        return policy_loss(ratio_B, self.hparams["worst_weight"], self.hparams["worst_share"])

    @torch.no_grad()
    def scores(self, texts: Texts, level: str | None = None) -> Tensor:
        """Predicted block efficiencies of all actions, in tokens, or a policy's logits; [R, A]. Rows of first roots are
        without meaning.

        Args:
            level: the schema's first level for what it says with that; all that it sees if None.
        """
        parts, space = [], self.space
        for part in torch.arange(len(texts.length_R)).split(ROWS_AT_ONCE):
            passed_B1 = torch.full((len(part), 1), float(level != self.schema.levels[0]))
            outputs = self.network(*texts.features(part, self.is_full), passed_B1)
            parts.append(space.efficiencies(outputs.exp()) if self.is_regressor else outputs)
        return torch.cat(parts)

    def predictions(self, texts: Texts, mode: Mode) -> dict[str, Tensor]:
        """The scores at each of the times that a mode asks, [R, A] each."""
        return {level: self.scores(texts, level) for level in mode.feature_levels if level != MATCH}

    def training_step(self, batch: Batch, _: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train/loss", loss, on_epoch=True, on_step=False, batch_size=len(batch.scalars_BF), sync_dist=True)
        return loss

    def validation_step(self, batch: Batch, _: int) -> None:
        self.log("validation/loss", self.loss(batch), batch_size=len(batch.scalars_BF), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        """Speed over the best static tree by replay of the validation texts, mean over the sampling settings."""
        if not self.judged or self.trainer.sanity_checking:
            return
        ratios = []
        for timed, mode in self.judged:
            static = replay_mode(timed, {}, mode.static_only())
            own = replay_mode(timed, self.predictions(timed.texts, mode), mode, policy=not self.is_regressor)
            ratios.append(own.speed / static.speed)
        self.log("validation/replay", torch.tensor(sum(ratios) / len(ratios)), rank_zero_only=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW in one cycle of the learning rate over the whole training."""
        rate, decay = self.hparams["learning_rate"], self.hparams["weight_decay"]
        optimiser = torch.optim.AdamW(self.parameters(), lr=rate, weight_decay=decay)
        steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps)
        return {"optimizer": optimiser, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class RootsModule(pl.LightningDataModule):
    """Roots as batches: of training texts every `stride`-th, of validation texts too.

    Args:
        further: step times and the baseline's speeds of all roots, by split, for a policy; None for a regressor.
        space: whose labels are learned; that of a pair's selector if None.
    """

    def __init__(
        self,
        splits: dict[str, Texts],
        verifier: str,
        level: str,
        stride: int,
        batch: int,
        seed: int,
        further: dict[str, tuple[Tensor, Tensor]] | None = None,
        space: ActionSpace | None = None,
    ) -> None:
        super().__init__()
        self.space = space or ActionSpace.with_lookups()
        self.splits, self.verifier, self.level, self.batch, self.seed = splits, verifier, level, batch, seed
        self.further = further
        self.rows = {name: learned_rows(texts, stride) for name, texts in splits.items()}

    def _loader(self, split: str, shuffle: bool) -> DataLoader[Batch]:
        """Whole batches at once: a lookup of every root by itself would take longer than learning from it."""
        generator, rows = torch.Generator().manual_seed(self.seed), self.rows[split]
        order = RandomSampler(range(len(rows)), generator=generator) if shuffle else SequentialSampler(range(len(rows)))
        batches = BatchSampler(order, self.batch, drop_last=shuffle and len(rows) > self.batch)
        return DataLoader(
            rows,  # type: ignore[arg-type]
            sampler=batches,
            batch_size=None,
            collate_fn=lambda part: self._batch(split, part),  # type: ignore[arg-type]
        )

    def _batch(self, split: str, rows: Tensor) -> Batch:
        texts = self.splits[split]
        further = (torch.zeros(0),) * 2 if self.further is None else (each[rows] for each in self.further[split])
        return Batch(*texts.features(rows, self.level == FULL), texts.labels(self.verifier, rows, self.space), *further)

    def train_dataloader(self) -> DataLoader[Batch]:
        return self._loader("train", shuffle=True)

    def val_dataloader(self) -> DataLoader[Batch]:
        return self._loader("validation", shuffle=False)


def learned_rows(texts: Texts, stride: int) -> Tensor:
    """Every `stride`-th root of each text that has features; int64."""
    first = 0 if texts.from_the_start else 1
    number_R = torch.cat([torch.arange(size) for size in texts.size_X.tolist()])
    return ((number_R >= first) & ((number_R - first) % stride == 0)).nonzero()[:, 0]
