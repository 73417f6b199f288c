"""Exported selectors as versions of a registered MLflow model."""

from __future__ import annotations

from typing import Any

from pipelines.run import Stage
from selector.runtime.selector import Selector

ALREADY = "RESOURCE_ALREADY_EXISTS"


def register(stage: Stage, mlflow: Any, selector: Selector, artifacts: str) -> None:
    """Make the current run's artefact a version of the model `config.mlflow_model`; a line where there is no registry.

    Args:
        mlflow: the module, inside a run.
        artifacts: the artefact's folder among the run's artifacts.
    """
    client, run, name = mlflow.MlflowClient(), mlflow.active_run().info, stage.config.mlflow_model
    try:
        try:
            client.create_registered_model(name)
        except mlflow.MlflowException as error:
            if error.error_code != ALREADY:
                raise
        source = f"{run.artifact_uri}/{artifacts}"
        version = client.create_model_version(name, source, run.run_id, tags=tags(selector)).version
    except mlflow.MlflowException as error:  # the artefact is good without one
        stage.say(f"warning: not registered as {name}: {str(error).splitlines()[0]}")
        return
    stage.say(f"registered as version {version} of {name}")


def tags(selector: Selector) -> dict[str, str]:
    """What a version is found by: pair, verifier, objective, and the summary of the evaluation where there is one."""
    config = selector.config
    summary = config.metrics["evaluation"] or {}
    return {
        "pair": config.pair["fingerprint"],
        "verifier": selector.verifier,
        "objective": config.objective,
        **{figure: f"{value:.4f}" for figure, value in summary.items() if isinstance(value, float)},
    }
