"""Stage `export`: the chosen module as an artefact directory, compared with the trained module on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pipelines.config import Config
from pipelines.latency import load_profile
from pipelines.pair import pair_names
from pipelines.stage import Stage, mlflow_run, provenance, read_json
from pipelines.train import chosen_checkpoint, fallback_action, load_trained, traces_module
from selector.data import Roots
from selector.export import write_artefact
from selector.module import SelectorModule
from selector.runtime import Selector, load_selector
from selector.schema import InputError, sha256


def plan(config: Config) -> list[str]:
    return [f"write {config.folder / 'selector'} and compare it with the trained module on the validation split"]


def run(config: Config) -> None:
    folder = config.folder / "selector"
    _, result = load_trained(config)
    evaluation = config.folder / "evaluation.json"
    inputs = {
        "training": sha256(chosen_checkpoint(config, result)),
        "evaluation": sha256(evaluation) if evaluation.exists() else None,
        "latency": load_profile(config).to_json(),
    }

    def intact() -> bool:
        load_selector(folder)  # raises where a file has changed
        return True

    stage = Stage("export", config, inputs, (folder,))
    if not stage.begin(intact):
        return
    with mlflow_run(config, "export") as mlflow:
        stage.replace()
        selector = build(config, folder)
        mlflow.log_artifacts(str(folder), "selector")
        mlflow.log_metric("export/actions_compared", selector.config["metrics"]["actions_compared"])
    compared = selector.config["metrics"]["actions_compared"]
    stage.say(f"{folder}: its actions equal the trained module's on all {compared} validation roots")
    stage.finish()


def build(config: Config, folder: Path) -> Selector:
    """Write the artefact of the chosen module; InputError if it does not choose as the trained module does."""
    module, result = load_trained(config)
    profile = load_profile(config)
    traces = traces_module(config, profile)
    chosen = result["objectives"][result["chosen"]]
    evaluation = config.folder / "evaluation.json"
    target, draft = pair_names(config)
    facts: dict[str, Any] = {
        "pair": {"target": target, "draft": draft, "fingerprint": profile.pair},
        "run_id": chosen["run_id"],
        "baselines": result["baselines"],
        "metrics": {
            **chosen["metrics"],
            "actions_compared": len(traces.validation),
            "evaluation": read_json(evaluation, "evaluate")["summary"] if evaluation.exists() else None,
        },
        "provenance": provenance(config),
    }

    def check(selector: Selector) -> None:
        differing = count_differing(module, selector, traces.validation)
        if differing:
            raise InputError(f"{folder}: {differing} of {len(traces.validation)} actions are not the trained module's")

    fallback = fallback_action(traces)
    return write_artefact(folder, module, traces.train, profile, config.train.verifier, fallback, facts, check)


@torch.no_grad()
def count_differing(module: SelectorModule, selector: Selector, roots: Roots) -> int:
    """Roots at which the exported selector and the trained module choose differently, asked one by one."""
    differing = 0
    for row in range(len(roots)):
        features = {name: value[row] for name, value in roots.features().items()}
        trained = int(module.choices(roots.rows(slice(row, row + 1))))
        differing += selector.select(features) != selector.actions[trained]
    return differing
