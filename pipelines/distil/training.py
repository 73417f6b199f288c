"""Training of a draft with Lightning, and how fast it is expected to decode.

The loss sums two distances of the draft's next-token distributions from the target's (DistillSpec,
arXiv 2310.08461). The target's logits of the tokens that the draft scores are recomputed from the
target's stored hidden states. With the stored logsumexp over all tokens they give the exact
probabilities.

Legend: X sequences, T tokens of a sequence, N positions, R tokens that the draft scores, D hidden
    width.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from transformers import PreTrainedModel

from data_gen.models.distilled import stored_weights
from data_gen.models.pair import CachedModel, scored
from pipelines.config import Config
from pipelines.distil.texts import Sampled, Sequences
from pipelines.train.fitting import fit

LONGEST = 32  # drafted tokens of the longest chain that `speed` looks at
TIMED = 15  # forward passes that are timed
BEHIND = 200  # the tokens before them
EVERY = 100  # steps between checkpoints
WEIGHT_DECAY = 0.01
WARM_UP = 0.05  # share of the steps
LAST = 0.02  # the last learning rate, as a share of the peak
ELEMENTS = 1 << 21  # probabilities computed at once


class Muon(torch.optim.Optimizer):
    """Muon (Jordan 2024) with the settings of torch's own, but in the matrices' precision: torch's
    is in bfloat16 on every device, and takes half a minute a step on a CPU without instructions for
    that."""

    momentum = 0.95
    iterations = 5
    polynomial = (3.4445, -4.775, 2.0315)

    def __init__(self, matrices: Sequence[Tensor], rate: float) -> None:
        super().__init__(matrices, {"lr": rate})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None
        if closure is not None:
            loss = torch.enable_grad()(closure)()
        for group in self.param_groups:
            for matrix in group["params"]:
                if matrix.grad is None:
                    continue
                state = self.state[matrix]
                if "mean" not in state:
                    state["mean"] = torch.zeros_like(matrix)
                mean = state["mean"].lerp_(matrix.grad, 1 - self.momentum)
                # updates are as large as AdamW's
                rate = group["lr"] * 0.2 * max(matrix.shape) ** 0.5
                matrix.mul_(1 - group["lr"] * WEIGHT_DECAY)
                update = self._orthogonal(matrix.grad.lerp(mean, self.momentum))
                matrix.sub_(update, alpha=rate)
        return loss

    def _orthogonal(self, matrix: Tensor) -> Tensor:
        """Nearly the nearest orthogonal matrix, by the iteration of Newton and Schulz."""
        a, b, c = self.polynomial
        is_tall = matrix.shape[0] > matrix.shape[1]
        wide = matrix.T if is_tall else matrix
        wide = wide / wide.norm().clamp(min=1e-7)
        for _ in range(self.iterations):
            gram = wide @ wide.T
            wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
        return wide.T if is_tall else wide


class DistilModule(pl.LightningModule):
    """A draft whose loss is the sum of cross-entropy and total variation. Muon trains its matrices,
    with a linear warm-up to `rate` and a cosine. Embeddings, output layer, norms and biases stay
    the target's."""

    def __init__(self, draft: Any, rate: float, steps: int) -> None:
        super().__init__()
        self.draft = draft
        self.rate = rate
        self.steps = steps
        self.strict_loading = False  # checkpoints leave out the target's weights
        draft.requires_grad_(False)
        self.matrices: list[Tensor] = []
        for weight in stored_weights(draft).values():
            if weight.dim() == 2:
                self.matrices.append(weight.requires_grad_())

    def forward(self, batch: Sampled) -> tuple[Tensor, Tensor, Tensor]:
        """The `distances` at the counted positions of a batch."""
        output = self.draft.base_model(batch.tokens_BT.long(), use_cache=False)
        states_BTD = output.last_hidden_state
        counted_BT = batch.counted_BT
        return distances(
            self.draft,
            states_BTD[counted_BT],
            batch.hidden_BTD[counted_BT],
            batch.log_total_BT[counted_BT],
        )

    def training_step(self, batch: Sampled) -> Tensor:
        loss, overlap, _ = self(batch)
        self.log_dict({"loss": loss, "overlap": overlap}, prog_bar=True)
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        draft_keys = {f"draft.{name}" for name in stored_weights(self.draft)}
        checkpoint["state_dict"] = {
            key: value for key, value in checkpoint["state_dict"].items() if key in draft_keys
        }

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = Muon(self.matrices, self.rate)
        warm = max(1, int(WARM_UP * self.steps))
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, max(1, self.steps - warm), LAST * self.rate
        )
        first = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warm, 1.0, warm)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [first, cosine], [warm])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def distances(
    draft: Any, states_ND: Tensor, hidden_ND: Tensor, log_total_N: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Means of the loss; of the overlap `sum min(p, q)`, the probability that a drafted token is
    accepted; and of the target's probability of the tokens that the draft scores (`covered`), which
    bounds the overlap. `states_ND` are the draft's last hidden states; the other two are the
    target's, as in `Sampled`."""
    device = states_ND.device.type
    if torch.is_autocast_enabled(device):
        states_ND = states_ND.to(torch.get_autocast_dtype(device))
    loss, overlap, covered = _Loss.apply(
        states_ND, draft.get_output_embeddings().weight, hidden_ND, log_total_N
    )
    return loss, overlap, covered


class _Loss(torch.autograd.Function):
    """The loss and its gradient, a few positions at a time: `[N, R]` would be gigabytes.

    With z the draft's logits and q their softmax, cross-entropy has the gradient `sum(p) q - p`,
    and `- sum min(p, q)` has `q (sum(b q) - b)`, where b is 1 for the tokens with q < p.
    """

    @staticmethod
    def forward(
        ctx: Any, states_ND: Tensor, rows_RD: Tensor, hidden_ND: Tensor, log_total_N: Tensor
    ) -> Any:
        rows_RD = rows_RD.to(states_ND.dtype)
        sums, gradient_ND = states_ND.new_zeros(3, dtype=torch.float32), torch.empty_like(states_ND)
        size = max(1, ELEMENTS // len(rows_RD))
        parts = zip(
            *(tensor.split(size) for tensor in (states_ND, hidden_ND, log_total_N, gradient_ND)),
            strict=True,
        )
        for states_nD, hidden_nD, log_total_n, gradient_nD in parts:
            p_nR = (
                linear(hidden_nD.to(rows_RD.dtype), rows_RD)
                .float()
                .sub_(log_total_n[:, None])
                .exp_()
            )
            log_q_nR = linear(states_nD, rows_RD).float().log_softmax(-1)
            q_nR, covered_n1 = log_q_nR.exp(), p_nR.sum(-1, keepdim=True)
            below_nR = q_nR * (q_nR < p_nR)
            # the draft's probability of the tokens that it underrates
            underrated_n1 = below_nR.sum(-1, keepdim=True)
            overlap = torch.minimum(p_nR, q_nR).sum()
            sums += torch.stack([-(p_nR * log_q_nR).sum(), overlap, covered_n1.sum()])
            slope_nR = q_nR.mul_(covered_n1 + underrated_n1).sub_(p_nR).sub_(below_nR)
            gradient_nD.copy_(linear(slope_nR.to(rows_RD.dtype), rows_RD.T))
        ctx.save_for_backward(gradient_ND / len(states_ND))
        cross_entropy, overlap, covered = sums / len(states_ND)
        ctx.mark_non_differentiable(overlap, covered)
        return cross_entropy + 1 - overlap, overlap, covered

    @staticmethod
    def backward(ctx: Any, slope: Tensor, *_: Any) -> Any:
        return slope * ctx.saved_tensors[0], None, None, None


def train(
    config: Config,
    draft: PreTrainedModel,
    data: Sequences,
    steps: int,
    dtype: torch.dtype,
    folder: Path,
    run_id: str,
) -> None:
    """Train a draft in place, from the last checkpoint in `folder` if there is one. The MLflow run
    gets the curves."""
    settings = config.distil
    seed = config.seed
    pl.seed_everything(seed, verbose=False)
    checkpoints = ModelCheckpoint(folder, save_last=True, save_top_k=0, every_n_train_steps=EVERY)
    order = torch.Generator().manual_seed(seed)
    loader: DataLoader[Sampled] = DataLoader(
        data, settings.sequences, shuffle=True, drop_last=True, generator=order
    )
    last = folder / "last.ckpt"
    resumed_from = str(last) if last.exists() else None
    fit(
        DistilModule(draft, settings.rate, steps),
        run_id,
        [checkpoints],
        {"train_dataloaders": loader, "ckpt_path": resumed_from, "weights_only": False},
        max_steps=steps,
        max_epochs=settings.passes,
        accelerator="cpu" if draft.device.type == "cpu" else "gpu",
        precision="bf16-mixed" if dtype == torch.bfloat16 else "32-true",
        log_every_n_steps=10,
    )
    draft.eval()


@torch.inference_mode()
def measured(
    draft: PreTrainedModel, held_out: Sequences, answers_XT: Tensor, kinds: Sequence[str]
) -> dict[str, float | dict[str, float]]:
    """`overlap`, `overlap_by_kind` of the prompts, and `covered` of `distances`: means over the
    tokens of answers."""
    module = DistilModule(draft, 0.0, 1)
    covered = MeanMetric()
    overlap = MeanMetric()
    by_kind: defaultdict[str, MeanMetric] = defaultdict(MeanMetric)
    for number, (answer_T, kind) in enumerate(zip(answers_XT, kinds, strict=True)):
        tokens = int(answer_T.sum())
        if tokens == 0:
            continue
        sequence = held_out[number]._replace(drawn_BT=answer_T)
        batch = Sampled(*(tensor.unsqueeze(0).to(draft.device) for tensor in sequence))
        _, accepted, covered_share = module(batch)
        covered.update(covered_share.cpu(), tokens)
        overlap.update(accepted.cpu(), tokens)
        by_kind[kind].update(accepted.cpu(), tokens)
    overlap_by_kind = {kind: float(mean.compute()) for kind, mean in sorted(by_kind.items())}
    return {
        "overlap": float(overlap.compute()),
        "overlap_by_kind": overlap_by_kind,
        "covered": float(covered.compute()),
    }


def speed(overlap: float, cost: float) -> float:
    """The largest `(1 + a + .. + a^l) / (1 + l c)` over chain lengths l: a overlap, c cost (arXiv
    2211.17192)."""
    speeds = []
    for length in range(LONGEST + 1):
        tokens = sum(overlap**n for n in range(length + 1))
        speeds.append(tokens / (1 + length * cost))
    return max(speeds)


@torch.inference_mode()
def cost(draft: PreTrainedModel, target: PreTrainedModel) -> float:
    """The time of a draft's forward pass of one token over that of a target's: medians of
    alternating passes."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(scored(target), (BEHIND,), generator=generator).tolist()
    models = [CachedModel(model) for model in (draft, target)]
    for model in models:
        model.fill(text)
    seconds: list[list[float]] = [[], []]
    for token in text[:TIMED]:
        for model, model_seconds in zip(models, seconds, strict=True):
            began = time.perf_counter()
            model.extend([token])
            model.check()  # a GPU has then finished
            model_seconds.append(time.perf_counter() - began)
    draft_seconds, target_seconds = seconds
    return statistics.median(draft_seconds) / statistics.median(target_seconds)
