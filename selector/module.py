"""The Lightning module: the network under one of two objectives, and how it is judged."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor

from selector.data import Roots, TracesModule
from selector.metrics import CrossFittedRegret, SpeedRatio, WorstShare
from selector.network import SelectorNetwork, split_features
from selector.objective import policy_objective, regression_objective
from selector.runtime import best_gain
from selector.schema import LATENCY_SCALARS, SCALAR_NAMES, SCALARS_KEY


class SelectorModule(pl.LightningModule):
    """`policy` learns action probabilities (DDTE eq. 12); `regressor` the block efficiency of every action.

    The regressor sees no latency features; times enter when it chooses, by `argmax E - g T`.

    Args:
        hidden_widths: of the hidden-state features, in schema order.
        network: keyword arguments of `SelectorNetwork`.
    """

    gain: Tensor

    def __init__(
        self,
        objective: str,
        hidden_widths: list[int],
        actions: int,
        network: dict[str, Any],
        learning_rate: float,
        weight_decay: float,
        epochs: int,
        worst_weight: float,
        worst_share: float,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        skipped = LATENCY_SCALARS if objective == "regressor" else ()
        used = [i for i, name in enumerate(SCALAR_NAMES) if name not in skipped]
        self.network = SelectorNetwork(hidden_widths, used, actions, **network)
        self.register_buffer("gain", torch.zeros(()))  # tokens per second; set from the training split
        self.ratio, self.worst, self.regret = SpeedRatio(), WorstShare(), CrossFittedRegret()

    @property
    def predicts_efficiency(self) -> bool:
        return self.hparams["objective"] == "regressor"

    def fit_standardisation(self, roots: Roots) -> None:
        """From the training split only."""
        self.network.standardise(roots.scalars, roots.mean_BA if self.predicts_efficiency else None)

    def outputs(self, roots: Roots) -> Tensor:
        """Logits, or predicted block efficiencies, [B, A]."""
        return self.network(*split_features(roots.features(), SCALARS_KEY))

    def choices(self, roots: Roots) -> Tensor:
        """Action indices, [B]."""
        outputs_BA = self.outputs(roots)
        if self.predicts_efficiency:
            outputs_BA = outputs_BA - self.gain * roots.seconds_BA
        return outputs_BA.argmax(-1)

    @torch.no_grad()
    def fit_gain(self, roots: Roots) -> None:
        """Set g from the predictions on the training split."""
        if self.predicts_efficiency:
            self.gain.fill_(best_gain(self.outputs(roots), roots.seconds_BA))

    def training_step(self, roots: Roots, _: int) -> Tensor:
        outputs_BA = self.outputs(roots)
        if self.predicts_efficiency:
            loss = regression_objective(outputs_BA, roots.mean_BA, self.network.output_scale_A)
        else:
            base_speed_B = roots.base_tokens_B() / roots.base_seconds_B()
            loss = policy_objective(
                outputs_BA,
                roots.mean_BA,
                roots.seconds_BA,
                base_speed_B,
                self.hparams["worst_weight"],
                self.hparams["worst_share"],
            )
        self.log("train/loss", loss, on_epoch=True, on_step=False, batch_size=len(roots))
        return loss

    def on_validation_epoch_start(self) -> None:
        traces: TracesModule = self.trainer.datamodule  # type: ignore[attr-defined]
        self.fit_gain(traces.train)
        self.best_speed = best_gain(traces.train.mean_BA, traces.train.seconds_BA)

    def validation_step(self, roots: Roots, _: int) -> None:
        chosen_B = self.choices(roots)
        index_B1 = chosen_B.unsqueeze(-1)
        speeds = (
            roots.mean_BA.gather(-1, index_B1)[:, 0],
            roots.seconds_BA.gather(-1, index_B1)[:, 0],
            roots.base_tokens_B(),
            roots.base_seconds_B(),
        )
        self.ratio.update(*speeds)
        self.worst.update(*speeds)
        halves = (roots.half_BA, 2 * roots.mean_BA - roots.half_BA)
        self.regret.update(chosen_B, halves, roots.seconds_BA, self.best_speed)
        self.log("validation/ratio", self.ratio, batch_size=len(roots))
        self.log("validation/worst_5_percent", self.worst, batch_size=len(roots))
        self.log("validation/cross_fitted_regret", self.regret, batch_size=len(roots))

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimiser = torch.optim.AdamW(
            self.parameters(), lr=self.hparams["learning_rate"], weight_decay=self.hparams["weight_decay"]
        )
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, self.hparams["epochs"])
        return {"optimizer": optimiser, "lr_scheduler": schedule}
