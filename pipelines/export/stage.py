"""Stage `export`: the chosen module as an artefact directory, compared with the trained module."""

from __future__ import annotations

from typing import Any

from pipelines.config import Config
from pipelines.data.recorded import load_traces
from pipelines.export import chains
from pipelines.export.publish import check_token, push, register
from pipelines.export.tiers import limited_modes
from pipelines.latency.profile import load_profile
from pipelines.run import Stage, read_json, require
from pipelines.tracking import describe, mlflow_run
from pipelines.train.packaging import build
from pipelines.train.result import chosen_of, decision_digest, load_module, load_result
from selector.latency import LatencyProfile
from selector.schema import sha256

SECTIONS = ("mlflow_model", "pair", "prompts", "sampling", "verifiers", "data", "train", "export")


def plan(config: Config) -> list[str]:
    engine = [f"write {config.folder / 'engines' / config.export.engine}"] if config.export.engine else []
    return [*engine, f"write {config.folder / 'selector'} and compare it with the trained module on validation texts"]


def run(config: Config) -> None:
    if config.export.engine is not None:
        chains.run(config, config.export.engine)
        if not (config.folder / "training" / "result.json").exists():
            return  # an engine's table needs no training
    folder = config.folder / "selector"
    result = load_result(config)
    decides = decision_digest(config, result)
    path = config.folder / "evaluation.json"
    evaluation = None
    if path.exists():
        require(config, "evaluate", decides)  # the figures must be this selector's
        evaluation = read_json(path, "evaluate")["summary"]
    profile = load_profile(config)
    inputs = {
        **decides,
        "evaluation": None if evaluation is None else sha256(path),
        "latency": profile.to_json(),
        "mlflow_model": config.mlflow_model,
        "tiers": config.export.tiers,
        "compiled": config.export.compiled,
    }
    if config.export.push is not None:
        check_token(config.export.push)
    stage = Stage("export", config, inputs, (folder,))
    if stage.begin():
        _write(stage, result, evaluation, profile)
    if config.export.push is not None:
        stage.say(push(folder, config.export.push))


def _write(stage: Stage, result: dict[str, Any], evaluation: dict[str, Any] | None, profile: LatencyProfile) -> None:
    """The artefact, also in MLflow and its registry."""
    config, (folder,) = stage.config, stage.outputs
    with mlflow_run(config, "export", SECTIONS) as mlflow:
        stage.replace()
        splits, modes = load_traces(config, profile.pair), chosen_of(result)["modes"]
        metrics: dict[str, Any] = {"evaluation": evaluation}
        if config.export.tiers is not None:
            module = load_module(config, result["chosen"], result)
            modes, metrics["tiers"] = limited_modes(config, module, splits["validation"], modes, profile)
        selector = build(config, folder, splits, modes, metrics, config.export.compiled)
        mlflow.log_artifacts(str(folder), "selector")
        register(stage, mlflow, selector, "selector")
        compared = selector.config.metrics["actions_compared"]
        found = f"its actions equal the trained module's at all {compared} roots of the validation texts"
        mlflow.log_metric("roots compared", compared)
        describe(mlflow, found)
    stage.say(f"{folder}: {found}")
    stage.finish()
