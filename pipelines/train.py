"""Stage `train`: selectors of every kind on all positions of the training texts, judged by replay of whole validation
texts; the best one is kept, and decides only where that pays by two standard errors.
"""

from __future__ import annotations

import shutil
import statistics
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

from data_gen.sampling import Sampling
from pipelines.config import Config
from pipelines.fitting import fit, module_of
from pipelines.latency import load_profile
from pipelines.potential import potentials
from pipelines.potential import rows_of as potential_rows
from pipelines.potential import table_of as potential_table
from pipelines.stage import Stage, console, mlflow_run, read_json, require, write_json
from pipelines.traces import load_traces, settings_of, timed, traces_folder
from selector.actions import ActionSpace
from selector.data import Setting, Texts
from selector.decision import Mode
from selector.module import RootsModule, SelectorModule
from selector.runtime import LatencyProfile
from selector.schema import FEATURES, FULL, HIDDEN_STATES, LIGHT, InputError, read_manifest, sha256
from selector.tuning import Judged, StaticTable, best_static, tuned

SPACE = ActionSpace.default()
NETWORKS = 7  # bump it when the same traces train another network, or its decisions are judged otherwise
TIE = 1.0  # standard errors by which a dearer selector must be ahead of a cheaper one


def inputs(config: Config, profile: LatencyProfile) -> dict[str, Any]:
    """Everything the trained selector follows from."""
    return {
        "train": config.train.model_dump(mode="json"),
        "seed": config.seed,
        "networks": NETWORKS,
        "traces": {name: s["sha256"] for name, s in read_manifest(traces_folder(config))["shards"].items()},
        "latency": profile.to_json(),
    }


def kinds(config: Config) -> list[tuple[str, str]]:
    """Objective and features of the selectors that are trained: a policy sees what the cheaper selector sees."""
    seen = FEATURES if config.data.features == FULL else (LIGHT,)
    return [
        (objective, sees)
        for objective in config.train.objectives
        for sees in (seen if objective == "regressor" else (LIGHT,))
    ]


def plan(config: Config) -> list[str]:
    names = ", ".join(f"{objective} ({sees})" for objective, sees in kinds(config))
    return [f"{names}: {config.train.epochs} epochs each, judged by replay of the validation texts"]


@dataclass(frozen=True)
class Statics:
    """The best static tree of the trained verifier under one sampling setting, by the training texts.

    Attributes:
        mean_efficiency: tokens per step of every tree.
    """

    mode: Mode
    mean_efficiency: list[float]


def statics(splits: dict[str, Texts], settings: list[Setting], verifier: str, profile: LatencyProfile) -> list[Statics]:
    """For each sampling setting."""
    result = []
    for setting in settings:
        train = timed(splits["train"], setting, verifier, profile)
        table = StaticTable.of(train)
        result.append(Statics(best_static(train, table, setting), table.efficiencies().tolist()))
    return result


def run(config: Config) -> None:
    folder = config.folder / "training"
    profile = load_profile(config)
    stage = Stage("train", config, inputs(config, profile), (folder / "result.json",))
    splits = load_traces(config, profile.pair)
    if not stage.begin(lambda: all((folder / kind_name(*kind) / "best.ckpt").exists() for kind in kinds(config))):
        return
    partial = folder.with_name("training.partial")
    shutil.rmtree(partial, ignore_errors=True)
    with mlflow_run(config, "train") as mlflow:
        mlflow.log_dict(read_manifest(traces_folder(config)), "manifest.json")
        mlflow.log_params({f"texts.{split}": len(texts) for split, texts in splits.items()})
        train, validation = (
            {s: timed(splits[split], s, config.train.verifier, profile) for s in settings_of(config)}
            for split in ("train", "validation")
        )
        hopes = potentials({setting: (train[setting], validation[setting]) for setting in train})
        console.print(potential_table(hopes))
        bases = statics(splits, settings_of(config), config.train.verifier, profile)
        found = {}
        for objective, sees in kinds(config):
            name = kind_name(objective, sees)
            with mlflow.start_run(run_name=f"train-{name}", nested=True) as nested:
                run_id = nested.info.run_id
                module = trained(config, objective, sees, splits, bases, profile, partial / name, run_id)
                judged = judge(module, splits["validation"], bases, config.train.verifier, profile)
                found[name] = row_of(name, objective, sees, judged, bases, run_id)
                mlflow.log_params({"objective": objective, "sees": sees})
                mlflow.log_metrics(found[name]["metrics"])
        chosen = choose(found)
        mlflow.set_tag("chosen", chosen)
        write_json(partial / "result.json", {"chosen": chosen, "selectors": found, "potential": potential_rows(hopes)})
    stage.replace()
    shutil.rmtree(folder, ignore_errors=True)
    partial.rename(folder)
    console.print(table_of(found, chosen))
    stage.finish()


def kind_name(objective: str, sees: str) -> str:
    return f"{objective}-{sees}"


def trained(
    config: Config,
    objective: str,
    sees: str,
    splits: dict[str, Texts],
    bases: list[Statics],
    profile: LatencyProfile,
    folder: Path,
    run_id: str,
) -> SelectorModule:
    """One selector, as it was at its best epoch."""
    own, verifier = {name: splits[name] for name in ("train", "validation")}, config.train.verifier
    policy = objective == "policy"
    widths = [splits["train"].hidden[name].shape[1] for name in HIDDEN_STATES] if sees == FULL else []
    module = module_of(config, objective, sees, widths)
    times = {name: step_times(texts, bases, verifier, profile, sees) for name, texts in own.items()} if policy else None
    roots = RootsModule(
        own,
        verifier,
        sees == FULL,
        config.data.stride,
        config.train.batch,
        config.seed,
        None if times is None else {name: seconds for name, (seconds, _) in times.items()},
        None if times is None else {name: speeds for name, (_, speeds) in times.items()},
    )
    module.begin_at(own["train"], own["train"].survivals[verifier].float(), roots.rows["train"])
    module.judged = [
        (timed(own["validation"], setting_of(base.mode), verifier, profile), monitored(base.mode)) for base in bases
    ]
    return fit(config, module, roots, folder, run_id)


def setting_of(mode: Mode) -> Setting:
    return mode.temperature, mode.top_p


def monitored(mode: Mode) -> Mode:
    """How decisions are made while training goes on: each place at its own best ratio."""
    return Mode(mode.temperature, mode.top_p, mode.action, decides=True, speed=mode.speed, rho=1.0)


def step_times(
    texts: Texts, bases: list[Statics], verifier: str, profile: LatencyProfile, sees: str
) -> tuple[Tensor, Tensor]:
    """What a policy is trained with: step times of all roots [R, A], the speed of their setting's static tree [R]."""
    seconds_RA = torch.zeros(len(texts.length_R), len(SPACE))
    speed_R = torch.zeros(len(texts.length_R))
    setting_R = texts.setting_X[texts.text_R]
    for base in bases:
        mine = setting_R == texts.settings.index(setting_of(base.mode))
        seconds_RA[mine] = timed(texts, setting_of(base.mode), verifier, profile).seconds(sees)
        speed_R[mine] = base.mode.speed
    return seconds_RA, speed_R


def judge(
    module: SelectorModule, texts: Texts, bases: list[Statics], verifier: str, profile: LatencyProfile
) -> list[Judged]:
    """The best price of time under every setting, and what decisions are worth there, by replay of whole texts."""
    result = []
    for base in bases:
        mine = timed(texts, setting_of(base.mode), verifier, profile)
        result.append(
            tuned(mine, module.scores(mine.texts), base.mode, module.hparams["sees"], not module.is_regressor)
        )
    return result


def row_of(
    name: str, objective: str, sees: str, judged: list[Judged], bases: list[Statics], run_id: str
) -> dict[str, Any]:
    """What `result.json` holds of a selector. Where decisions do not pay, its mode is the static tree."""
    modes = [
        {
            **(each.mode if each.pays else each.mode.static_only()).row(),
            "replay": asdict(each.ratio),
            "mean_efficiency": base.mean_efficiency,
        }
        for each, base in zip(judged, bases, strict=True)
    ]
    gains = [each.ratio.value if each.pays else 1.0 for each in judged]
    errors = [each.ratio.error if each.pays else 0.0 for each in judged]
    error = sum(e * e for e in errors) ** 0.5 / len(errors)
    metrics = {"validation/replay_gated": statistics.mean(gains), "validation/replay_error": error}
    checkpoint = f"{name}/best.ckpt"
    facts = {"objective": objective, "sees": sees, "checkpoint": checkpoint, "run_id": run_id}
    return {**facts, "metrics": metrics, "modes": modes}


def choose(found: dict[str, dict[str, Any]]) -> str:
    """The fastest selector on the validation texts. One that sees more, or that is tied to this machine, must be ahead
    of the light regressor by a standard error."""
    plain = kind_name("regressor", LIGHT)

    def speed(name: str) -> float:
        return float(found[name]["metrics"]["validation/replay_gated"])

    best = max(found, key=speed)
    if plain in found:
        error = found[best]["metrics"]["validation/replay_error"]
        if speed(best) - TIE * error <= speed(plain):
            return plain
    return best


def chosen_of(result: dict[str, Any]) -> dict[str, Any]:
    """The selector that was kept."""
    return result["selectors"][result["chosen"]]


def load_result(config: Config) -> dict[str, Any]:
    """What training found; InputError unless the stage is finished and was run with this config."""
    profile = load_profile(config)
    require(config, "train", inputs(config, profile))
    return read_json(config.folder / "training" / "result.json", "train")


def checkpoint_of(config: Config, name: str, result: dict[str, Any]) -> Path:
    path = config.folder / "training" / result["selectors"][name]["checkpoint"]
    if not path.exists():
        raise InputError(f"{path} is missing: run the train stage again")
    return path


def load_module(config: Config, name: str, result: dict[str, Any]) -> SelectorModule:
    """A trained module; InputError where its checkpoint is damaged."""
    path = checkpoint_of(config, name, result)
    try:
        return SelectorModule.load_from_checkpoint(path, map_location="cpu").eval()
    except Exception as error:  # whatever a damaged file makes torch raise
        raise InputError(f"{path} is damaged: remove it and run the train stage again") from error


def decision_digest(config: Config, result: dict[str, Any]) -> dict[str, str]:
    """What decodes: the chosen checkpoint, and how it decides."""
    return {
        "training": sha256(checkpoint_of(config, result["chosen"], result)),
        "decisions": sha256(config.folder / "training" / "result.json"),
    }


def table_of(found: dict[str, dict[str, Any]], chosen: str) -> Table:
    """Speed over the best static tree by replay, by sampling setting and selector."""
    table = Table(title="Validation texts, replayed: speed over the best static tree (± one standard error)")
    table.title_justify = "left"
    table.add_column("setting")
    table.add_column("static tree")
    for name in found:
        table.add_column(f"{name}{' (kept)' if name == chosen else ''}", justify="right")
    for number, mode in enumerate(found[chosen]["modes"]):
        cells = []
        for own in found.values():
            replayed = own["modes"][number]["replay"]
            kept = " *" if own["modes"][number]["decides"] else ""
            cells.append(f"{replayed['value']:.3f} ±{replayed['error']:.3f}{kept}")
        table.add_row(str(Sampling(mode["temperature"], mode["top_p"])), str(tuple(mode["action"])), *cells)
    table.caption = "* decides there: ahead by two standard errors; elsewhere the static tree is kept"
    return table
