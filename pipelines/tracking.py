"""MLflow: one run per stage, in a store that is created when it is first needed."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import psutil
import yaml

from data_gen.traces import flat
from pipelines.config import Config
from pipelines.run import provenance
from selector.schema import InputError

DEFAULT_STORE = "sqlite:///mlruns/mlflow.db"
DESCRIPTION = "mlflow.note.content"  # the tag that MLflow shows as the description of an experiment or a run
# MLflow's first page shows neither runs nor metrics
WHERE_TO_LOOK = "[One run per stage](#/experiments/{number}/runs): see its description; *Columns* lists its metrics."
SERVER_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}  # default: 4 minutes


def tracking_uri() -> str:
    return os.environ.get("MLFLOW_TRACKING_URI", DEFAULT_STORE)


@contextmanager
def mlflow_run(config: Config, stage: str, sections: Sequence[str]) -> Iterator[Any]:
    """An MLflow run of experiment `<name>` with the resolved config; yields the `mlflow` module.

    Args:
        sections: the parts of the config that become the run's parameters.

    Raises:
        InputError: MLflow's store cannot be used or written; names it. An error of the stage itself takes precedence.
    """
    import mlflow  # takes seconds
    from sqlalchemy.exc import SQLAlchemyError

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it prints a traceback of what it raises
    failures, uri = (mlflow.MlflowException, SQLAlchemyError), tracking_uri()
    os.environ |= SERVER_PATIENCE | os.environ  # a user's own values stay
    try:
        try:
            _start(mlflow, uri, config.name, stage)
        except OSError as error:  # a folder cannot be created
            raise _failure(uri, error) from error
        try:
            mlflow.set_tag("stage", stage)
            mlflow.log_params(parameters(config, stage, sections))
            mlflow.log_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), "config.yaml")
            mlflow.log_dict(provenance(config), "provenance.json")
            yield mlflow
        except BaseException as error:
            status = "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
            logging.getLogger("mlflow").setLevel(logging.CRITICAL)
            with suppress(*failures):  # where the disk is full, the first error says more
                mlflow.end_run(status)
            raise
        mlflow.end_run()
    except failures as error:
        raise _failure(uri, error) from error


def _start(mlflow: Any, uri: str, experiment: str, run_name: str) -> None:
    if uri == DEFAULT_STORE:
        _create_store(Path(uri.removeprefix("sqlite:///")))
    mlflow.set_tracking_uri(uri)
    if uri == DEFAULT_STORE:
        _keep_artefacts_in(Path("mlruns").resolve(), mlflow.MlflowClient(), experiment)
    number = mlflow.set_experiment(experiment).experiment_id
    mlflow.set_experiment_tag(DESCRIPTION, WHERE_TO_LOOK.format(number=number))
    mlflow.start_run(run_name=run_name)


def _failure(uri: str, error: Exception) -> InputError:
    """One line for any error of MLflow. The files of the run stay valid."""
    advice = "mend that, or set MLFLOW_TRACKING_URI to another store; the same command then goes on"
    return InputError(f"{uri}: MLflow's store fails: {str(error).splitlines()[0]}; {advice}")


def parameters(config: Config, stage: str, sections: Sequence[str]) -> dict[str, Any]:
    """The seed and the keys of some sections that are not null, by dotted name."""
    values = config.model_dump(mode="json", exclude_none=True)
    if stage != "pair":
        values["pair"].pop("embedded")  # the run of the pair stage has them
    values["sampling"] = "; ".join(str(setting.build()) for setting in config.sampling)
    values["verifiers"] = ", ".join(values["verifiers"])
    return flat({name: values[name] for name in ("seed", *sections)})


def describe(mlflow: Any, words: str) -> None:
    """Show in MLflow a description of what the current run found."""
    mlflow.set_tag(DESCRIPTION, words)


def _keep_artefacts_in(folder: Path, client: Any, name: str) -> None:
    """Let the experiment write its artefacts below `folder`. An experiment in a copied store still names the original
    folder. It is then renamed and keeps its runs, and a new experiment takes its name."""
    if experiment := client.get_experiment_by_name(name):
        place, number = Path(unquote(experiment.artifact_location.removeprefix("file://"))), experiment.experiment_id
        if place.is_relative_to(folder):
            return
        client.rename_experiment(number, f"{name}, copied from {place.parent} (experiment {number})")
    client.create_experiment(name, artifact_location=(folder / name).as_uri())


def _create_store(path: Path) -> None:
    """Create the database under a temporary name, because MLflow refuses one whose schema a crash left unfinished."""
    if path.exists():
        return
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    path.parent.mkdir(exist_ok=True)
    for stale in path.parent.glob(f"{path.name}.*.tmp*"):
        if not psutil.pid_exists(int(stale.name.removeprefix(f"{path.name}.").split(".")[0])):
            stale.unlink(missing_ok=True)
    # MLflow keeps an engine for each URL, which may still stand for another folder's file: a new name each time
    partial = path.with_name(f"{path.name}.{os.getpid()}.{time.time_ns()}.tmp")
    SqlAlchemyStore(f"sqlite:///{partial}", path.parent.resolve().as_uri()).engine.dispose()
    if not path.exists():  # no other process was faster
        partial.replace(path)
    partial.unlink(missing_ok=True)
