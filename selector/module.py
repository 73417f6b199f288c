"""The Lightning module: the network under one of two objectives, and how it is judged.

Legend: B roots, D hidden width, F scalars, S samples of a root, T trunk tokens, A actions, U verifiers, O options
(every action with each verifier), I increments.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torchmetrics import MeanMetric, Metric

from selector.actions import ActionSpace
from selector.data import Roots, TracesModule
from selector.metrics import CrossFittedRegret, PolicyLoss, SpeedRatio, WorstShare
from selector.network import (
    IncrementNetwork,
    SelectorNetwork,
    TrunkNetwork,
    further_actions,
    increment_matrix,
    increments_of,
    picked,
    split_features,
)
from selector.objective import policy_loss, policy_ratios, regression_objective
from selector.runtime import best_gain
from selector.schema import LATENCY_SCALARS, SCALAR_NAMES, SCALARS_KEY, TRUNK_SCALARS, TRUNK_STATE

SPACE = ActionSpace.default()
NETWORKS = 5  # bump it when the same traces train another network, or its decisions are judged otherwise
LEAST_ERROR = 0.1  # tokens: what one token more adds is known exactly at the root, and would outweigh all the rest
TOKENS_AT_ONCE = 4  # trunk tokens of each root that a training step looks at, beside the root itself


class SelectorModule(pl.LightningModule):
    """`policy` learns action probabilities (DDTE eq. 12); `regressor` the block efficiency of every action.

    The regressor sees no latency features; times enter when it chooses, by `argmax E - g T`. It holds a second network,
    `trunk`, for the tokens of a trunk that is being drafted: what every further action adds there.

    Args:
        hidden_widths: of the hidden-state features, in schema order.
        network: keyword arguments of `SelectorNetwork`.
        trunk: keyword arguments of `TrunkNetwork`.
        error_powers: labels weigh the inverse of this power of their standard errors, at the root and along the trunk;
            0 weighs all alike.
        left_out: features that the networks are not shown: scalars and hidden states of the root, or `TRUNK_STATE`.
        verifiers: how many a regressor predicts, so that every machine can pick each action's own by its times. If
            several, they are the same on a chain, and a chain counts once for each in the loss.
    """

    gain: Tensor
    weight_O: Tensor
    trunk_weight_O: Tensor
    further_TA: Tensor

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
        trunk: dict[str, Any] | None = None,
        error_powers: Sequence[float] = (0.0, 2.0),
        left_out: Sequence[str] = (),
        verifiers: int = 1,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        skipped = {*left_out, *(LATENCY_SCALARS if objective == "regressor" else ())}
        used = [i for i, name in enumerate(SCALAR_NAMES) if name not in skipped]
        if self.predicts_efficiency:
            sums_IO = increment_matrix(SPACE, verifiers)
            increments = len(sums_IO)
            self.network: IncrementNetwork | SelectorNetwork = IncrementNetwork(
                SelectorNetwork(hidden_widths, used, increments, **network), sums_IO
            )
            self.trunk = TrunkNetwork(hidden_widths[-1] + len(TRUNK_SCALARS), sums_IO, **(trunk or {}))
        else:
            self.network = SelectorNetwork(hidden_widths, used, actions, **network)
        self.register_buffer("gain", torch.zeros(()))  # tokens per second; set from the training split
        self.register_buffer("weight_O", torch.ones(verifiers * actions))
        self.register_buffer("trunk_weight_O", torch.ones(verifiers * actions))
        self.register_buffer("further_TA", further_actions(SPACE), persistent=False)
        self.ratio, self.worst, self.regret = SpeedRatio(), WorstShare(), CrossFittedRegret()
        self.split_loss: Metric = MeanMetric() if self.predicts_efficiency else PolicyLoss(worst_weight, worst_share)

    @property
    def predicts_efficiency(self) -> bool:
        return self.hparams["objective"] == "regressor"

    def fit_standardisation(self, roots: Roots, errors_of: Roots | None = None) -> None:
        """From the training split only: the scaling of features, and the labels' standard errors.

        A root's own standard error is an estimate from two or four samples: weights by it would favour labels that came
        out alike by chance. So errors are pooled over the roots, action by action.

        Args:
            errors_of: the roots whose labels' errors count; `roots` if None. Losses with one choice of them compare.
        """
        if not isinstance(self.network, IncrementNetwork):
            assert isinstance(self.network, SelectorNetwork)
            self.network.standardise(roots.scalars)
            return
        sums_IO = self.network.sums_IO
        self.network.standardise(roots.scalars, increments_of(roots.every_mean_BO.mean(0) - 1, sums_IO))
        hidden, scalars = (
            roots.trunk_hidden_BSTD[:, 0].flatten(0, 1).float(),
            roots.trunk_scalars_BSTF[:, 0].flatten(0, 1),
        )
        self.trunk.standardise(self._shown(TRUNK_STATE, hidden), scalars, self._mean_further(roots))
        known = errors_of or roots
        at_root, on_trunk = self.hparams["error_powers"]
        self.weight_O.copy_(_pooled(known.every_error_BO) ** -at_root)
        self.trunk_weight_O.copy_(_pooled(known.every_trunk_BSO.std(1, unbiased=True)) ** -on_trunk)

    def _mean_further(self, roots: Roots) -> Tensor:
        """Mean increments over the trunk tokens: where training of the trunk's network begins, [I]."""
        labels_TO, known_TO = torch.zeros(2, len(self.further_TA), len(self.trunk_weight_O))
        for t in range(1, len(self.further_TA)):
            labels_BSO, known_O = self.further_labels(roots.every_trunk_BSO, torch.tensor(t))
            labels_TO[t], known_TO[t] = labels_BSO.mean((0, 1)), known_O
        means_O = (labels_TO * known_TO).sum(0) / known_TO.sum(0).clamp(min=1)
        return increments_of(means_O, self.trunk.sums_IO).clamp(min=0)

    def further_labels(self, trunk_O: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        """What further actions added once `t` trunk tokens were drafted, and which there are; [.., O] each.

        Args:
            trunk_O: labels given a trunk, [.., O].
            t: int64 [..].
        """
        trunk_UA = trunk_O.unflatten(-1, (-1, len(SPACE)))
        whole_1A = self.further_TA[t].unsqueeze(-2)
        whole_UA = whole_1A.clamp(min=0).expand(*trunk_UA.shape[:-1], -1)
        added_UA = trunk_UA.gather(-1, whole_UA) - trunk_UA.gather(-1, whole_UA[..., [SPACE.index(SPACE.chain(0))]])
        return added_UA.flatten(-2), (whole_1A >= 0).expand(*t.shape, *trunk_UA.shape[-2:]).flatten(-2)

    def options(self, roots: Roots) -> Tensor:
        """Logits [B, A], or predicted block efficiencies with every verifier, [B, O]."""
        features = {name: self._shown(name, value) for name, value in roots.features().items()}
        outputs_BO = self.network(*split_features(features, SCALARS_KEY))
        return 1 + outputs_BO if self.predicts_efficiency else outputs_BO

    def outputs(self, roots: Roots) -> Tensor:
        """Logits, or predicted block efficiencies with each action's verifier, [B, A]."""
        options_BO = self.options(roots)
        return picked(options_BO, roots.verifier_BA) if self.predicts_efficiency else options_BO

    def gains(self, roots: Roots, t: int) -> Tensor:
        """Predicted gains of further actions after t trunk tokens, for every sample; [B, S, A]."""
        hidden_BSTD, scalars_BSTF = self._along_trunks(roots, slice(t, t + 1))
        return picked(self.trunk(hidden_BSTD[:, :, 0], scalars_BSTF[:, :, 0]), roots.verifier_BA.unsqueeze(1))

    def _shown(self, name: str, value: Tensor) -> Tensor:
        """The feature, or zeros for one that is left out: they leave a constant behind the first layer."""
        return torch.zeros_like(value) if name in self.hparams["left_out"] else value

    def _along_trunks(self, roots: Roots, tokens: slice) -> tuple[Tensor, Tensor]:
        hidden_BSTD, scalars_BSTF = roots.along_trunks(tokens)
        return self._shown(TRUNK_STATE, hidden_BSTD), scalars_BSTF

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
            weight_B1 = roots.weight_B.unsqueeze(-1)
            self.gain.fill_(best_gain(weight_B1 * self.outputs(roots), weight_B1 * roots.seconds_BA))

    def loss(self, roots: Roots) -> Tensor:
        if self.predicts_efficiency:
            return self.root_loss(roots) + self.trunk_loss(roots)
        return policy_loss(self.speed_ratios(roots), self.hparams["worst_weight"], self.hparams["worst_share"])

    def speed_ratios(self, roots: Roots) -> Tensor:
        """Of a policy, over the baseline's speed; [B]."""
        base_speed_B = roots.base_tokens_B() / roots.base_seconds_B()
        return policy_ratios(self.outputs(roots), roots.mean_BA, roots.seconds_BA, base_speed_B)

    def root_loss(self, roots: Roots) -> Tensor:
        """Of a regressor, at the root by all features: in squared tokens; scalar."""
        return regression_objective(self.options(roots), roots.every_mean_BO, self.weight_O)

    def trunk_loss(self, roots: Roots) -> Tensor:
        """At the root and some trunk tokens of one sample each, drawn anew each time; spread evenly when not training.

        At the root, labels are the means over all samples.
        """
        hidden_BSTD, scalars_BSTF = self._along_trunks(roots, slice(None))
        B, S, T = scalars_BSTF.shape[:3]
        at_root = self.trunk(hidden_BSTD[:, 0, 0], scalars_BSTF[:, 0, 0])
        loss = regression_objective(at_root, roots.every_mean_BO - 1, self.weight_O)
        shape = (B, TOKENS_AT_ONCE)
        if self.training:
            sample_Bn = torch.randint(S, shape, device=self.device)
            token_Bn = torch.randint(1, T, shape, device=self.device)
        else:
            sample_Bn = torch.zeros(shape, dtype=torch.int64, device=self.device)
            token_Bn = torch.linspace(1, T - 1, TOKENS_AT_ONCE, device=self.device).long().expand(shape)
        b_B1 = torch.arange(B, device=self.device).unsqueeze(-1)
        places = (b_B1, sample_Bn, token_Bn)
        predicted = self.trunk(hidden_BSTD[places].flatten(0, 1), scalars_BSTF[places].flatten(0, 1))
        labels, known = self.further_labels(roots.every_trunk_BSO[b_B1, sample_Bn].flatten(0, 1), token_Bn.flatten())
        return loss + regression_objective(predicted, labels, known * self.trunk_weight_O)

    def training_step(self, roots: Roots, _: int) -> Tensor:
        loss = self.loss(roots)
        self.log("train/loss", loss, on_epoch=True, on_step=False, batch_size=len(roots), sync_dist=True)
        return loss

    def on_validation_epoch_start(self) -> None:
        traces: TracesModule = self.trainer.datamodule  # type: ignore[attr-defined]
        self.fit_gain(traces.train)
        weight_B1 = traces.train.weight_B.unsqueeze(-1)
        self.best_speed = best_gain(weight_B1 * traces.train.mean_BA, weight_B1 * traces.train.seconds_BA)

    def validation_step(self, roots: Roots, _: int) -> None:
        chosen_B = self.choices(roots)
        index_B1, weight_B1 = chosen_B.unsqueeze(-1), roots.weight_B.unsqueeze(-1)
        speeds = (
            roots.weight_B * roots.mean_BA.gather(-1, index_B1)[:, 0],
            roots.weight_B * roots.seconds_BA.gather(-1, index_B1)[:, 0],
            roots.weight_B * roots.base_tokens_B(),
            roots.weight_B * roots.base_seconds_B(),
        )
        self.ratio.update(*speeds)
        self.worst.update(*speeds)
        halves = (weight_B1 * roots.half_BA, weight_B1 * (2 * roots.mean_BA - roots.half_BA))
        self.regret.update(chosen_B, halves, weight_B1 * roots.seconds_BA, self.best_speed)
        if self.predicts_efficiency:
            # not Lightning's own average, which takes all processes for equally large
            self.split_loss.update(self.loss(roots), len(roots))
        else:
            self.split_loss.update(self.speed_ratios(roots))
        self.log("validation/loss", self.split_loss, batch_size=len(roots))
        self.log("validation/ratio", self.ratio, batch_size=len(roots))
        self.log("validation/worst_5_percent", self.worst, batch_size=len(roots))
        self.log("validation/cross_fitted_regret", self.regret, batch_size=len(roots))

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        return one_cycle(self)


def one_cycle(module: pl.LightningModule) -> OptimizerLRSchedulerConfig:
    """AdamW in one cycle of the learning rate over the whole training, by the module's hyperparameters."""
    rate, decay = module.hparams["learning_rate"], module.hparams["weight_decay"]
    optimiser = torch.optim.AdamW(module.parameters(), lr=rate, weight_decay=decay)
    steps = int(module.trainer.estimated_stepping_batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, rate, total_steps=steps)
    return {"optimizer": optimiser, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def _pooled(error_A: Tensor) -> Tensor:
    """Root mean square over all but the last axis, at least `LEAST_ERROR`."""
    return error_A.flatten(0, -2).square().mean(0).sqrt().clamp(min=LEAST_ERROR)
