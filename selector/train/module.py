"""The Lightning module: a network under one of two objectives, and the batches that it learns from.

Legend: B roots of a batch, R roots of a split, F scalars, D hidden width, A actions, S survivals.
Block efficiencies are in tokens, times in seconds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from statistics import fmean
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SequentialSampler
from torchmetrics.functional import explained_variance, spearman_corrcoef
from torchmetrics.functional.classification import binary_calibration_error

from selector.actions import ActionSpace
from selector.decision import Setting
from selector.schema import FULL, LOG, PAIR, SCHEMAS
from selector.train.data import Texts, Timed
from selector.train.network import RootNetwork, SurvivalNetwork
from selector.train.tuning import replay_setting

ROWS_AT_ONCE = 1 << 14
MEASURED = 4096  # roots of a sampling setting at most that the metrics of an epoch are measured on
WEIGHT_DECAY = 0.02  # of AdamW


def survival_loss(
    log_survivals_BS: Tensor, labels_BS: Tensor, space: ActionSpace, weight: float = 1.0
) -> Tensor:
    """A regressor's loss, scalar: the cross-entropy of survivals, in nats, and `weight` times the
    squared error of the block efficiencies that they sum to, in squared tokens.

    Decisions need the sums; the cross-entropy keeps each survival calibrated. Chains, branches,
    lookups and shapes by rank have equal weights, although there are far more branches.

    Labels are `P(tau >= t | text)`; NaN where unknown, as of tokens beyond a logged step's draft:
    both terms are over those that are known. They are least at the labels' mean, so unbiased labels
    suffice, even where the draw of siblings puts one above 1.
    """
    known_BS = ~labels_BS.isnan()
    labels_BS = labels_BS.nan_to_num()
    log_S = log_survivals_BS.clamp(max=-1e-6)
    loss_BS = -(labels_BS * log_S + (1 - labels_BS) * torch.log(-torch.expm1(log_S)))
    known_BA = (~known_BS).to(log_S) @ space.sums_SA.to(log_S) == 0
    predicted_BA = space.efficiencies(log_survivals_BS.exp())
    square_BA = (predicted_BA - space.efficiencies(labels_BS)).square()
    trees_and_others = len(space.trees), len(space) - len(space.trees)
    cross_entropy = _means(loss_BS, known_BS, space.survivals_by_part)
    return cross_entropy + weight * _means(square_BA, known_BA, trees_and_others)


def _means(values: Tensor, is_known: Tensor, sizes: Sequence[int]) -> Tensor:
    """The sum, over parts of the columns, of the means of what is known."""
    total = torch.zeros((), dtype=values.dtype)
    for part, known_part in zip(
        values.split(sizes, dim=-1), is_known.split(sizes, dim=-1), strict=True
    ):
        total = total + part.where(known_part, 0.0).sum() / known_part.sum().clamp(min=1)
    return total


def policy_ratios(
    logits_BA: Tensor, efficiency_BA: Tensor, seconds_BA: Tensor, base_speed_B: Tensor
) -> Tensor:
    """Expected tokens over expected seconds under the policy objective (DDTE eq. 4), over
    `base_speed_B`, the tokens per second of the sampling setting's static tree at the same root;
    [B]."""
    policy_BA = logits_BA.softmax(-1)
    tokens_B = (policy_BA * efficiency_BA).sum(-1)
    seconds_B = (policy_BA * seconds_BA).sum(-1)
    return tokens_B / seconds_B / base_speed_B


def policy_loss(ratio_B: Tensor, worst_weight: float = 1.0, worst_share: float = 0.05) -> Tensor:
    """DDTE eq. 12: mean log-ratio to the baseline's speed, and the squared loss of the worst roots,
    at least one; scalar. `worst_weight` is lambda, `worst_share` alpha; the paper gives no
    values."""
    worst = max(1, math.ceil(worst_share * len(ratio_B)))
    shortfall_B = (1 - ratio_B).clamp(min=0).square()
    return -ratio_B.log().mean() + worst_weight * shortfall_B.topk(worst).values.mean()


@dataclass
class Batch:
    """Training roots: features and labels; for the policy objective also step times and the static
    tree's speeds, else empty."""

    scalars_BF: Tensor
    hidden: list[Tensor]
    survivals_BS: Tensor
    seconds_BA: Tensor
    base_speed_B: Tensor


class SelectorModule(pl.LightningModule):
    """A network under the objective "regressor" or "policy".

    A regressor learns the survivals of all actions. It does not depend on times, which enter when
    it chooses (`selector.decision`). The policy objective learns action probabilities for one
    machine (DDTE, eq. 12 and app. E), and its network also sees the context length, on which the
    times of the models' forward passes depend.

    Args:
        level: "light", scalars alone, or "full", of a pair's selector; "drafter" of a log's.
        hidden_widths: of the hidden states, in schema order; empty unless "full".
        network: further keyword arguments of `RootNetwork`.
        schema: a key of `schema.SCHEMAS`.
        space: as `ActionSpace.to_json` gives it; None for the trees and lookups of a pair.
    """

    def __init__(
        self,
        objective: str,
        level: str,
        hidden_widths: list[int],
        network: dict[str, Any],
        learning_rate: float = 3e-3,
        schema: str = PAIR.name,
        space: dict[str, Any] | None = None,
        squared_weight: float = 1.0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.level = level
        self.schema = SCHEMAS[schema]
        self.is_regressor = objective == "regressor"
        self.is_full = level == FULL
        self.space = ActionSpace.of_pairs() if space is None else ActionSpace.of_json(space)
        outputs = len(self.space.survivals) if self.is_regressor else len(self.space)
        body = RootNetwork(
            self.schema, hidden_widths, outputs, **network, policy=not self.is_regressor
        )
        self.network: SurvivalNetwork | RootNetwork
        if self.is_regressor:
            self.network = SurvivalNetwork(body, self.space)
        else:
            self.network = body
        # validation texts of a sampling setting, and how it decides there
        self.judged: list[tuple[Timed, Setting]] = []

    @property
    def asked(self) -> tuple[str, ...]:
        """The feature levels that it may be asked with: its own, and for a regressor also the first
        of its schema."""
        if self.is_regressor:
            return (self.schema.levels[0], self.level)
        return (self.level,)

    @property
    def ways(self) -> list[tuple[tuple[str, ...], str]]:
        """The feature levels that decide together, and `Setting.level`: a pair's all do, in turn,
        but one of a log's."""
        if self.schema is LOG:
            return [((level,), level) for level in self.asked]
        return [(self.asked, "")]

    @property
    def _body(self) -> RootNetwork:
        if isinstance(self.network, SurvivalNetwork):
            return self.network.body
        return self.network

    @property
    def ranges(self) -> list[tuple[float, float]]:
        """The lowest and the highest value of each scalar at the training roots."""
        return list(zip(self._body.low_F.tolist(), self._body.high_F.tolist(), strict=True))

    @property
    def longest(self) -> int:
        """The length of the longest committed text at a training root, in tokens."""
        return int(self._body.high_F[self.schema.index("context_length")])

    def begin_at(self, texts: Texts, verifier: str, rows: Tensor) -> None:
        """Fit the scalars' ranges and scaling on the training roots, and begin a regressor at their
        mean survivals."""
        self._body.standardise(texts.scalars_RF[rows])
        if isinstance(self.network, SurvivalNetwork):
            mean_S = texts.observed(verifier, rows, self.space).nanmean(0)
            self.network.begin_at(mean_S.nan_to_num())

    def loss(self, batch: Batch) -> Tensor:
        """The policy objective's loss with all features; a regressor's with all features plus that
        with the early ones."""
        passed_B1 = torch.ones_like(batch.scalars_BF[:, :1])
        late = self.network(batch.scalars_BF, batch.hidden, passed_B1)
        if not self.is_regressor:
            efficiency_BA = self.space.efficiencies(batch.survivals_BS)
            ratio_B = policy_ratios(late, efficiency_BA, batch.seconds_BA, batch.base_speed_B)
            return policy_loss(ratio_B)
        early = self.network(batch.scalars_BF, batch.hidden, 0 * passed_B1)
        weight = self.hparams["squared_weight"]
        late_loss = survival_loss(late, batch.survivals_BS, self.space, weight)
        early_loss = survival_loss(early, batch.survivals_BS, self.space, weight)
        return late_loss + early_loss

    @torch.no_grad()
    def scores(self, texts: Texts, level: str | None = None) -> Tensor:
        """Predicted block efficiencies of all actions, in tokens, or the policy objective's logits;
        float32 [R, A], undefined at roots without features. It is asked with the features of
        `level`, or all that it sees if None."""
        parts = []
        for output in self.outputs(texts, level):
            if self.is_regressor:
                parts.append(self.space.efficiencies(output.exp()))
            else:
                parts.append(output)
        return torch.cat(parts)

    def outputs(self, texts: Texts, level: str | None = None) -> Iterator[Tensor]:
        """What the network says at all roots, in parts: logarithms of survivals [R, S], or logits
        [R, A]."""
        for part in torch.arange(len(texts.length_R)).split(ROWS_AT_ONCE):
            passed_B1 = torch.full((len(part), 1), float(level != self.schema.levels[0]))
            scalars_BF, hidden = texts.features(part, self.is_full)
            yield self.network(scalars_BF, hidden, passed_B1)

    def predictions(self, texts: Texts, setting: Setting) -> dict[str, Tensor]:
        """The scores with each of the feature levels that a setting asks with, [R, A] each."""
        return {level: self.scores(texts, level) for level in setting.feature_levels}

    def training_step(self, batch: Batch, _: int) -> Tensor:
        loss = self.loss(batch)
        self.log(
            "train/loss",
            loss,
            on_epoch=True,
            on_step=False,
            batch_size=len(batch.scalars_BF),
            sync_dist=True,
        )
        return loss

    def validation_step(self, batch: Batch, _: int) -> None:
        self.log(
            "validation/loss", self.loss(batch), batch_size=len(batch.scalars_BF), sync_dist=True
        )

    def on_validation_epoch_end(self) -> None:
        """Log the speed over the best static tree, by replay of the validation texts, averaged over
        `judged` and for each sampling setting; and a regressor's metrics for each."""
        if not self.judged or self.trainer.sanity_checking:
            return
        ratios: dict[str, list[float]] = {}
        texts: dict[str, Timed] = {}
        for timed, setting in self.judged:
            static = replay_setting(timed, {}, setting.static_only())
            predictions = self.predictions(timed.texts, setting)
            replayed = replay_setting(timed, predictions, setting, are_logits=not self.is_regressor)
            sampling_name = f"T {timed.sampling.temperature:g} top-p {timed.sampling.top_p:g}"
            ratios.setdefault(sampling_name, []).append(replayed.speed / static.speed)
            texts[sampling_name] = timed
        for sampling_name, speed_ratios in ratios.items():
            self.log(f"validation/replay/{sampling_name}", fmean(speed_ratios), rank_zero_only=True)
        self.log("validation/replay", fmean(chain(*ratios.values())), rank_zero_only=True)
        for sampling_name, timed in texts.items():
            for name, value in self.metrics(timed).items():
                self.log(f"validation/{name}/{sampling_name}", value, rank_zero_only=True)

    @torch.no_grad()
    def metrics(self, timed: Timed) -> dict[str, Tensor]:
        """How well a regressor predicts, with all its features, at up to `MEASURED` roots; nothing
        under the policy objective.

        Returns:
            `explained_variance`: share of the variance over roots of all actions' labelled block
            efficiencies. `rank_correlation`: Spearman's, over roots, of predicted and labelled
            means of block efficiencies. `calibration_error`: mean distance of predicted and
            labelled survivals, over 15 bins of the predicted ones.
        """
        if not self.is_regressor:
            return {}
        known_R = (~timed.texts.unknown_R).nonzero()[:, 0]
        stride = -(-len(known_R) // MEASURED)  # rounded up
        rows = known_R[::stride]
        scalars_BF, hidden = timed.texts.features(rows, self.is_full)
        survivals = self.network(scalars_BF, hidden, torch.ones(len(rows), 1)).exp()
        labels = timed.survivals_RS[rows]
        predicted = self.space.efficiencies(survivals)
        labelled = self.space.efficiencies(labels)
        explained = explained_variance(predicted, labelled, multioutput="variance_weighted")
        return {
            "explained_variance": torch.as_tensor(explained),
            "rank_correlation": spearman_corrcoef(predicted.mean(-1), labelled.mean(-1)),
            # its check expects targets of 0 or 1, but labels are probabilities
            "calibration_error": binary_calibration_error(survivals, labels, validate_args=False),
        }

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        """AdamW in one cycle of the learning rate over the whole training."""
        rate = self.hparams["learning_rate"]
        steps = int(self.trainer.estimated_stepping_batches)
        optimiser = torch.optim.AdamW(self.parameters(), lr=rate, weight_decay=WEIGHT_DECAY)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps)
        return {
            "optimizer": optimiser,
            "lr_scheduler": {"scheduler": schedule, "interval": "step", "name": "learning rate"},
        }


class Roots:
    """Every `stride`-th root of the training and validation texts, as batches for a module.

    Args:
        further: for the policy objective, by split, step times [R, A] and the best static tree's
            speeds [R].
    """

    def __init__(
        self,
        module: SelectorModule,
        splits: dict[str, Texts],
        verifier: str,
        batch: int,
        seed: int,
        stride: int = 1,
        further: dict[str, tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self.space = module.space
        self.is_full = module.is_full
        self.splits = splits
        self.verifier = verifier
        self.batch = batch
        self.seed = seed
        self.further = further
        self.rows = {name: learned_rows(texts, stride) for name, texts in splits.items()}

    def loader(self, split: str) -> DataLoader[Batch]:
        """The batches of a split, those of the training texts in a random order."""
        shuffle = split == "train"
        rows = self.rows[split]
        order: Sampler[int]
        if shuffle:
            generator = torch.Generator().manual_seed(self.seed)
            order = RandomSampler(range(len(rows)), generator=generator)
        else:
            order = SequentialSampler(range(len(rows)))
        batches = BatchSampler(order, self.batch, drop_last=shuffle and len(rows) > self.batch)
        collate = partial(self._batch, split)
        data: Any = rows  # a tensor of row numbers has all that a data set needs
        return DataLoader(data, sampler=batches, batch_size=None, collate_fn=collate)

    def _batch(self, split: str, rows: Tensor) -> Batch:
        texts = self.splits[split]
        scalars_BF, hidden = texts.features(rows, self.is_full)
        survivals_BS = texts.observed(self.verifier, rows, self.space)
        if self.further is None:
            return Batch(scalars_BF, hidden, survivals_BS, torch.zeros(0), torch.zeros(0))
        seconds_RA, base_speed_R = self.further[split]
        return Batch(scalars_BF, hidden, survivals_BS, seconds_RA[rows], base_speed_R[rows])


def learned_rows(texts: Texts, stride: int) -> Tensor:
    """Every `stride`-th root of each text that has features; int64."""
    after_R = texts.number_R - int(texts.schema is PAIR)
    return (~texts.unknown_R & (after_R % stride == 0)).nonzero()[:, 0]
