"""Stage `export`: the chosen module as an artefact directory, compared with the trained module on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from pipelines.config import Config
from pipelines.confirm import Trial
from pipelines.latency import load_profile
from pipelines.pair import pair_names
from pipelines.registry import register
from pipelines.stage import Stage, mlflow_run, provenance, read_json
from pipelines.train import (
    chosen_checkpoint,
    fallback_action,
    load_trained,
    modes_of,
    traces_module,
)
from selector.actions import ActionSpace
from selector.data import Roots, of_setting, setting_number
from selector.export import write_artefact
from selector.module import SelectorModule
from selector.runtime import LatencyProfile, Selector, load_selector
from selector.schema import InputError, sha256
from selector.tuned import LENGTH_AT

TIE = 1e-4  # tokens: both sum in another order


def plan(config: Config) -> list[str]:
    return [f"write {config.folder / 'selector'} and compare it with the trained module on the validation split"]


def run(config: Config) -> None:
    folder = config.folder / "selector"
    _, result = load_trained(config)
    evaluation = config.folder / "evaluation.json"
    inputs = {
        "training": sha256(chosen_checkpoint(config, result)),
        "decisions": sha256(config.folder / "training" / "result.json"),
        "evaluation": sha256(evaluation) if evaluation.exists() else None,
        "latency": load_profile(config).to_json(),
        "mlflow_model": config.mlflow_model,
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
        register(stage, mlflow, selector, "selector")
        mlflow.log_metric("export/actions_compared", selector.config["metrics"]["actions_compared"])
    compared = selector.config["metrics"]["actions_compared"]
    stage.say(f"{folder}: its actions equal the trained module's on all {compared} validation roots")
    stage.finish()


def build(
    config: Config,
    folder: Path,
    profile: LatencyProfile | None = None,
    verifier: str | None = None,
    trial: Trial | None = None,
) -> Selector:
    """Write the artefact of the chosen module; InputError if it does not choose as the trained module does.

    Args:
        profile: of another machine, for which the same network is then tuned on the traces; the run's own if None.
        verifier: one of `train.others`, whose own selector is meant.
        trial: of decisions for another machine; one of its own, with the pair loaded, if None.
    """
    module, result = load_trained(config, verifier)
    own = load_profile(config)
    profile = profile or own
    other = profile != own
    traces = traces_module(config, profile, verifier)
    if other:
        module.fit_gain(traces.train)
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
        differing = count_differing_on_trunks(module, selector, traces.validation)
        if differing:
            raise InputError(f"{folder}: {differing} decisions along trunks are not the trained module's")

    fallback = fallback_action(traces)
    modes = modes_of(traces, (trial or Trial(config)).judged(module, traces)) if other else chosen["modes"]
    modes = [as_exported(mode) for mode in modes]
    return write_artefact(folder, module, traces.train, profile, traces.verifiers, fallback, modes, facts, check)


def as_exported(mode: dict[str, Any]) -> dict[str, Any]:
    """A mode of `modes_of` without the oracle; of every way to decide that was weighed, what it is worth."""
    ways = [{key: way[key] for key in ("at_root", "on_trunk", "ratio", "error", "decoded")} for way in mode["ways"]]
    return {**{key: value for key, value in mode.items() if key != "oracle"}, "ways": ways}


@torch.no_grad()
def count_differing(module: SelectorModule, selector: Selector, roots: Roots) -> int:
    """Roots at which the exported selector and the trained module choose differently, asked one by one."""
    differing = 0
    for row in range(len(roots)):
        features = {name: value[row] for name, value in roots.features().items()}
        trained = int(module.choices(roots.rows(slice(row, row + 1))))
        differing += selector.select(features) != selector.actions[trained]
    return differing


@torch.no_grad()
def count_differing_on_trunks(module: SelectorModule, selector: Selector, roots: Roots) -> int:
    """Trunk tokens at which both decide differently, over all roots of the settings where trunks are decided."""
    differing = 0
    for mode in selector.modes:
        if not mode.on_trunk:
            continue
        tuned, further = selector.at(mode.temperature, mode.top_p), list(mode.further)
        mine = of_setting(roots, setting_number(mode.temperature, mode.top_p))
        for t in range(mode.first, ActionSpace.default().decisions + 1):
            gains_BSA, (hidden_BSTD, scalars_BSTF) = module.gains(mine, t), mine.along_trunks(slice(t, t + 1))
            for row in range(len(mine)):
                length = float(mine.scalars[row, LENGTH_AT])
                scores_A = gains_BSA[row, 0, further] - tuned.costs_at(length)[t]
                chosen = tuned.decide(hidden_BSTD[row, 0, 0], scalars_BSTF[row, 0, 0], t, length)
                best = [a for a in range(len(further)) if float(scores_A.max() - scores_A[a]) < TIE]
                differing += chosen not in {tuned.whole(t, a) for a in best}
    return differing
