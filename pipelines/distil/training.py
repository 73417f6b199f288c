"""Training of a draft with Lightning, and what the draft promises.

`overlap` is the probability that a drafted token is accepted, `cost` a draft pass as a share of a target pass, and
`speed` that of the best chain over plain decoding if both were constant.

Legend: X sequences, T tokens of a sequence.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric
from transformers import PreTrainedModel

from data_gen.models.pair import CachedModel
from data_gen.models.vocabulary import scored
from pipelines.config.sections import Distil
from pipelines.distil.objective import DistilModule, Places
from pipelines.distil.texts import Sequences
from pipelines.train.fitting import fit

LONGEST = 32  # drafted tokens of the longest chain that `speed` looks at
TIMED, BEHIND = 15, 200  # passes that are timed, and the tokens before them
EVERY = 100  # steps between checkpoints


def train(
    own: Distil,
    seed: int,
    draft: PreTrainedModel,
    data: Sequences,
    steps: int,
    dtype: torch.dtype,
    folder: Path,
    run_id: str,
) -> None:
    """Train a draft in place, from the last checkpoint in `folder` on; the MLflow run gets the curves."""
    pl.seed_everything(seed, verbose=False)
    checkpoints = ModelCheckpoint(folder, save_last=True, save_top_k=0, every_n_train_steps=EVERY)
    last, order = folder / "last.ckpt", torch.Generator().manual_seed(seed)
    loader: DataLoader[Places] = DataLoader(data, own.sequences, shuffle=True, drop_last=True, generator=order)
    fit(
        DistilModule(draft, own.rate, steps),
        run_id,
        [checkpoints],
        {"train_dataloaders": loader, "ckpt_path": str(last) if last.exists() else None, "weights_only": False},
        max_steps=steps,
        max_epochs=own.passes,
        accelerator="cpu" if draft.device.type == "cpu" else "gpu",
        precision="bf16-mixed" if dtype == torch.bfloat16 else "32-true",
        log_every_n_steps=10,
    )
    draft.eval()


@torch.inference_mode()
def measured(
    draft: PreTrainedModel, held_out: Sequences, answers_XT: Tensor, kinds: Sequence[str]
) -> dict[str, float | dict[str, float]]:
    """`overlap`, also by the kind of each sequence's prompt, and `covered`, over the places whose next token belongs to
    an answer, bool [X, T]."""
    module, covered = DistilModule(draft, 0.0, 1), MeanMetric()
    overlaps = {kind: MeanMetric() for kind in ("", *sorted(set(kinds)))}
    for number, (places_1T, kind) in enumerate(zip(answers_XT.split(1), kinds, strict=True)):
        if own := int(places_1T.sum()):
            tokens, hidden, total, _ = (each.unsqueeze(0).to(draft.device) for each in held_out[number])
            _, overlap, said = module(Places(tokens, hidden, total, places_1T.to(draft.device)))
            covered.update(said.cpu(), own)
            for name in ("", kind):
                overlaps[name].update(overlap.cpu(), own)
    all_kinds, *by_kind = (float(each.compute()) for each in overlaps.values())
    named = dict(zip(list(overlaps)[1:], by_kind, strict=True))
    return {"overlap": all_kinds, "overlap_by_kind": named, "covered": float(covered.compute())}


def speed(overlap: float, cost: float) -> float:
    """The largest `(1 + a + .. + a^l) / (1 + l c)` over chains of length l."""
    return max(sum(overlap**n for n in range(length + 1)) / (1 + length * cost) for length in range(LONGEST + 1))


@torch.inference_mode()
def cost(draft: PreTrainedModel, target: PreTrainedModel) -> float:
    """A draft pass of one token as a share of a target pass: medians of passes that alternate."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(scored(target), (BEHIND,), generator=generator).tolist()
    models = [CachedModel(model) for model in (draft, target)]
    for model in models:
        model.fill(text)
    seconds: list[list[float]] = [[], []]
    for token in text[:TIMED]:
        for model, own in zip(models, seconds, strict=True):
            began = time.perf_counter()
            model.extend([token])
            model.check()  # a GPU has then finished
            own.append(time.perf_counter() - began)
    draft_seconds, target_seconds = map(statistics.median, seconds)
    return draft_seconds / target_seconds
