"""MLflow: one run per stage, in a store that is made when it is first needed."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import yaml

from data_gen.traces import flat
from pipelines.config import Config, SamplingSetting
from pipelines.config.reference import READS
from pipelines.run import provenance
from selector.schema import InputError

DEFAULT_STORE = "sqlite:///mlruns/mlflow.db"
DESCRIPTION = "mlflow.note.content"  # the tag that MLflow shows as a description, of an experiment or of a run
WHERE_TO_LOOK = (  # MLflow opens on a page of other things
    "[One run a stage](#/experiments/{number}/runs): its description says what it found, *Columns* lists its metrics."
)
SERVER_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}  # else four minutes


def tracking_uri() -> str:
    return os.environ.get("MLFLOW_TRACKING_URI", DEFAULT_STORE)


@contextmanager
def mlflow_run(config: Config, stage: str) -> Iterator[Any]:
    """An MLflow run of experiment `<name>` with the resolved config; yields the `mlflow` module.

    Raises:
        InputError: MLflow's store cannot be used or written; names it. What the stage itself raises comes first.
    """
    import mlflow  # seconds to import: only where it is used
    from sqlalchemy.exc import SQLAlchemyError

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # it prints a traceback of what it raises
    failures = (mlflow.MlflowException, SQLAlchemyError)
    uri = tracking_uri()
    for name, value in SERVER_PATIENCE.items():
        os.environ.setdefault(name, value)
    try:
        try:
            if uri == DEFAULT_STORE:
                _make_store(Path(uri.removeprefix("sqlite:///")))
            mlflow.set_tracking_uri(uri)
            if uri == DEFAULT_STORE:
                _own_experiment(mlflow.MlflowClient(), config.name, Path("mlruns").resolve())
            number = mlflow.set_experiment(config.name).experiment_id
            mlflow.set_experiment_tag(DESCRIPTION, WHERE_TO_LOOK.format(number=number))
            mlflow.start_run(run_name=stage)
        except OSError as error:  # a folder that cannot be made
            raise _failure(uri, error) from error
        try:
            mlflow.set_tag("stage", stage)
            mlflow.log_params(parameters(config, stage))
            mlflow.log_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), "config.yaml")
            mlflow.log_dict(provenance(config), "provenance.json")
            yield mlflow
        except BaseException as error:
            status = "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
            logging.getLogger("mlflow").setLevel(logging.CRITICAL)
            with suppress(*failures):  # a full disk: the first error says more
                mlflow.end_run(status)
            raise
        mlflow.end_run()
    except failures as error:
        raise _failure(uri, error) from error


def _failure(uri: str, error: Exception) -> InputError:
    """One line for whatever MLflow raises; what has been recorded of the run's files stays valid."""
    advice = "mend that, or set MLFLOW_TRACKING_URI to another store; the same command then goes on"
    return InputError(f"{uri}: MLflow's store fails: {str(error).splitlines()[0]}; {advice}")


def parameters(config: Config, stage: str) -> dict[str, Any]:
    """The keys that a stage reads and that are set; the whole config is among the run's artefacts."""
    read = READS.get(stage, ())
    values = config.model_dump(mode="json", exclude_none=True)
    if stage != "pair":
        values["pair"].pop("embedded")  # what the pair was trained with stands in the run of its stage
    if config.data.engine == "local":
        values["data"].pop("ray")
    chosen = {section: values[section] for section in read if section != "sampling"} | {"seed": config.seed}
    if {"sampling", "data"} & set(read):
        chosen["sampling"] = _named(config.sampling)
        chosen["verifiers"] = ", ".join(config.verifiers)
    if stage == "audit":
        chosen["audit"]["sampling"] = _named(config.audit.sampling)
    return flat(chosen)


def describe(mlflow: Any, words: str) -> None:
    """What the current run found, in words, where MLflow shows it."""
    mlflow.set_tag(DESCRIPTION, words)


def _named(settings: Iterable[SamplingSetting]) -> str:
    return "; ".join(str(setting.build()) for setting in settings)


def _own_experiment(client: Any, name: str, folder: Path) -> None:
    """See to an experiment whose artefacts lie in the store's own folder.

    One of a store that was copied here would still write into the folder that it was copied from. It keeps its runs
    under another name, and a new one takes its place.
    """
    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        place = Path(experiment.artifact_location.removeprefix("file://"))
        if place.is_relative_to(folder):
            return
        number = experiment.experiment_id
        client.rename_experiment(number, f"{name}, copied from {place.parent} (experiment {number})")
    client.create_experiment(name, artifact_location=str(folder / name))


def _make_store(path: Path) -> None:
    """A new database under a temporary name: half a schema, left by a crash, would be refused ever after."""
    if path.exists():
        return
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    path.parent.mkdir(exist_ok=True)
    for stale in path.parent.glob(f"{path.name}.*.tmp*"):
        if not psutil.pid_exists(int(stale.name.removeprefix(f"{path.name}.").split(".")[0])):
            stale.unlink(missing_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    SqlAlchemyStore(f"sqlite:///{partial.resolve()}", str(path.parent.resolve())).engine.dispose()
    if path.exists():  # another process was faster
        partial.unlink()
    else:
        partial.replace(path)
