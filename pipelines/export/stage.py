"""Stage `export`: the chosen module as an artefact directory, compared with the trained module.

The artefact also becomes a version of a registered MLflow model, which `mlflow.pyfunc.load_model`
and `load_selector` load.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pandas as pd

from pipelines.config import Config
from pipelines.data.recorded import load_traces
from pipelines.evaluate.verdict import Evaluation, losses, metrics, verdicts
from pipelines.export.engines import serve
from pipelines.latency.stage import load_profile
from pipelines.pair.source import source_of
from pipelines.run import Stage, require
from pipelines.tracking import describe, mlflow_run
from pipelines.train.result import build, decision_digest, load_result
from selector.runtime.selector import Selector
from selector.schema import sha256

MODEL = "espalier-selector"  # in the registry of MLflow
CODE = Path(__file__).with_name("registered.py")
ABOUT = f"""Chooses what to draft at every step of speculative decoding. Each export is a version;
the alias, a run's name, is that of its last one. `load_selector("models:/{MODEL}@alias")` and
`mlflow.pyfunc.load_model` load it."""


def plan(config: Config) -> list[str]:
    if source_of(config).why_untrained:
        return []
    lines = []
    if config.export.engine:
        lines.append(f"write {config.folder / 'engines' / config.export.engine}")
    lines.append(
        f"write {config.folder / 'selector'} and compare it with the trained module on "
        "validation texts"
    )
    return lines


def stage_of(config: Config) -> Stage:
    """The stage with what it depends on; InputError before the end of training, or with another's
    evaluation."""
    digest = decision_digest(config, load_result(config))
    evaluation: list[str] = []
    if (config.folder / "evaluation.json").exists():
        require(config, "evaluate", digest)  # the figures must be this selector's
        evaluation = [sha256(path) for path in Evaluation.files(config)]
    inputs = {**digest, "evaluation": evaluation, "latency": load_profile(config).to_json()}
    return Stage("export", config, inputs, (config.folder / "selector",))


def run(config: Config) -> None:
    if config.export.engine is not None:
        serve(config, config.export.engine)
        if not (config.folder / "training" / "result.json").exists():
            return  # an engine's table needs no training
    if source_of(config).why_untrained:
        return
    stage = stage_of(config)
    if not stage.begin():
        return
    evaluation = None
    if (config.folder / "evaluation.json").exists():
        evaluation = Evaluation.read(config)
    (folder,) = stage.outputs
    with mlflow_run(config, "export") as mlflow:
        stage.replace()
        splits = load_traces(config)
        summary = evaluation.contents["summary"] if evaluation else None  # a log's has none
        lost = losses(evaluation) if evaluation else []
        selector = build(config, folder, splits, summary, lost)
        register(stage, mlflow, selector, folder, evaluation)
        compared = selector.config.metrics["actions_compared"]
        comparison = (
            f"its actions equal the trained module's at all {compared} roots of the validation "
            "texts"
        )
        mlflow.log_metric("roots compared", compared)
        describe(mlflow, comparison)
    stage.say(f"{folder}: {comparison}")
    stage.finish()


def register(
    stage: Stage, mlflow: Any, selector: Selector, folder: Path, evaluation: Evaluation | None
) -> None:
    """Log the artefact directory as a model of the current run and make it a version of the
    registered model `MODEL`, whose alias is the run's name and whose tags are what was measured; a
    warning where there is no registry."""
    from mlflow.models import ModelSignature
    from mlflow.types.schema import Array, ColSpec, Schema

    selector_config = selector.config
    names = selector.schema.names
    example = pd.DataFrame(list(zip(*selector_config.ranges, strict=True)), columns=list(names))
    # which are needed says the model itself, in one line
    columns = [ColSpec("double", name, required=False) for name in names]
    for name, width in selector_config.hidden_states.items():
        example[name] = [[0.0] * width] * len(example)
        columns.append(ColSpec(Array("double"), name, required=False))
    chosen = [ColSpec("long", name) for name in ("K", "L1", "L2")]
    chosen.append(ColSpec("string", "style"))
    logged = mlflow.pyfunc.log_model(
        name="selector",
        python_model=str(CODE),
        artifacts={"selector": str(folder)},
        signature=ModelSignature(Schema([*columns]), Schema([*chosen])),
        input_example=example,
        pip_requirements=["torch", "numpy", "pandas"],
    )
    tags = {
        "pair": selector_config.pair["fingerprint"],
        "verifier": selector.verifier,
        "objective": selector_config.objective,
    }
    description = [str(selector)]
    if evaluation is not None:
        tags |= {name: f"{value:.3f}" for name, value in metrics(evaluation).items()}
        description += verdicts(evaluation)
    alias = alias_of(stage.config.name)
    client = mlflow.MlflowClient()
    try:
        version = mlflow.register_model(logged.model_uri, MODEL, tags=tags).version
        client.update_registered_model(MODEL, ABOUT)
        client.update_model_version(MODEL, version, "\n\n".join(description))
        client.set_registered_model_alias(MODEL, alias, version)
    except mlflow.MlflowException as error:  # the artefact is good without a registry
        stage.say(f"warning: not registered as {MODEL}: {str(error).splitlines()[0]}")
        return
    stage.say(f"registered as version {version} of {MODEL}: models:/{MODEL}@{alias}")


def alias_of(name: str) -> str:
    """The alias of a run's last export. MLflow allows no dots, and keeps `latest` and names such as
    `v2` to itself."""
    alias = re.sub(r"\W", "-", name)
    if re.fullmatch(r"latest|v\d+", alias, re.IGNORECASE):
        return f"run-{alias}"
    return alias
