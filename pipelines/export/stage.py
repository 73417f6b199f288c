"""Stage `export`: the chosen module as an artefact directory, compared with the trained module.

The artefact also becomes a version of a registered MLflow model.
"""

from __future__ import annotations

from pipelines.config import Config
from pipelines.data.recorded import load_traces
from pipelines.export import serving
from pipelines.export.registry import register
from pipelines.latency.profile import load_profile
from pipelines.run import Stage, read_json, require
from pipelines.tracking import describe, mlflow_run
from pipelines.train.packaging import build
from pipelines.train.result import decision_digest, load_result
from selector.schema import sha256

SECTIONS = ("pair", "prompts", "sampling", "verifiers", "data", "train", "export")


def plan(config: Config) -> list[str]:
    engine = [f"write {config.folder / 'engines' / config.export.engine}"] if config.export.engine else []
    return [*engine, f"write {config.folder / 'selector'} and compare it with the trained module on validation texts"]


def stage_of(config: Config) -> Stage:
    """The stage with what it depends on; InputError unless training is finished, and where the evaluation is that of
    another selector."""
    decides = decision_digest(config, load_result(config))
    path = config.folder / "evaluation.json"
    if path.exists():
        require(config, "evaluate", decides)  # the figures must be this selector's
    inputs = {
        **decides,
        "evaluation": sha256(path) if path.exists() else None,
        "latency": load_profile(config).to_json(),
    }
    return Stage("export", config, inputs, (config.folder / "selector",))


def run(config: Config) -> None:
    if config.export.engine is not None:
        serving.run(config, config.export.engine)
        if not (config.folder / "training" / "result.json").exists():
            return  # an engine's table needs no training
    stage, path = stage_of(config), config.folder / "evaluation.json"
    if not stage.begin():
        return
    evaluation, (folder,) = read_json(path, "evaluate")["summary"] if path.exists() else None, stage.outputs
    with mlflow_run(config, "export", SECTIONS) as mlflow:
        stage.replace()
        splits = load_traces(config, load_profile(config).pair)
        selector = build(config, folder, splits, metrics={"evaluation": evaluation})
        register(stage, mlflow, selector, folder)
        compared = selector.config.metrics["actions_compared"]
        found = f"its actions equal the trained module's at all {compared} roots of the validation texts"
        mlflow.log_metric("roots compared", compared)
        describe(mlflow, found)
    stage.say(f"{folder}: {found}")
    stage.finish()
