"""Training with Lightning: the whole learning-rate schedule, the best epoch by replay, an MLflow run, Ctrl-C, and a
user's own callbacks and loggers."""

from __future__ import annotations

import logging
import pkgutil
import signal
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback, LearningRateMonitor, ModelCheckpoint, RichProgressBar
from pytorch_lightning.loggers import Logger, MLFlowLogger

from pipelines.config import Config
from pipelines.tracking import tracking_uri
from selector.schema import InputError
from selector.train.module import RootsModule, SelectorModule

MONITOR = "validation/replay"
RATE, BATCH, FASTEST = 3e-3, 256, 1e-2  # the peak learning rate up to this batch size, and for the largest batches
POLICY_NETWORK = {"width": 128, "hidden": [512, 32]}  # DDTE, app. E
REMARKS = (  # Lightning's warnings that do not apply to data in memory and a folder of our own
    ".*does not have many workers.*",
    ".*Checkpoint directory .* exists and is not empty.*",
    ".*treespec, LeafSpec.*",
    ".*smaller than the logging interval.*",
)


def module_of(config: Config, objective: str, level: str, hidden_widths: list[int], **further: Any) -> SelectorModule:
    """An untrained module: a regressor with the network of `config.train`, or a policy with the paper's. `further`
    arguments are those of `SelectorModule`."""
    pl.seed_everything(config.seed, verbose=False)
    rate = min(FASTEST, RATE * max(1, config.train.batch / BATCH) ** 0.5)
    network = config.train.network if objective == "regressor" else POLICY_NETWORK
    return SelectorModule(objective, level, hidden_widths, network, rate, **further)


def fit(config: Config, module: SelectorModule, roots: RootsModule, folder: Path, run_id: str) -> SelectorModule:
    """Train a module for all its epochs, and return it as it was at the best one: by replay, or by the loss where
    nothing is replayed. The checkpoint is `best.ckpt` in `folder`; the MLflow run gets the curves."""
    monitor, mode = (MONITOR, "max") if module.judged else ("validation/loss", "min")
    checkpoints = ModelCheckpoint(folder, filename="best", monitor=monitor, mode=mode, enable_version_counter=False)
    for name in ("utilities.rank_zero", "accelerators.cuda"):  # they remark on the hardware
        logging.getLogger(f"pytorch_lightning.{name}").setLevel(logging.WARNING)
    own = [(name, make()) for name, make in added(config).items()]
    for name, each in own:
        if not isinstance(each, Callback | Logger):
            raise InputError(f"train.lightning: {name} makes a {type(each).__name__}, no Lightning callback or logger")
    callbacks = [each for _, each in own if isinstance(each, Callback)]
    loggers = [each for _, each in own if isinstance(each, Logger)]
    with warnings.catch_warnings():
        for remark in REMARKS:
            warnings.filterwarnings("ignore", message=remark)
        trainer = pl.Trainer(
            max_epochs=config.train.epochs,
            accelerator="cpu",  # the network is so small that copies to a GPU would take longer
            devices=1,
            logger=[MLFlowLogger(run_id=run_id, tracking_uri=tracking_uri(), log_model=False), *loggers],
            callbacks=[checkpoints, RichProgressBar(), LearningRateMonitor("epoch"), StopBetweenBatches(), *callbacks],
            enable_model_summary=False,
            num_sanity_val_steps=0,
            log_every_n_steps=50,
        )
        try:
            trainer.fit(module, datamodule=roots)
        except SystemExit as stopped:  # Lightning turns Ctrl-C into it
            raise KeyboardInterrupt from stopped
    return SelectorModule.load_from_checkpoint(checkpoints.best_model_path, map_location="cpu").eval()


def added(config: Config) -> dict[str, Callable[[], object]]:
    """What makes the user's own callbacks and loggers, by name; InputError where a name cannot be imported."""
    sys.path.insert(0, "")  # the current folder, which a console script does not search
    try:
        return {name: pkgutil.resolve_name(name) for name in config.train.lightning}
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"train.lightning: {error}") from error
    finally:
        sys.path.remove("")


class StopBetweenBatches(Callback):
    """Lets Ctrl-C take effect at the next batch: in the middle of a write it would leave MLflow's database locked."""

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
