"""Training of a draft with Lightning, and how fast it is expected to decode.

The loss sums two distances of the draft's next-token distributions from the target's (DistillSpec,
arXiv 2310.08461). The target's logits of the tokens that the draft scores are recomputed from the
target's stored hidden states. With the stored logsumexp over all tokens they give the exact
probabilities.

Legend: X sequences, T tokens of a sequence, N positions, R tokens that the draft scores, D hidden
    width.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.data import DataLoader, Sampler
from transformers import PreTrainedModel

from data_gen.models.distilled import output_bias, stored_weights
from data_gen.models.pair import CachedModel, scored
from pipelines.distil.texts import Sampled, Sequences
from pipelines.train.fitting import fit

LONGEST = 32  # drafted tokens of the longest chain that `speed` looks at
TIMED = 15  # forward passes that are timed
BEHIND = 200  # the tokens before them
EVERY = 100  # steps between checkpoints
SEQUENCES = 8  # of one optimiser step
RATE = 1e-2  # peak learning rate
WEIGHT_DECAY = 0.01
MOMENTUM = 0.95
WARM_UP = 0.05  # share of the steps
LAST = 0.02  # the last learning rate, as a share of the peak
ELEMENTS = 1 << 21  # probabilities computed at once


class Muon(torch.optim.Optimizer):
    """Muon (Jordan 2024) with the settings of torch's own, but in the matrices' precision: torch's
    is in bfloat16 on every device, and takes half a minute a step on a CPU without instructions for
    that."""

    def __init__(self, matrices: Sequence[Tensor], rate: float) -> None:
        super().__init__(matrices, {"lr": rate})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any]) -> Any:  # type: ignore[override]
        loss = torch.enable_grad()(closure)()
        (group,) = self.param_groups
        for matrix in group["params"]:
            mean = self.state[matrix].setdefault("mean", torch.zeros_like(matrix))
            mean.lerp_(matrix.grad, 1 - MOMENTUM)
            update = orthogonal(matrix.grad.lerp(mean, MOMENTUM))
            matrix.mul_(1 - group["lr"] * WEIGHT_DECAY)
            # updates are as large as AdamW's
            matrix.sub_(update, alpha=group["lr"] * 0.2 * max(matrix.shape) ** 0.5)
        return loss


def orthogonal(matrix: Tensor) -> Tensor:
    """Nearly the nearest orthogonal matrix, by the iteration of Newton and Schulz."""
    a, b, c = 3.4445, -4.775, 2.0315
    is_tall = matrix.shape[0] > matrix.shape[1]
    wide = matrix.T if is_tall else matrix
    wide = wide / wide.norm().clamp(min=1e-7)
    for _ in range(5):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if is_tall else wide


class Batches(Sampler[list[int]]):
    """The sequences of every step: all of them in another order in each epoch. The first steps are
    left out where they are done."""

    def __init__(self, sequences: int, steps: int, done: int) -> None:
        generator = torch.Generator().manual_seed(0)
        epochs = math.ceil(steps * SEQUENCES / sequences)
        orders = [torch.randperm(sequences, generator=generator) for _ in range(epochs)]
        self.batches: list[list[int]] = list(torch.cat(orders).split(SEQUENCES))[:steps]
        self.done = done

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.batches[self.done :])

    def __len__(self) -> int:
        return len(self.batches)


class DistilModule(pl.LightningModule):
    """A draft whose loss is the sum of cross-entropy and total variation. Muon trains its matrices,
    with a linear warm-up to `RATE` and a cosine. Embeddings, output layer, norms and biases stay
    the target's. It goes on from a checkpoint as if it had not been stopped."""

    def __init__(self, draft: Any, data: Sequences, steps: int) -> None:
        super().__init__()
        self.draft = draft
        self.data = data
        self.steps = steps
        self.strict_loading = False  # checkpoints leave out the target's weights
        draft.requires_grad_(False)
        self.matrices: list[Tensor] = []
        for weight in stored_weights(draft).values():
            if weight.dim() == 2:
                self.matrices.append(weight.requires_grad_())

    def train_dataloader(self) -> DataLoader[Sampled]:
        batches = Batches(len(self.data), self.steps, done=self.global_step)
        return DataLoader(self.data, batch_sampler=batches)

    def training_step(self, sequences: Sampled) -> Tensor:
        loss, overlap, _ = distances(self.draft, sequences)
        self.log_dict({"loss": loss, "overlap": overlap}, prog_bar=True)
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        draft_keys = {f"draft.{name}" for name in stored_weights(self.draft)}
        checkpoint["state_dict"] = {
            key: value for key, value in checkpoint["state_dict"].items() if key in draft_keys
        }

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = Muon(self.matrices, RATE)
        warm = max(1, int(WARM_UP * self.steps))
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(
            optimizer, max(1, self.steps - warm), LAST * RATE
        )
        first = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / warm, 1.0, warm)
        schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [first, cosine], [warm])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def distances(draft: Any, sequences: Sampled) -> tuple[Tensor, Tensor, Tensor]:
    """Means over the counted positions of some sequences: of the loss; of the overlap `sum min(p,
    q)`, the probability that a drafted token is accepted; and of the target's probability of the
    tokens that the draft scores (`covered`), which bounds the overlap."""
    output = draft.base_model(sequences.tokens_BT.long(), use_cache=False)
    counted_BT = sequences.counted_BT
    states_ND = output.last_hidden_state[counted_BT]
    device = states_ND.device.type
    if torch.is_autocast_enabled(device):
        states_ND = states_ND.to(torch.get_autocast_dtype(device))
    head = draft.get_output_embeddings()
    rows_RD = head.weight.to(states_ND.dtype)
    bias_R = output_bias(head)
    if bias_R is not None:
        bias_R = bias_R.to(states_ND.dtype)
    hidden_ND = sequences.hidden_BTD[counted_BT].to(rows_RD.dtype)
    with torch.no_grad():
        means, gradient_ND = loss_and_gradient(
            states_ND, rows_RD, bias_R, hidden_ND, sequences.log_total_BT[counted_BT]
        )
    cross_entropy, overlap, covered = means
    slope = (states_ND * gradient_ND).sum()  # has this gradient
    return cross_entropy + 1 - overlap + slope - slope.detach(), overlap, covered


def loss_and_gradient(
    states_ND: Tensor,
    rows_RD: Tensor,
    bias_R: Tensor | None,
    hidden_ND: Tensor,
    log_total_N: Tensor,
) -> tuple[Tensor, Tensor]:
    """Means of the cross-entropy, the overlap and the covered probability, [3], and the gradient of
    the loss by the draft's last hidden states, [N, D]. `rows_RD` and `bias_R` are the output
    layer's; `hidden_ND` and `log_total_N` are the target's, as in `Sampled`. A few positions at a
    time: `[N, R]` would be gigabytes.

    With z the draft's logits and q their softmax, cross-entropy has the gradient `sum(p) q - p`,
    and `- sum min(p, q)` has `q (sum(b q) - b)`, where b is 1 for the tokens with q < p.
    """
    sums = states_ND.new_zeros(3, dtype=torch.float32)
    gradient_ND = torch.empty_like(states_ND)
    size = max(1, ELEMENTS // len(rows_RD))
    for begin in range(0, len(states_ND), size):
        part = slice(begin, begin + size)
        logits_nR = linear(hidden_ND[part], rows_RD, bias_R).float()
        p_nR = logits_nR.sub_(log_total_N[part, None]).exp_()
        log_q_nR = linear(states_ND[part], rows_RD, bias_R).float().log_softmax(-1)
        q_nR = log_q_nR.exp()
        covered_n1 = p_nR.sum(-1, keepdim=True)
        below_nR = q_nR * (q_nR < p_nR)
        # the draft's probability of the tokens that it underrates
        underrated_n1 = below_nR.sum(-1, keepdim=True)
        overlap = torch.minimum(p_nR, q_nR).sum()
        sums += torch.stack([-(p_nR * log_q_nR).sum(), overlap, covered_n1.sum()])
        slope_nR = q_nR.mul_(covered_n1 + underrated_n1).sub_(p_nR).sub_(below_nR)
        gradient_ND[part] = linear(slope_nR.to(rows_RD.dtype), rows_RD.T)
    return sums / len(states_ND), gradient_ND / len(states_ND)


def train(
    draft: PreTrainedModel,
    data: Sequences,
    steps: int,
    dtype: torch.dtype,
    folder: Path,
    run_id: str,
) -> None:
    """Train a draft in place, from the last checkpoint in `folder` if there is one. The MLflow run
    gets the curves."""
    last = folder / "last.ckpt"
    fit(
        DistilModule(draft, data, steps),
        run_id,
        [ModelCheckpoint(folder, save_last=True, save_top_k=0, every_n_train_steps=EVERY)],
        {"ckpt_path": last if last.exists() else None, "weights_only": False},
        max_steps=steps,
        max_epochs=1,
        accelerator="cpu" if draft.device.type == "cpu" else "gpu",
        precision="bf16-mixed" if dtype == torch.bfloat16 else "32-true",
        log_every_n_steps=10,
    )
    draft.eval()


@torch.inference_mode()
def measured(
    draft: PreTrainedModel, held_out: Sequences, answers_XT: Tensor, kinds: Sequence[str]
) -> dict[str, float | dict[str, float]]:
    """`overlap`, `overlap_by_kind` of the prompts, and `covered`, as in `distances`: means over the
    tokens of answers."""
    rows = []
    for number, (answer_T, kind) in enumerate(zip(answers_XT, kinds, strict=True)):
        tokens = int(answer_T.sum())
        if tokens == 0:
            continue
        sequence = held_out[number]._replace(drawn_BT=answer_T)
        sequences = Sampled(*(tensor.unsqueeze(0).to(draft.device) for tensor in sequence))
        _, overlap, covered = distances(draft, sequences)
        rows.append((kind, tokens, tokens * float(overlap), tokens * float(covered)))
    sums = pd.DataFrame(rows, columns=["kind", "tokens", "overlap", "covered"])
    by_kind = sums.groupby("kind").sum()
    total = by_kind.sum()
    return {
        "overlap": total.overlap / total.tokens,
        "overlap_by_kind": (by_kind.overlap / by_kind.tokens).to_dict(),
        "covered": total.covered / total.tokens,
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
