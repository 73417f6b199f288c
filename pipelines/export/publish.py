"""The artefact as a version of a registered MLflow model, and as a copy on the Hugging Face hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError

from pipelines.run import Stage
from selector.runtime.selector import Selector
from selector.schema import InputError


def register(stage: Stage, mlflow: Any, selector: Selector, artifacts: str) -> None:
    """Make the artefact a version of the model `config.mlflow_model`; a warning where there is no registry.

    Args:
        mlflow: the module, inside a run.
        artifacts: the artefact's folder among the run's artifacts.
    """
    client, run, name = mlflow.MlflowClient(), mlflow.active_run().info, stage.config.mlflow_model
    summary = selector.config.metrics["evaluation"] or {}
    tags = {
        "pair": selector.config.pair["fingerprint"],
        "verifier": selector.verifier,
        "objective": selector.config.objective,
        **{figure: f"{value:.4f}" for figure, value in summary.items() if isinstance(value, float)},
    }
    try:
        try:
            client.create_registered_model(name)
        except mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        source = f"{run.artifact_uri}/{artifacts}"
        version = client.create_model_version(name, source, run.run_id, tags=tags).version
    except mlflow.MlflowException as error:  # the artefact is good without a registry
        stage.say(f"warning: not registered as {name}: {str(error).splitlines()[0]}")
        return
    stage.say(f"registered as version {version} of {name}")


def check_token(repository: str) -> None:
    """InputError where there is no token of the hub."""
    if get_token() is None:
        raise InputError(f"export.push={repository}: no hub token here: run `hf auth login`, or set HF_TOKEN")


def push(folder: Path, repository: str) -> str:
    """Upload the directory; returns what was done, in words.

    Raises:
        InputError: the hub cannot be reached, or refuses.
    """
    api = HfApi()
    try:
        api.create_repo(repository, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Selector", delete_patterns="*"
        )
    except (HfHubHTTPError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(f"{folder} is complete, but {repository} did not get its copy: {reason}") from error
    return f"{repository} on the hub holds a copy, commit {commit.oid[:12]}"
