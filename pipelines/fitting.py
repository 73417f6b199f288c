"""Training with Lightning: early stopping, the best checkpoint, an MLflow run, Ctrl-C."""

from __future__ import annotations

import logging
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback, EarlyStopping, ModelCheckpoint, RichProgressBar
from pytorch_lightning.loggers import MLFlowLogger

from pipelines.config import Config
from pipelines.stage import tracking_uri
from selector.data import TracesModule

Module = TypeVar("Module", bound=pl.LightningModule)


def fit_best(
    config: Config, module: Module, traces: TracesModule, folder: Path, monitor: tuple[str, str], run_id: str
) -> tuple[Module, dict[str, float], Path]:
    """Train a module and go back to its best epoch.

    Args:
        folder: for checkpoints.
        monitor: the metric that tells the best epoch, and "min" or "max".
        run_id: of the MLflow run.

    Returns:
        the module at its best epoch, its validation metrics, and its checkpoint.
    """
    name, mode = monitor
    checkpoints = ModelCheckpoint(folder, filename="best", monitor=name, mode=mode, enable_version_counter=False)
    callbacks: list[Callback] = [
        checkpoints,
        EarlyStopping(name, mode=mode, patience=config.train.patience),
        RichProgressBar(),
        _StopBetweenBatches(),
    ]
    with _quiet():
        trainer = pl.Trainer(
            max_epochs=config.train.epochs,
            accelerator="cpu",  # the network is small, and so are the traces: no GPU is worth the copies
            devices=1,
            logger=MLFlowLogger(run_id=run_id, tracking_uri=tracking_uri(), log_model=False),
            callbacks=callbacks,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            log_every_n_steps=1,
        )
        try:
            trainer.fit(module, datamodule=traces)
            best = type(module).load_from_checkpoint(checkpoints.best_model_path, map_location="cpu")
            metrics = dict(trainer.validate(best, datamodule=traces, verbose=False)[0])
        except SystemExit as stopped:  # what Lightning makes of Ctrl-C
            raise KeyboardInterrupt from stopped
    return best, metrics, Path(checkpoints.best_model_path)


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
        yield
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


_LOGGERS = ("pytorch_lightning.utilities.rank_zero", "pytorch_lightning.accelerators.cuda")
