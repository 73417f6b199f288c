"""The stopping head: how likely a drafted token is to be accepted, by what the draft knows of it.

SpecDec++ (Huang et al. 2024, arXiv 2405.19715), a rival of the selector: drafting goes on until the probability that
some drafted token is rejected passes a threshold. Theirs judges a token by the state that the draft's pass over it
leaves, and so one token late; this one before that pass, by the state it was drawn from and its own probability.

Legend: B roots, S samples, T trunk tokens, D hidden width, F scalars, H width of the last hidden layer.
"""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torchmetrics import MeanMetric

from selector.data import Roots
from selector.module import one_cycle
from selector.network import TrunkBody
from selector.schema import TRUNK_SCALARS


class StoppingNetwork(TrunkBody):
    """What is known at a drafted token in, the logit of its acceptance out; arguments as `TrunkBody`'s."""

    def __init__(self, inputs: int, **shape: Any) -> None:
        super().__init__(inputs, **shape)
        widths = [layer.out_features for layer in self.body if isinstance(layer, nn.Linear)]
        self.head = nn.Linear(widths[-1], 1)

    def forward(self, hidden_BD: Tensor, scalars_BF: Tensor) -> Tensor:
        """Args:
            hidden_BD: `TRUNK_STATE`, float32.
            scalars_BF: `TRUNK_SCALARS`, float32.

        Returns:
            logits, [B].
        """
        return self.head(self.encoded(hidden_BD, scalars_BF))[..., 0]


class TokenAcceptance(nn.Module):
    """A `StoppingNetwork` for one token at a time, as fast as torch's calls are."""

    weight_H: Tensor
    bias: Tensor

    def __init__(self, network: StoppingNetwork) -> None:
        super().__init__()
        self.layers = network.folded()
        self.register_buffer("weight_H", network.head.weight.detach()[0].clone())
        self.register_buffer("bias", network.head.bias.detach()[0].clone())

    @torch.inference_mode()
    def forward(self, hidden_D: Tensor, scalars_F: Tensor) -> float:
        """P(accepted) of a token, from float32 [D] and [F]."""
        values = torch.cat([hidden_D, scalars_F])
        for layer in self.layers:
            values = layer(values)
        return float(torch.sigmoid(self.weight_H @ values + self.bias))


class StoppingModule(pl.LightningModule):
    """Learns min(1, p/q) of every trunk token, by the binary cross-entropy with that soft label.

    Args:
        hidden_width: D of `TRUNK_STATE`.
        network: further keyword arguments of `StoppingNetwork`.
        rejection_weight: what a rejection weighs, an acceptance weighs 1. Above 1 the prediction is too low on purpose,
            as in SpecDec++: which tokens end a block matters more than which go on.
    """

    constant: Tensor

    def __init__(
        self,
        hidden_width: int,
        network: dict[str, Any],
        rejection_weight: float,
        learning_rate: float,
        weight_decay: float,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.network = StoppingNetwork(hidden_width + len(TRUNK_SCALARS), **network)
        self.register_buffer("constant", torch.zeros(()))  # the logit that is best for all tokens alike
        self.split_loss, self.constant_loss = MeanMetric(), MeanMetric()

    @torch.no_grad()
    def fit_standardisation(self, roots: Roots) -> None:
        """From the training split only; the network begins at the best constant."""
        hidden_BTD, scalars_BTF = roots.trunk_hidden_BSTD[:, 0].float(), roots.trunk_scalars_BSTF[:, 0]
        self.network.standardise_inputs(hidden_BTD.flatten(0, 1), scalars_BTF.flatten(0, 1))
        accepted = roots.trunk_accept_BST.mean().clamp(1e-3, 1 - 1e-3)
        self.constant.copy_((accepted / (self.hparams["rejection_weight"] * (1 - accepted))).log())
        self.network.head.bias.fill_(self.constant)

    def logits(self, roots: Roots) -> Tensor:
        """Of the acceptance of every trunk token, [B, S, T]."""
        return self.network(roots.trunk_hidden_BSTD.float(), roots.trunk_scalars_BSTF)

    @torch.no_grad()
    def rejected(self, roots: Roots) -> Tensor:
        """Predicted P(one of the tokens so far is rejected) after each trunk token, float64 [B, S, T]."""
        return 1 - self.logits(roots).double().sigmoid().cumprod(-1)

    def loss(self, logits_BST: Tensor, accept_BST: Tensor) -> Tensor:
        """Nats per token."""
        weight = torch.tensor(self.hparams["rejection_weight"])
        return weight * nn.functional.binary_cross_entropy_with_logits(logits_BST, accept_BST, pos_weight=1 / weight)

    def training_step(self, roots: Roots, _: int) -> Tensor:
        loss = self.loss(self.logits(roots), roots.trunk_accept_BST)
        self.log("train/loss", loss, on_epoch=True, on_step=False, batch_size=len(roots), sync_dist=True)
        return loss

    def validation_step(self, roots: Roots, _: int) -> None:
        logits_BST, accept_BST = self.logits(roots), roots.trunk_accept_BST
        self.split_loss.update(self.loss(logits_BST, accept_BST), len(roots))
        self.constant_loss.update(self.loss(self.constant.expand_as(logits_BST), accept_BST), len(roots))
        self.log("validation/loss", self.split_loss, batch_size=len(roots))
        self.log("validation/loss_of_a_constant", self.constant_loss, batch_size=len(roots))

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        return one_cycle(self)
