"""MLflow: a run for each folder of `runs/`, and its stages as children, in a store that is created
when needed."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import re
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote

import yaml

from data_gen.timing import device_name
from data_gen.traces import flat, read_manifest
from pipelines.config import Config
from pipelines.run import provenance
from selector.schema import InputError

T = TypeVar("T")
DEFAULT_STORE = "sqlite:///mlruns/mlflow.db"
# the tag that MLflow shows as the description of an experiment or a run
DESCRIPTION = "mlflow.note.content"
ABOUT = """The run that is named after the experiment says what was found. Stages are below it,
networks below `train`. The ratios are speeds over the best static tree: means over sampling
settings and, as `.../T ...`, for each.

- `replayed_ratio`: a network alone, on validation texts; networks are compared by it
- `kept_ratio`: with the lookup rule or the static tree where these are kept
- `exported_ratio`: what is exported, on held-out texts

The selector is a version of the registered model `espalier-selector`."""
EXPORTED = "exported_ratio"
OF_STAGE = ("stage", "pair", "commit", "machine")  # tags that nested runs inherit
# default: 4 minutes
SERVER_PATIENCE = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}


def tracking_uri() -> str:
    return os.environ.get("MLFLOW_TRACKING_URI", DEFAULT_STORE)


@contextmanager
def mlflow_run(config: Config, stage: str, sections: Sequence[str]) -> Iterator[Any]:
    """An MLflow run of a stage, with the resolved config, in the experiment `<name>` below the
    folder's run; yields the `mlflow` module. The `sections` of the config become the run's
    parameters. InputError where MLflow's store cannot be read or written; a stage's own error takes
    precedence."""
    import mlflow  # takes seconds
    from sqlalchemy.exc import SQLAlchemyError

    logging.getLogger("mlflow").setLevel(logging.WARNING)
    # it prints a traceback of what it raises
    logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)
    failures = (mlflow.MlflowException, SQLAlchemyError, sqlite3.DatabaseError)
    uri = tracking_uri()
    for name, value in SERVER_PATIENCE.items():
        os.environ.setdefault(name, value)
    if config.logs.files:
        sections = ["logs", *(name for name in sections if name != "pair")]
    made_with = provenance(config)
    parameters = _parameters(config, sections)
    tags = {
        "commit": str(made_with["commit"]),
        "machine": f"{platform.node()}, {device_name('auto', 'float32')}",
    }
    if "pair" in sections:
        tags["pair"] = f"{config.pair.target} / {config.pair.draft}"
    try:
        pipeline = _start(mlflow, uri, config, stage, tags)
    except (OSError, *failures) as error:  # OSError: a folder cannot be created
        raise _failure(uri, error) from error
    try:
        mlflow.log_params(parameters)
        resolved = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
        mlflow.log_text(resolved, "config.yaml")
        mlflow.log_dict(made_with, "provenance.json")
        yield mlflow
        mlflow.end_run()
        mlflow.MlflowClient().set_terminated(pipeline)
    except BaseException as error:
        status = "KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED"
        logging.getLogger("mlflow").setLevel(logging.CRITICAL)
        with suppress(*failures):  # where the disk is full, the first error says more
            mlflow.end_run(status)
            mlflow.MlflowClient().set_terminated(pipeline, status)
        if isinstance(error, failures):
            raise _failure(uri, error) from error
        raise


def _parameters(config: Config, sections: Sequence[str]) -> dict[str, Any]:
    values = config.model_dump(mode="json", exclude_none=True)
    values["sampling"] = "; ".join(str(setting.build()) for setting in config.sampling)
    values["verifiers"] = ", ".join(config.verifiers)
    return flat({name: values[name] for name in ("seed", *sections)})


def _start(mlflow: Any, uri: str, config: Config, stage: str, tags: dict[str, str]) -> str:
    experiment = config.name
    if uri == DEFAULT_STORE:
        _create_store(Path(uri.removeprefix("sqlite:///")))
    mlflow.set_tracking_uri(uri)
    client = mlflow.MlflowClient()
    if uri == DEFAULT_STORE:
        _keep_artefacts_in(Path("mlruns").resolve(), client, experiment)
    experiment_id = mlflow.set_experiment(experiment).experiment_id
    mlflow.set_experiment_tags({DESCRIPTION: ABOUT})
    pipeline = _pipeline_run(client, config, experiment_id)
    client.update_run(pipeline, "RUNNING")
    for name, value in tags.items():
        client.set_tag(pipeline, name, value)
    mlflow.start_run(run_name=stage, parent_run_id=pipeline, tags={"stage": stage, **tags})
    return str(pipeline)


def _pipeline_run(client: Any, config: Config, experiment_id: str) -> Any:
    """The id of the run that stands for the folder, which is created if there is none."""
    folder = str(config.folder.resolve())
    for run in client.search_runs([experiment_id], "tags.stage = 'pipeline'"):
        if run.data.tags["folder"] == folder:
            return run.info.run_id
    tags = {"stage": "pipeline", "folder": folder}
    return client.create_run(experiment_id, tags=tags, run_name=config.name).info.run_id


def _failure(uri: str, error: Exception) -> InputError:
    advice = "fix that, or set MLFLOW_TRACKING_URI to another store; the same command then goes on"
    reason = str(error).splitlines()[0]
    return InputError(f"{uri}: MLflow's store fails: {reason}; {advice}")


def describe(mlflow: Any, words: str, metrics: Mapping[str, float] | None = None) -> None:
    """Describe what the current run found, in MLflow. With metrics, both are also shown by the
    folder's run."""
    mlflow.set_tag(DESCRIPTION, words)
    if metrics is not None:
        parent = pipeline_of(mlflow)
        mlflow.log_metrics(metrics)
        mlflow.log_metrics(metrics, run_id=parent)
        mlflow.MlflowClient().set_tag(parent, DESCRIPTION, words)


def named(figures: Mapping[str, T], row: Mapping[str, Any]) -> dict[str, T]:
    """Metrics or tags with their case in their names: that of a row as `Mode.row`."""
    case = f"T {row['temperature']:g} top-p {row['top_p']:g}"
    if row.get("level"):
        case += f" batch {row['batch']} {row['level']}"
    return {f"{name}/{case}": value for name, value in figures.items()}


def metric_name(words: str) -> str:
    """Words without what MLflow refuses in a metric's name."""
    return re.sub(r"[^\w./ -]", "", words).replace(" ", "_")


def nested_run(mlflow: Any, name: str) -> Any:
    stage_tags = mlflow.active_run().data.tags
    inherited = {tag: stage_tags[tag] for tag in OF_STAGE if tag in stage_tags}
    return mlflow.start_run(run_name=name, nested=True, tags=inherited)


def pipeline_of(mlflow: Any) -> str:
    return str(mlflow.active_run().data.tags["mlflow.parentRunId"])


def log_traces(mlflow: Any, folder: Path, splits: Sequence[str]) -> None:
    """Log splits of a trace store as data sets of the current run: name, digest, path and sizes."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    shards = read_manifest(folder)["shards"]
    for split in splits:
        checksums = ""
        rows = 0
        size = 0
        for name, shard in sorted(shards.items()):
            if name.startswith(f"{split}/"):
                checksums += shard["sha256"]
                rows += shard["rows"]
                size += shard["bytes"]
        digest = hashlib.sha256(checksums.encode()).hexdigest()
        sizes = {"num_rows": rows, "bytes": size}
        source = json.dumps({"uri": str((folder / split).resolve())})
        data = Dataset(f"traces {split}", digest[:16], "local", source, profile=json.dumps(sizes))
        dataset_input = DatasetInput(data, [InputTag("mlflow.data.context", split)])
        mlflow.MlflowClient().log_inputs(mlflow.active_run().info.run_id, [dataset_input])


def _keep_artefacts_in(folder: Path, client: Any, name: str) -> None:
    # an experiment in a copied store still names the original folder: it is renamed, and a new one
    # takes its name
    experiment = client.get_experiment_by_name(name)
    if experiment:
        location = Path(unquote(experiment.artifact_location.removeprefix("file://")))
        experiment_id = experiment.experiment_id
        if location.is_relative_to(folder):
            return
        client.rename_experiment(
            experiment_id, f"{name}, copied from {location.parent} (experiment {experiment_id})"
        )
    client.create_experiment(name, artifact_location=(folder / name).as_uri())


def _create_store(path: Path) -> None:
    # under a temporary name, because MLflow refuses a database whose schema a crash left unfinished
    if path.exists():
        with closing(sqlite3.connect(path)) as store:
            # of a damaged file: MLflow would take minutes to refuse it
            store.execute("PRAGMA schema_version")
        return
    from mlflow.store.tracking.sqlalchemy_store import SqlAlchemyStore

    path.parent.mkdir(exist_ok=True)
    # a new name each time: MLflow keeps an engine for each URL, which may belong to another
    # folder's file
    partial = path.with_name(f"{path.name}.{os.getpid()}.{time.time_ns()}.tmp")
    SqlAlchemyStore(f"sqlite:///{partial}", path.parent.resolve().as_uri()).engine.dispose()
    if not path.exists():  # no other process was faster
        partial.replace(path)
    partial.unlink(missing_ok=True)
