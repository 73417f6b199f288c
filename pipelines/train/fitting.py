"""Training with Lightning: the whole learning-rate schedule, the best epoch by replay, an MLflow run, Ctrl-C."""

from __future__ import annotations

import logging
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback, ModelCheckpoint, RichProgressBar
from pytorch_lightning.loggers import MLFlowLogger

from pipelines.config import Config
from pipelines.tracking import tracking_uri
from selector.train.module import RootsModule, SelectorModule

MONITOR = "validation/replay"


def module_of(config: Config, objective: str, level: str, hidden_widths: list[int]) -> SelectorModule:
    """An untrained module as `config.train` says."""
    pl.seed_everything(config.seed, verbose=False)
    return SelectorModule(
        objective=objective,
        level=level,
        hidden_widths=hidden_widths,
        network=config.train.network,
        learning_rate=config.train.learning_rate,
        weight_decay=config.train.weight_decay,
        worst_weight=config.train.worst_weight,
        worst_share=config.train.worst_share,
    )


def fit(config: Config, module: SelectorModule, roots: RootsModule, folder: Path, run_id: str) -> SelectorModule:
    """Train a module for all its epochs, and go back to the one that was the best by replay, or by the loss where
    nothing is replayed.

    Args:
        folder: for the checkpoint, `best.ckpt`.
        run_id: of the MLflow run that gets the curves.
    """
    monitor, mode = (MONITOR, "max") if module.judged else ("validation/loss", "min")
    checkpoints = ModelCheckpoint(folder, filename="best", monitor=monitor, mode=mode, enable_version_counter=False)
    with _quiet():
        trainer = pl.Trainer(
            max_epochs=config.train.epochs,
            accelerator="cpu",  # the network is small: no GPU is worth the copies
            devices=1,
            logger=MLFlowLogger(run_id=run_id, tracking_uri=tracking_uri(), log_model=False),
            callbacks=[checkpoints, RichProgressBar(), _StopBetweenBatches()],
            enable_model_summary=False,
            num_sanity_val_steps=0,
            log_every_n_steps=50,
        )
        try:
            trainer.fit(module, datamodule=roots)
        except SystemExit as stopped:  # what Lightning makes of Ctrl-C
            raise KeyboardInterrupt from stopped
    return SelectorModule.load_from_checkpoint(checkpoints.best_model_path, map_location="cpu").eval()


class _StopBetweenBatches(Callback):
    """Ctrl-C takes effect at the next batch: in the middle of a write it would leave MLflow's database locked."""

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


@contextmanager
def _quiet() -> Iterator[None]:
    """Leaves out Lightning's remarks on workers, which do not apply to data in memory, and on the hardware."""
    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    for name in _LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have many workers.*")
        warnings.filterwarnings("ignore", message=".*Checkpoint directory .* exists and is not empty.*")
        warnings.filterwarnings("ignore", message=".*treespec, LeafSpec.*")
        warnings.filterwarnings("ignore", message=".*smaller than the logging interval.*")
        yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


_LOGGERS = ("pytorch_lightning.utilities.rank_zero", "pytorch_lightning.accelerators.cuda")
