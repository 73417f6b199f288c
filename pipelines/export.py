"""Stage `export`: the chosen module as an artefact directory, compared with the trained module on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pipelines.config import Config
from pipelines.latency import load_profile
from pipelines.pair import pair_names
from pipelines.stage import Stage, mlflow_run, provenance
from pipelines.train import chosen_checkpoint, fallback_action, load_trained, traces_module
from selector.export import write_artefact
from selector.module import SelectorModule
from selector.runtime import Selector
from selector.schema import InputError, sha256


def plan(config: Config) -> list[str]:
    return [f"write {config.folder / 'selector'} and compare it with the trained module on the validation split"]


def run(config: Config) -> None:
    folder = config.folder / "selector"
    _, result = load_trained(config)
    evaluation = config.folder / "evaluation.json"
    depends = {
        "training": sha256(chosen_checkpoint(config, result)),
        "evaluation": sha256(evaluation) if evaluation.exists() else None,
        "latency": load_profile(config).to_json(),
    }
    stage = Stage("export", config, depends, (folder / "selector.pt",))
    if not stage.begin():
        return
    with mlflow_run(config, "export") as mlflow:
        selector = build(config, folder)
        mlflow.log_artifacts(str(folder), "selector")
        mlflow.log_metric("export/actions_compared", selector.config["metrics"]["actions_compared"])
    compared = selector.config["metrics"]["actions_compared"]
    stage.say(f"{folder}: its actions equal the trained module's on all {compared} validation roots")
    stage.finish()


def build(config: Config, folder: Path) -> Selector:
    """Write the artefact of the chosen module; InputError if it does not choose as the trained module does."""
    import json

    module, result = load_trained(config)
    profile = load_profile(config)
    traces = traces_module(config, profile)
    evaluation = config.folder / "evaluation.json"
    target, draft = pair_names(config)
    facts: dict[str, Any] = {
        "pair": {"target": target, "draft": draft, "fingerprint": profile.pair},
        "run_id": result["objectives"][result["chosen"]]["run_id"],
        "baselines": result["baselines"],
        "metrics": {
            **result["objectives"][result["chosen"]]["metrics"],
            "actions_compared": len(traces.validation),
            "evaluation": json.loads(evaluation.read_text())["summary"] if evaluation.exists() else None,
        },
        "provenance": provenance(config),
    }
    selector = write_artefact(
        folder, module, traces.train, profile, config.train.verifier, fallback_action(traces), facts
    )
    differing = compare(module, selector, traces.validation)
    if differing:
        raise InputError(f"{folder}: {differing} of {len(traces.validation)} actions differ from the trained module's")
    return selector


@torch.no_grad()
def compare(module: SelectorModule, selector: Selector, roots: Any) -> int:
    """Validation roots at which the exported selector and the trained module choose differently."""
    differing = 0
    for row in range(len(roots)):
        features = {name: value[row] for name, value in roots.features().items()}
        trained = int(module.choices(roots.rows(slice(row, row + 1))))
        differing += selector.select(features) != selector.actions[trained]
    return differing
