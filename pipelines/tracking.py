"""MLflow: a run for each stage, in the experiment that is named after the config; the networks of a
training are runs below it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock

from data_gen.traces import flat, read_manifest
from pipelines.config import Config
from pipelines.run import provenance
from selector.schema import InputError

T = TypeVar("T")
STORE = Path("mlruns")
# the tag that MLflow shows as the description of an experiment or a run
DESCRIPTION = "mlflow.note.content"
ABOUT = """Stages, with their networks below `train`. The ratios are speeds over the best static
tree: means over sampling settings and, as `.../T ...`, for each.

- `replayed_ratio`: a network alone, on validation texts; networks are compared by it
- `kept_ratio`: with the lookup rule or the static tree where these are kept
- `exported_ratio`: what is exported, on held-out texts

The selector is a version of the registered model `espalier-selector`."""
EXPORTED = "exported_ratio"
# default: 4 minutes
SERVER_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}


def tracking_uri() -> str:
    return os.environ.get("MLFLOW_TRACKING_URI", f"sqlite:///{STORE}/mlflow.db")


@contextmanager
def mlflow_run(config: Config, stage: str) -> Iterator[Any]:
    """An MLflow run of a stage, with the config as its parameters; yields the `mlflow` module.
    InputError where MLflow's store cannot be read or written: before the stage's work, or after
    what it keeps for the next time."""
    import mlflow  # takes seconds
    from sqlalchemy.exc import SQLAlchemyError

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    # it prints a traceback of what it raises
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    for name, value in SERVER_PATIENCE.items():
        os.environ.setdefault(name, value)
    failures = (mlflow.MlflowException, SQLAlchemyError)
    with _as_input_error(OSError, *failures):
        mlflow.set_tracking_uri(tracking_uri())
        STORE.mkdir(exist_ok=True)
        with FileLock(STORE / ".lock"):  # another run may be about to create the same store
            mlflow.set_experiment(config.name)
        mlflow.set_experiment_tags({DESCRIPTION: ABOUT})
    made_with = provenance(config)
    sampling = "; ".join(str(sampling_setting.build()) for sampling_setting in config.sampling)
    with _as_input_error(*failures), mlflow.start_run(run_name=stage):
        mlflow.log_params(flat({**made_with["config"], "sampling": sampling}))
        mlflow.log_dict(made_with, "provenance.json")
        yield mlflow


@contextmanager
def _as_input_error(*failures: type[Exception]) -> Iterator[None]:
    try:
        yield
    except failures as error:
        reason = str(error).splitlines()[0]
        advice = (
            "fix that, or set MLFLOW_TRACKING_URI to another store; the same command then goes on"
        )
        raise InputError(f"{tracking_uri()}: MLflow's store fails: {reason}; {advice}") from error


def describe(mlflow: Any, words: str) -> None:
    """Describe what the current run found, in MLflow."""
    mlflow.set_tag(DESCRIPTION, words)


def named(figures: Mapping[str, T], row: Mapping[str, Any]) -> dict[str, T]:
    """Metrics or tags with their case in their names: that of a row as `Setting.row`."""
    case = f"T {row['temperature']:g} top-p {row['top_p']:g}"
    if row.get("level"):
        case += f" batch {row['batch']} {row['level']}"
    return {f"{name}/{case}": value for name, value in figures.items()}


def metric_name(words: str) -> str:
    """Words without what MLflow refuses in a metric's name."""
    return re.sub(r"[^\w./ -]", "", words).replace(" ", "_")


def log_traces(mlflow: Any, folder: Path, splits: Sequence[str]) -> None:
    """Log splits of a trace store as data sets of the current run, by the checksums of their
    shards."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    shards = read_manifest(folder)["shards"]
    datasets = []
    for split in splits:
        digest = hashlib.sha256()
        for name, shard in sorted(shards.items()):
            if name.startswith(f"{split}/"):
                digest.update(shard["sha256"].encode())
        source = json.dumps({"uri": str((folder / split).resolve())})
        dataset = Dataset(f"traces {split}", digest.hexdigest()[:16], "local", source)
        datasets.append(DatasetInput(dataset, [InputTag("mlflow.data.context", split)]))
    mlflow.MlflowClient().log_inputs(mlflow.active_run().info.run_id, datasets)
