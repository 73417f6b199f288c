"""Training with Lightning, in one process or in several: early stopping, the best checkpoint, an MLflow run, Ctrl-C."""

from __future__ import annotations

import logging
import signal
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import pytorch_lightning as pl
from pytorch_lightning.callbacks import Callback, EarlyStopping, ModelCheckpoint, RichProgressBar
from pytorch_lightning.loggers import MLFlowLogger

from pipelines.config import Config
from pipelines.latency import network_shape, trunk_shape
from pipelines.stage import tracking_uri
from selector.actions import ActionSpace
from selector.data import Roots, TracesModule, shares
from selector.module import SelectorModule
from selector.stopping import StoppingModule

# what early stopping follows: the ratio of a few hundred noisy labels is too rough where there is a loss to follow
MONITORED = {"policy": ("validation/ratio", "max"), "regressor": ("validation/loss", "min")}


Module = TypeVar("Module", bound=pl.LightningModule)


@dataclass(frozen=True)
class Fitted(Generic[Module]):
    """The module as it was at its best epoch, its metrics on the whole validation split, and its checkpoint."""

    module: Module
    metrics: dict[str, float]
    checkpoint: Path


def fit(
    config: Config,
    objective: str,
    traces: TracesModule,
    folder: Path,
    run_id: str,
    left_out: Sequence[str] = (),
    errors_of: Roots | None = None,
) -> Fitted[SelectorModule]:
    """Train one objective as `config.train` says.

    Args:
        folder: for the checkpoint.
        run_id: of the MLflow run that gets the curves.
        left_out, errors_of: as in `SelectorModule` and its `fit_standardisation`.
    """
    pl.seed_everything(config.seed, verbose=False)
    module = SelectorModule(
        objective=objective,
        hidden_widths=[states.shape[1] for name, states in traces.train.features().items() if name != "scalars"],
        actions=len(ActionSpace.default()),
        network=network_shape(config),
        trunk=trunk_shape(config),
        error_powers=list(config.train.error_powers),
        learning_rate=config.train.learning_rate,
        weight_decay=config.train.weight_decay,
        epochs=config.train.epochs,
        worst_weight=config.train.worst_weight,
        worst_share=config.train.worst_share,
        left_out=list(left_out),
        verifiers=len(traces.verifiers),
    )
    module.fit_standardisation(traces.train, errors_of)
    return fit_best(config, module, traces, folder, MONITORED[objective], run_id)


def fit_stopping(config: Config, traces: TracesModule, folder: Path, run_id: str) -> Fitted[StoppingModule]:
    """Train the stopping head; arguments as `fit`'s."""
    pl.seed_everything(config.seed, verbose=False)
    module = StoppingModule(
        hidden_width=traces.train.trunk_hidden_BSTD.shape[-1],
        network=trunk_shape(config),
        rejection_weight=config.train.rejection_weight,
        learning_rate=config.train.learning_rate,
        weight_decay=config.train.weight_decay,
    )
    module.fit_standardisation(traces.train)
    return fit_best(config, module, traces, folder, ("validation/loss", "min"), run_id)


def fit_best(
    config: Config, module: Module, traces: TracesModule, folder: Path, monitor: tuple[str, str], run_id: str
) -> Fitted[Module]:
    """Train a module and go back to its best epoch.

    Args:
        monitor: the metric that tells the best epoch, and "min" or "max".
    """
    shares(len(traces.validation), config.train.devices, 0)  # said here, and not by a process of its own
    name, mode = monitor
    checkpoints = ModelCheckpoint(folder, filename="best", monitor=name, mode=mode, enable_version_counter=False)
    early = EarlyStopping(name, mode=mode, patience=config.train.patience)
    with _quiet():
        trainer = trainer_of(config, [checkpoints, early, RichProgressBar(), _StopBetweenBatches()], run_id)
        try:
            trainer.fit(module, datamodule=traces)
            best = type(module).load_from_checkpoint(checkpoints.best_model_path, map_location="cpu")
            metrics = dict(trainer.validate(best, datamodule=traces, verbose=False)[0])
        except SystemExit as stopped:  # what Lightning makes of Ctrl-C
            raise KeyboardInterrupt from stopped
    return Fitted(best, metrics, Path(checkpoints.best_model_path))


def trainer_of(config: Config, callbacks: list[Callback], run_id: str) -> pl.Trainer:
    """On the CPU: the network is small, and so are the traces, so that no GPU is worth the copies."""
    train = config.train
    # Lightning's own choice starts the whole command once more for every process
    strategy = "ddp_spawn" if train.strategy == "auto" and train.devices > 1 else train.strategy
    return pl.Trainer(
        max_epochs=train.epochs,
        accelerator="cpu",
        devices=train.devices,
        strategy=strategy,
        use_distributed_sampler=False,  # it repeats roots; `TracesModule` has each validated once
        logger=MLFlowLogger(run_id=run_id, tracking_uri=tracking_uri(), log_model=False),
        callbacks=callbacks,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        log_every_n_steps=1,
    )


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
