"""Training with Lightning: the whole learning-rate schedule, the best epoch by replay, an MLflow
run, and Ctrl-C."""

from __future__ import annotations

import logging
import signal
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback, LearningRateMonitor, ModelCheckpoint
from pytorch_lightning.loggers import MLFlowLogger
from torch import Tensor

from pipelines.config import Config
from pipelines.pair.source import source_of
from pipelines.terminal import ticking
from pipelines.tracking import tracking_uri
from selector.decision import Setting
from selector.schema import FULL, HIDDEN_STATES
from selector.train.data import Texts, Timed
from selector.train.module import Roots, SelectorModule, learned_rows

OWN = ("train", "validation")  # the splits that training reads
MONITOR = "validation/replay"
RATE = 3e-3  # peak learning rate up to the batch size `BATCH`
BATCH = 256
FASTEST = 1e-2  # the highest peak learning rate
LEAST_STEPS = 20  # of the optimiser in an epoch
POLICY_NETWORK = {"width": 128, "hidden": [512, 32]}  # DDTE, app. E
REMARKS = (  # Lightning's warnings that do not apply to data in memory and a reused folder
    ".*does not have many workers.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*treespec, LeafSpec.*",
    ".*smaller than the logging interval.*",
    ".*in eval mode at the start.*",  # a draft's embeddings are its target's
)


def module_of(config: Config, objective: str, level: str, texts: Texts) -> SelectorModule:
    """An untrained module for texts like these: a regressor with the network of `config.train`, or
    for the policy objective with the paper's."""
    pl.seed_everything(config.seed, verbose=False)
    rate = min(FASTEST, RATE * max(1, batch_of(config, texts) / BATCH) ** 0.5)
    return SelectorModule(
        objective,
        level,
        [texts.hidden[name].shape[1] for name in HIDDEN_STATES] if level == FULL else [],
        config.train.network if objective == "regressor" else POLICY_NETWORK,
        rate,
        texts.schema.name,
        texts.space.to_json(),
        source_of(config).squared_weight,
    )


def batch_of(config: Config, texts: Texts) -> int:
    """Roots of one optimiser step: `train.batch`, or fewer where an epoch over some training texts
    had less than `LEAST_STEPS` steps."""
    roots = len(learned_rows(texts, config.data.stride))
    return max(2, min(config.train.batch, roots // LEAST_STEPS))


def fitted(
    config: Config,
    module: SelectorModule,
    splits: dict[str, Texts],
    verifier: str,
    judged: list[tuple[Timed, Setting]],
    folder: Path,
    run_id: str,
    further: dict[str, tuple[Tensor, Tensor]] | None = None,
) -> SelectorModule:
    """Train a module on a verifier's labels for all epochs, and return it as it was at the best
    one: by replay of `judged`, or by the validation loss if that is empty. The checkpoint is
    `best.ckpt` in `folder`; the MLflow run gets the curves. `judged` and `further` are those of
    `SelectorModule` and `Roots`."""
    texts = {name: splits[name] for name in OWN}
    batch = batch_of(config, texts["train"])
    roots = Roots(module, texts, verifier, batch, config.seed, config.data.stride, further)
    module.begin_at(texts["train"], verifier, roots.rows["train"])
    module.judged = judged
    monitor, mode = (MONITOR, "max") if judged else ("validation/loss", "min")
    checkpoints = ModelCheckpoint(
        folder, filename="best", monitor=monitor, mode=mode, enable_version_counter=False
    )
    fit(
        module,
        run_id,
        [checkpoints, LearningRateMonitor("epoch")],
        {"train_dataloaders": roots.loader("train"), "val_dataloaders": roots.loader("validation")},
        max_epochs=config.train.epochs,
        accelerator="cpu",  # the network is so small that copies to a GPU would take longer
        num_sanity_val_steps=0,
        log_every_n_steps=50,
    )
    best = SelectorModule.load_from_checkpoint(checkpoints.best_model_path, map_location="cpu")
    return best.eval()


def fit(
    module: pl.LightningModule,
    run_id: str,
    hooks: list[Callback],
    data: dict[str, Any],
    **settings: Any,
) -> None:
    """Train a module with Lightning; the MLflow run gets the curves, and Ctrl-C raises
    KeyboardInterrupt. `data` are further arguments of `Trainer.fit`, and `settings` of the
    trainer."""
    for name in ("utilities.rank_zero", "accelerators.cuda"):  # they remark on the hardware
        logging.getLogger(f"pytorch_lightning.{name}").setLevel(logging.WARNING)
    with warnings.catch_warnings(), ExitStack() as shown:
        for remark in REMARKS:
            warnings.filterwarnings("ignore", message=remark)
        trainer = pl.Trainer(
            devices=1,
            logger=[MLFlowLogger(run_id=run_id, tracking_uri=tracking_uri(), log_model=False)],
            callbacks=[*hooks, ProgressBar(shown), StopBetweenBatches()],
            enable_progress_bar=False,
            enable_model_summary=False,
            **settings,
        )
        try:
            trainer.fit(module, **data)
        except SystemExit as stopped:  # Lightning turns Ctrl-C into it
            raise KeyboardInterrupt from stopped


class ProgressBar(Callback):
    """The steps of a training, as those of all stages are shown, until `shown` is closed."""

    def __init__(self, shown: ExitStack) -> None:
        self.shown = shown

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        steps = int(trainer.estimated_stepping_batches)
        self.tick = self.shown.enter_context(ticking("training", steps, trainer.global_step))

    def on_train_batch_end(self, trainer: pl.Trainer, *_: object) -> None:
        means = [f"{name} {value:.3f}" for name, value in trainer.progress_bar_metrics.items()]
        self.tick(note=", ".join(means))


class StopBetweenBatches(Callback):
    """Lets Ctrl-C take effect at the next batch: in the middle of a write it would leave MLflow's
    database locked."""

    def __init__(self) -> None:
        self.pressed = False

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        def note(*_: object) -> None:
            if self.pressed:
                raise KeyboardInterrupt
            self.pressed = True

        self.before = signal.signal(signal.SIGINT, note)

    def on_train_batch_start(self, *_: object) -> None:
        if self.pressed:
            raise KeyboardInterrupt

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        signal.signal(signal.SIGINT, self.before)
        if self.pressed and not trainer.interrupted:
            raise KeyboardInterrupt
