"""The artefact as a version of a registered MLflow model, which `mlflow.pyfunc.load_model` and `load_selector` load."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pandas as pd

from pipelines.run import Stage
from pipelines.tracking import EXPORTED, named
from selector.runtime.selector import Selector
from selector.schema import SCALARS_KEY
from selector.train.replay import Ratio

MODEL = "espalier-selector"  # in the registry of MLflow
CODE = Path(__file__).with_name("registered.py")
EXAMPLES = 2  # roots of the input example
ABOUT = f"""Chooses what to draft at every step of speculative decoding. Each export is a version; the alias, a run's
name, is that of its last one. `load_selector("models:/{MODEL}@alias")` and `mlflow.pyfunc.load_model` load it."""


def register(stage: Stage, mlflow: Any, selector: Selector, folder: Path) -> None:
    """Log the artefact directory as a model of the current run and make it a version of the registered model `MODEL`,
    whose alias is the run's name; a warning where there is no registry."""
    logged = mlflow.pyfunc.log_model(
        name="selector",
        loader_module=CODE.stem,
        data_path=str(folder),
        code_paths=[str(CODE)],
        signature=_signature(selector),
        input_example=_example(selector, folder),
        pip_requirements=["torch", "numpy", "pandas"],
    )
    client, alias, figures = mlflow.MlflowClient(), alias_of(stage.config.name), _figures(selector)
    tags = {
        "pair": selector.config.pair["fingerprint"],
        "verifier": selector.verifier,
        "objective": selector.config.objective,
    }
    try:
        try:
            client.create_registered_model(MODEL, description=ABOUT)
        except mlflow.MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        found = "\n".join(f"- {name}: {value}" for name, value in figures.items())
        about, run = f"{selector}\n\n{found}", mlflow.active_run().info.run_id
        own = {"description": about, "tags": tags | figures, "model_id": logged.model_id}
        version = client.create_model_version(MODEL, logged.model_uri, run, **own).version
        client.set_registered_model_alias(MODEL, alias, version)
    except mlflow.MlflowException as error:  # the artefact is good without a registry
        stage.say(f"warning: not registered as {MODEL}: {str(error).splitlines()[0]}")
        return
    stage.say(f"registered as version {version} of {MODEL}: models:/{MODEL}@{alias}")


def alias_of(name: str) -> str:
    """The alias of a run's last export. MLflow allows no dots, and keeps `latest` and names such as `v2` to itself."""
    alias = re.sub(r"\W", "-", name)
    return f"run-{alias}" if re.fullmatch(r"latest|v\d+", alias, re.IGNORECASE) else alias


def _figures(selector: Selector) -> dict[str, str]:
    """The exported selector's speed over the best static tree and over plain decoding, by sampling setting."""
    found: dict[str, str] = {}
    for row in (selector.config.metrics["evaluation"] or {}).get("by_setting", []):
        replayed = Ratio(row["replay_ratio"], row["replay_error"])
        found |= named({EXPORTED: str(replayed), "ratio_vs_autoregressive": f"{row['over_plain']:.3f}"}, row)
    return found


def _signature(selector: Selector) -> Any:
    """A column for each scalar and each hidden state; those that the draft's pass gives may be left out."""
    from mlflow.models import ModelSignature
    from mlflow.types.schema import Array, ColSpec, Schema

    first = selector.schema.first
    scalars = [ColSpec("double", name, required=at < first) for at, name in enumerate(selector.schema.names)]
    states = [ColSpec(Array("double"), name, required=False) for name in selector.config.hidden_states]
    shape = [ColSpec("long", name) for name in ("K", "L1", "L2")]
    return ModelSignature(Schema([*scalars, *states]), Schema([*shape, ColSpec("string", "style")]))


def _example(selector: Selector, folder: Path) -> pd.DataFrame:
    """Roots of the golden vectors; their hidden states are zeros."""
    roots = json.loads((folder / "golden.json").read_text())["settings"][0]["roots"][:EXAMPLES]
    frame = pd.DataFrame([root[SCALARS_KEY] for root in roots], columns=list(selector.schema.names))
    for name, width in selector.config.hidden_states.items():
        frame[name] = [[0.0] * width] * len(frame)
    return frame
