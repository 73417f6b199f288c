"""Stage `train`: the selector under each configured objective, its decisions tried in decoding; the better one on the
validation split is kept.

And the stopping head, a rival that `evaluate` compares it with.
"""

from __future__ import annotations

import shutil
import statistics
from pathlib import Path
from typing import Any

from rich.table import Table

from data_gen.sampling import Sampling
from data_gen.traces import versions
from pipelines.config import Config
from pipelines.confirm import Trial
from pipelines.data import depends
from pipelines.fitting import Fitted, Module, fit, fit_stopping
from pipelines.latency import load_profile
from pipelines.stage import Stage, console, differences, mlflow_run, read_json, require, write_json
from selector.data import Roots, TracesModule, met_in_decoding, of_setting, setting_number
from selector.modes import Judged, finite
from selector.module import NETWORKS, SelectorModule
from selector.oracle import oracles
from selector.runtime import LatencyProfile, Mode
from selector.schema import InputError, read_manifest, sha256
from selector.stopping import StoppingModule

STOPPING = "stopping"
METRICS = ("validation/ratio", "validation/worst_5_percent", "validation/cross_fitted_regret")


def traces_module(config: Config, profile: LatencyProfile, verifier: str | None = None) -> TracesModule:
    """The run's traces, set up; InputError unless they were made with this config and the profile's pair.

    Args:
        verifier: whose labels; None for those of `train.verifier`.
    """
    folder = config.folder / "traces"
    changes = differences(read_manifest(folder)["depends"], {**versions(), **depends(config, profile.pair)})
    if changes:
        raise InputError(f"{folder}: made from other inputs ({'; '.join(changes[:2])}): run the data stage")
    verifiers = config.trained_verifiers if verifier is None else (verifier,)
    traces = TracesModule(folder, verifiers, profile, config.train.batch, config.seed)
    traces.setup()
    return traces


def inputs(config: Config, profile: LatencyProfile) -> dict[str, Any]:
    """Everything the trained selector follows from."""
    return {
        "train": config.train.model_dump(mode="json"),
        "seed": config.seed,
        "networks": NETWORKS,
        "traces": {name: s["sha256"] for name, s in read_manifest(config.folder / "traces")["shards"].items()},
        "latency": profile.to_json(),
    }


def plan(config: Config) -> list[str]:
    verifiers = (config.train.verifier, *config.train.others)
    trained = [f"{objective} for {verifier}" for verifier in verifiers for objective in config.train.objectives]
    lines = [f"{what}: at most {config.train.epochs} epochs" for what in (*trained, "stopping head")]
    if config.train.confirm:
        lines.append(
            f"where traces promise a gain: decode {config.train.confirm} validation prompts with each way to decide "
            f"and with the static tree, {config.data.tokens} tokens each"
        )
    return lines


def run(config: Config) -> None:
    folder = config.folder / "training"
    profile = load_profile(config)
    traces = traces_module(config, profile)
    stage = Stage("train", config, inputs(config, profile), (folder / "result.json",))
    if not stage.begin(lambda: all(path.exists() for path in checkpoints(folder))):
        return
    partial = folder.with_name("training.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with mlflow_run(config, "train") as mlflow:
        mlflow.log_dict(read_manifest(config.folder / "traces"), "manifest.json")
        fingerprint = sha256(config.folder / "traces" / "manifest.json")[:16]
        counts = {"roots.train": len(traces.train), "roots.validation": len(traces.validation)}
        mlflow.log_params({"data.fingerprint": fingerprint, **counts})
        trial = Trial(config)
        found = fit_objectives(config, traces, trial, partial, mlflow)
        found["others"] = {}
        for verifier in config.train.others:
            own = traces_module(config, profile, verifier)
            found["others"][verifier] = fit_objectives(config, own, trial, partial, mlflow, f"{verifier}-")
        with mlflow.start_run(run_name=f"train-{STOPPING}", nested=True) as nested:
            head = fit_stopping(config, traces, partial / STOPPING, nested.info.run_id)
            checkpoint = f"{STOPPING}/{head.checkpoint.name}"
            found["stopping"] = {"metrics": head.metrics, "checkpoint": checkpoint, "run_id": nested.info.run_id}
            mlflow.log_params({"objective": STOPPING, **config.train.model_dump(mode="json")})
            mlflow.log_metrics(head.metrics)
        mlflow.set_tag("chosen", found["chosen"])
        mlflow.log_dict(chosen_modes(found), "modes.json")
        write_json(partial / "result.json", found)
    stage.replace()
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    console.print(summary(found["objectives"], found["chosen"]))
    for verifier, own in {config.train.verifier: found, **found["others"]}.items():
        console.print(modes_table(chosen_modes(own), verifier))
    loss, constant = (head.metrics[f"validation/{name}"] for name in ("loss", "loss_of_a_constant"))
    stage.say(f"stopping head: validation loss {loss:.3f}, that of the best constant {constant:.3f}")
    stage.finish()


def fit_objectives(
    config: Config, traces: TracesModule, trial: Trial, folder: Path, mlflow: Any, prefix: str = ""
) -> dict[str, Any]:
    """Train the selector of some traces under every objective, and choose one by the validation split.

    Args:
        folder: of the training; each objective has a folder there, `prefix` before its name.
    """
    results: dict[str, Any] = {}
    for objective in config.train.objectives:
        name = f"{prefix}{objective}"
        with mlflow.start_run(run_name=f"train-{name}", nested=True) as nested:
            run_id = nested.info.run_id
            fitted = fit(config, objective, traces, folder / name, run_id)
            results[objective] = result_of(fitted, name, traces, trial, run_id)
            params = {**config.train.model_dump(mode="json"), "verifier": " ".join(traces.verifiers)}
            mlflow.log_params({"objective": objective, **params})
            mlflow.log_metrics(results[objective]["metrics"])
    # where neither has anything to decide, the regressor: it can be moved to another machine
    assured = {name: result["metrics"]["validation/assured_ratio"] for name, result in results.items()}
    chosen = max(assured, key=lambda name: (assured[name], name == "regressor"))
    return {"chosen": chosen, "objectives": results, "baselines": baselines(traces)}


def chosen_modes(found: dict[str, Any]) -> list[dict[str, Any]]:
    """Of the objective that was kept, as from `modes_of`."""
    return found["objectives"][found["chosen"]]["modes"]


def result_of(
    fitted: Fitted[SelectorModule], name: str, traces: TracesModule, trial: Trial, run_id: str
) -> dict[str, Any]:
    """What `result.json` holds of an objective: validation metrics, ways to decide, and where the checkpoint is."""
    judged = trial.judged(fitted.module, traces)
    modes = modes_of(traces, judged)
    return {
        "metrics": {
            **fitted.metrics,
            "validation/chosen_ratio": statistics.mean(ways[0].worth for ways in judged),
            "validation/assured_ratio": statistics.mean(ways[0].assured for ways in judged),
        },
        "modes": modes,
        "checkpoint": f"{name}/{fitted.checkpoint.name}",
        "run_id": run_id,
    }


def modes_of(traces: TracesModule, judged: list[list[Judged]]) -> list[dict[str, Any]]:
    """The modes of an artefact, with every way to decide that was compared, and the ceiling of all of them."""
    return [
        {
            **ways[0].row(),
            "mean_efficiency": mean_efficiency(traces.train, ways[0].mode),
            "ways": [way.row() for way in ways],
            "oracle": {
                "ratio": oracle.ratio,
                "error": finite(oracle.error),
                "gap_closed": oracle.gap_closed(ways[0].ratio),
            },
        }
        for ways, oracle in zip(judged, oracles(traces), strict=True)
    ]


def mean_efficiency(roots: Roots, mode: Mode) -> list[list[float]]:
    """With each verifier, of every action under the mode's sampling setting, in tokens per step over whole texts: what
    trees and their verifiers are chosen by on any machine."""
    mine = met_in_decoding(of_setting(roots, setting_number(mode.temperature, mode.top_p)))
    mean_O = mine.efficiencies(mine.every_mean_BO)
    return [[round(value, 4) for value in mean_A] for mean_A in mean_O.view(-1, mine.mean_BA.shape[-1]).tolist()]


def baselines(traces: TracesModule) -> list[dict[str, Any]]:
    """The tuned static action of every sampling setting, from the training split."""
    rows = []
    for temperature, top_p, roots in by_setting(traces.train):
        action = traces.space.actions[roots.best_static()[0]]
        rows.append({"temperature": temperature, "top_p": top_p, "action": list(action)})
    return rows


def by_setting(roots: Roots) -> list[tuple[float, float, Roots]]:
    """(temperature, top_p, the decoder's own steps of that setting), one per setting."""
    parts = [met_in_decoding(of_setting(roots, setting)) for setting in roots.setting_B.unique().tolist()]
    return [(*part.sampling(), part) for part in parts]


def chosen_checkpoint(config: Config, result: dict[str, Any], verifier: str | None = None) -> Path:
    """The checkpoint of the objective that was kept; InputError where it is missing or was trained otherwise.

    Args:
        verifier: one of `train.others`, whose own selector is meant.
    """
    result = result if verifier is None else result["others"][verifier]
    require(config, "train", inputs(config, load_profile(config)))
    return _checkpoint(config, result["objectives"][result["chosen"]])


def stopping_checkpoint(config: Config, result: dict[str, Any]) -> Path:
    """That of the stopping head; InputError as in `chosen_checkpoint`."""
    require(config, "train", inputs(config, load_profile(config)))
    return _checkpoint(config, result["stopping"])


def checkpoints(folder: Path) -> list[Path]:
    """All that the stage's `result.json` names."""
    found = read_json(folder / "result.json", "train")
    objectives = [trained for each in (found, *found["others"].values()) for trained in each["objectives"].values()]
    return [folder / trained["checkpoint"] for trained in (*objectives, found["stopping"])]


def _checkpoint(config: Config, trained: dict[str, Any]) -> Path:
    checkpoint = config.folder / "training" / trained["checkpoint"]
    if not checkpoint.exists():
        raise InputError(f"{checkpoint} does not exist: run the train stage again")
    return checkpoint


def load_trained(config: Config, verifier: str | None = None) -> tuple[SelectorModule, dict[str, Any]]:
    """The chosen module and its part of the stage's `result.json`; `verifier` as in `chosen_checkpoint`."""
    result = read_json(config.folder / "training" / "result.json", "train")
    module = _loaded(SelectorModule, chosen_checkpoint(config, result, verifier))
    return module, result if verifier is None else result["others"][verifier]


def load_stopping(config: Config) -> StoppingModule:
    """The stopping head."""
    result = read_json(config.folder / "training" / "result.json", "train")
    return _loaded(StoppingModule, stopping_checkpoint(config, result))


def _loaded(kind: type[Module], checkpoint: Path) -> Module:
    try:
        module = kind.load_from_checkpoint(checkpoint, map_location="cpu")
    except Exception as error:  # whatever a damaged file makes torch raise
        raise InputError(f"{checkpoint} is damaged: remove it and run the train stage again") from error
    return module.eval()


def summary(results: dict[str, Any], chosen: str) -> Table:
    """Validation metrics by objective."""
    table = Table(title=f"Validation split, decisions at recorded roots (kept: {chosen})", title_justify="left")
    for column in ("objective", "speed over static", "worst 5%", "regret to the best"):
        table.add_column(column, justify="right")
    for objective, result in results.items():
        table.add_row(objective, *(f"{result['metrics'][name]:.3f}" for name in METRICS))
    return table


def modes_table(modes: list[dict[str, Any]], verifier: str) -> Table:
    """What each way to decide gains over the best static tree, and what an oracle does, by sampling setting."""
    title = f"Validation split, {verifier}: speed over the best static tree (* kept)"
    table = Table(title=title, title_justify="left")
    for column in ("setting", "static tree", *WAYS.values(), "oracle", "gap closed"):
        table.add_column(column, justify="left" if column == "setting" else "right")
    for mode in modes:
        cells = {}
        for way in mode["ways"]:
            kept = " *" if way == mode["ways"][0] else ""
            decoded = f" ({_with_error(way['decoded'])})" if way["decoded"] else ""
            cells[way["at_root"], way["on_trunk"]] = f"{_with_error(way)}{decoded}{kept}"
        setting = str(Sampling(mode["temperature"], mode["top_p"]))
        static = str(tuple(mode["action"])) + (" *" if not (mode["at_root"] or mode["on_trunk"]) else "")
        oracle, closed = mode["oracle"], mode["oracle"]["gap_closed"]
        ceiling = _with_error(oracle), "undefined" if closed is None else f"{closed:.0%}"
        table.add_row(setting, static, *(cells.get(way, "") for way in WAYS), *ceiling)
    table.caption = (
        "in brackets: in decoding validation prompts, tried where the traces promise a gain; "
        "oracle: every root's tree by one half of its labels, scored by the other; "
        "gap closed: undefined where label noise leaves no ceiling above the static tree"
    )
    return table


def _with_error(figures: dict[str, Any]) -> str:
    error = "unknown" if figures["error"] is None else f"{figures['error']:.3f}"
    return f"{figures['ratio']:.3f} ±{error}"


def ceiling(modes: list[dict[str, Any]]) -> dict[str, float | None]:
    """The oracle's speed and the share of its gain that decisions reach, on the validation split.

    Means over sampling settings; of the share, over those where it is defined, None where it is nowhere.
    """
    closed = [share for mode in modes if (share := mode["oracle"]["gap_closed"]) is not None]
    return {
        "oracle_ratio": statistics.mean(mode["oracle"]["ratio"] for mode in modes),
        "gap_closed": statistics.mean(closed) if closed else None,
    }


WAYS = {(True, False): "at the root", (False, True): "along the trunk"}


def fallback_action(traces: TracesModule) -> Any:
    """The best static action over all training roots: what a selector answers without features."""
    return traces.space.actions[met_in_decoding(traces.train).best_static()[0]]
