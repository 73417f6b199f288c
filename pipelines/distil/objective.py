"""What a draft is trained for: distances of its next-token distributions from the target's (DistillSpec, 2310.08461).

The target's logits are computed anew from its last hidden states, over the tokens that the draft can say: together with
the logarithm of the sum over all tokens, which is stored, they give the exact probabilities of these tokens.

Legend: N places, R tokens that the draft can say, D hidden width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytorch_lightning as pl
import torch
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.nn.functional import linear

from data_gen.models.distilled import stored_weights

WEIGHT_DECAY, WARM_UP, LAST = 0.01, 0.05, 0.02  # the share of steps before the peak rate; its last share
ELEMENTS = 1 << 21  # probabilities that are computed at once


class Places(NamedTuple):
    """Sequences that the target wrote. `counted` places are those whose next token the target drew."""

    tokens_BT: Tensor  # int64
    hidden_BTD: Tensor  # the input of the target's output layer
    log_total_BT: Tensor  # the logarithm of the sum of its exponentiated logits, float32
    counted_BT: Tensor  # bool


class DistilModule(pl.LightningModule):
    """A draft whose loss is cross-entropy and total variation in sum. Its matrices are trained by Muon (Jordan 2024),
    with a linear warm-up to `rate` and a cosine; embeddings, output rows, norms and biases stay the target's."""

    def __init__(self, draft: Any, rate: float, steps: int) -> None:
        super().__init__()
        self.draft, self.rate, self.steps = draft, rate, steps
        self.strict_loading = False  # checkpoints leave out what is the target's
        tables = draft.get_input_embeddings(), draft.get_output_embeddings()
        shared = {id(each) for table in tables for each in table.parameters()}
        for own in draft.parameters():
            own.requires_grad_(own.dim() == 2 and id(own) not in shared)

    def forward(self, batch: Places) -> tuple[Tensor, Tensor, Tensor]:
        """The `distances` at the counted places of a batch."""
        states_BTD = self.draft.base_model(batch.tokens_BT, use_cache=False).last_hidden_state
        kept = batch.counted_BT
        return distances(self.draft, states_BTD[kept], batch.hidden_BTD[kept], batch.log_total_BT[kept])

    def training_step(self, batch: Places) -> Tensor:
        loss, overlap, _ = self(batch)
        self.log_dict({"loss": loss, "overlap": overlap}, prog_bar=True)
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        own = {f"draft.{name}" for name in stored_weights(self.draft)}
        checkpoint["state_dict"] = {key: value for key, value in checkpoint["state_dict"].items() if key in own}

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        own = [weights for weights in self.draft.parameters() if weights.requires_grad]
        optimizer = torch.optim.Muon(own, self.rate, WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
        warm = max(1, int(WARM_UP * self.steps))
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, self.steps - warm), LAST * self.rate)
        first = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warm, 1.0, warm)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [first, cosine], [warm])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def distances(draft: Any, states_ND: Tensor, hidden_ND: Tensor, log_total_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Means of the loss, of `overlap`, `sum min(p, q)`: the probability that a drafted token is accepted, and of
    `covered`: the target's probability of the tokens that the draft can say, which no overlap exceeds.

    Args:
        states_ND: the draft's last hidden states.
        hidden_ND, log_total_N: the target's, as in `Places`.
    """
    device = states_ND.device.type
    if torch.is_autocast_enabled(device):
        states_ND = states_ND.to(torch.get_autocast_dtype(device))
    loss, overlap, covered = _Loss.apply(states_ND, draft.get_output_embeddings().weight, hidden_ND, log_total_N)
    return loss, overlap, covered


class _Loss(torch.autograd.Function):
    """The loss and its gradient, some places at a time: `[N, R]` would be gigabytes.

    With z the draft's logits and q their softmax, cross-entropy has the gradient `sum(p) q - p`, and `- sum min(p, q)`
    has `q (sum(b q) - b)`, where b is 1 for the tokens with q < p.
    """

    @staticmethod
    def forward(ctx: Any, states_ND: Tensor, rows_RD: Tensor, hidden_ND: Tensor, log_total_N: Tensor) -> Any:
        rows_RD = rows_RD.to(states_ND.dtype)
        sums, gradient_ND = states_ND.new_zeros(3, dtype=torch.float32), torch.empty_like(states_ND)
        size = max(1, ELEMENTS // len(rows_RD))
        parts = zip(*(each.split(size) for each in (states_ND, hidden_ND, log_total_N, gradient_ND)), strict=True)
        for states_nD, hidden_nD, log_total_n, gradient_nD in parts:
            p_nR = linear(hidden_nD.to(rows_RD.dtype), rows_RD).float().sub_(log_total_n[:, None]).exp_()
            log_q_nR = linear(states_nD, rows_RD).float().log_softmax(-1)
            q_nR, covered_n1 = log_q_nR.exp(), p_nR.sum(-1, keepdim=True)
            below_nR = q_nR * (q_nR < p_nR)
            said_n1 = below_nR.sum(-1, keepdim=True)  # by the draft, of the tokens that it says too rarely
            overlap = torch.minimum(p_nR, q_nR).sum()
            sums += torch.stack([-(p_nR * log_q_nR).sum(), overlap, covered_n1.sum()])
            slope_nR = q_nR.mul_(covered_n1 + said_n1).sub_(p_nR).sub_(below_nR)
            gradient_nD.copy_(linear(slope_nR.to(rows_RD.dtype), rows_RD.T))
        ctx.save_for_backward(gradient_ND / len(states_ND))
        crossed, overlap, covered = sums / len(states_ND)
        ctx.mark_non_differentiable(overlap, covered)
        return crossed + 1 - overlap, overlap, covered

    @staticmethod
    def backward(ctx: Any, slope: Tensor, *_: Any) -> Any:
        return slope * ctx.saved_tensors[0], None, None, None
