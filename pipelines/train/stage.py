"""Stage `train`: selectors on all positions of the training texts, judged by replay of whole validation texts.

The best one is kept, and decides only under those sampling settings where that pays by two standard errors.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from data_gen.models.sampling import Sampling
from pipelines.config import Config
from pipelines.data.recorded import load_traces, traces_folder
from pipelines.latency.stage import load_profile
from pipelines.run import Stage, console, table, write_json
from pipelines.tracking import describe, log_traces, mlflow_run, named, nested_run
from pipelines.train import judging
from pipelines.train.fitting import OWN, fitted, module_of
from pipelines.train.result import chosen_of, inputs
from selector.actions import Action
from selector.decision import NETWORK, Mode
from selector.files import atomically
from selector.latency import LatencyProfile
from selector.schema import FULL, HIDDEN_STATES, LIGHT
from selector.train.data import Texts, Timed
from selector.train.module import SelectorModule
from selector.train.replay import Ratio
from selector.train.tuning import TIE, Judged

SECTIONS = ("pair", "prompts", "sampling", "verifiers", "data", "train")


def kinds(config: Config) -> list[tuple[str, str]]:
    """Objective and feature level of the selectors that are trained: a policy uses all features in the traces."""
    levels = {
        "regressor": (LIGHT, FULL) if config.data.features == FULL else (LIGHT,),
        "policy": (config.data.features,),
    }
    return [(objective, level) for objective in config.train.objectives for level in levels[objective]]


def plan(config: Config) -> list[str]:
    names = ", ".join(f"{objective} ({level})" for objective, level in kinds(config))
    return [f"{names}: {config.train.epochs} epochs each, judged by replay of the validation texts"]


def stage_of(config: Config) -> Stage:
    """The stage with what it depends on; InputError without a latency profile or traces."""
    return Stage("train", config, inputs(config, load_profile(config)), (config.folder / "training",))


def run(config: Config) -> None:
    profile, stage = load_profile(config), stage_of(config)
    splits = load_traces(config, profile.pair)
    if not stage.begin():
        return
    with atomically(stage.outputs[0]) as partial:
        result = _train(config, splits, profile, partial)
        stage.replace()
    console.print(table_of(result["selectors"], result["chosen"]))
    stage.finish()


def _train(config: Config, splits: dict[str, Texts], profile: LatencyProfile, folder: Path) -> dict[str, Any]:
    with mlflow_run(config, "train", SECTIONS) as mlflow:
        log_traces(mlflow, traces_folder(config), OWN)
        mlflow.log_params({f"texts.{split}": len(texts) for split, texts in splits.items()})
        train, validation = (judging.by_setting(config, splits[name], profile) for name in OWN)
        bases = judging.statics(train)
        judged_rules = judging.judge_rules(train, validation, bases)
        del train  # its labels take memory that the networks' training needs
        found = {}
        for objective, level in kinds(config):
            name = f"{objective}-{level}"
            with nested_run(mlflow, f"train-{name}") as nested:
                log_traces(mlflow, traces_folder(config), OWN)
                run_id = nested.info.run_id
                texts = splits["train"]
                widths = [texts.hidden[name].shape[1] for name in HIDDEN_STATES] if level == FULL else []
                module = module_of(config, objective, level, widths, space=texts.space.to_json())
                module = trained(config, module, splits, validation, bases, folder / name, run_id)
                judged = judging.judge(module, validation, bases)
                facts = {"objective": objective, "feature_level": level}
                mlflow.log_params(facts)
                facts |= {"checkpoint": f"{name}/best.ckpt", "run_id": run_id}
                found[name] = {**facts, **row_of(judged, judged_rules, bases, module.longest)}
                mlflow.log_metrics(figures(found[name]))
        result = {"chosen": choose(found), "selectors": found}
        mlflow.set_tag("chosen", result["chosen"])
        modes = map(Mode.of, chosen_of(result)["modes"])
        decides = [str(mode.sampling) for mode in modes if mode.decider == NETWORK]
        words = f"{result['chosen']} is kept, and decides at {', '.join(decides) or 'no sampling setting'}"
        describe(mlflow, words, figures(chosen_of(result)))
        write_json(folder / "result.json", result)
    return result


def figures(row: dict[str, Any]) -> dict[str, float]:
    """MLflow's metrics, as speeds over the best static tree: of the network alone and of what is kept, as means over
    sampling settings and for each of them."""
    alone = [mode["replay"]["value"] for mode in row["modes"]]
    found = {"kept_ratio": row["metrics"]["validation/replay_gated"], "replayed_ratio": statistics.mean(alone)}
    for mode, own in zip(row["modes"], alone, strict=True):
        kept = own if mode["decides"] else mode["replay_rule"]["value"] if mode["rule"] else 1.0
        found |= named({"replayed_ratio": own, "kept_ratio": kept}, mode)
    return found


def trained(
    config: Config,
    module: SelectorModule,
    splits: dict[str, Texts],
    validation: list[Timed],
    bases: list[Mode],
    folder: Path,
    run_id: str,
) -> SelectorModule:
    """Train a module on the training texts, and return it as of its best epoch by replay of the validation texts."""
    verifier, further = config.train.verifier, None
    if not module.is_regressor:
        given = bases, verifier, validation[0].profile
        further = {name: judging.step_times(module, splits[name], *given) for name in OWN}
    judged = [(texts, judging.monitored(base, module.asked)) for texts, base in zip(validation, bases, strict=True)]
    return fitted(config, module, splits, verifier, judged, folder, run_id, further)


def row_of(judged: list[Judged], rules: list[Judged], bases: list[Mode], longest: int) -> dict[str, Any]:
    """What `result.json` holds of a selector's decisions: metrics over all settings, and a mode for each. `longest` as
    in `keep_if_ahead`."""
    modes, ratios = [], []
    for each, rule, base in zip(judged, rules, bases, strict=True):
        best = judging.keep_if_ahead(each, rule, base, longest)
        modes.append({**best.mode.row(), "replay": asdict(each.ratio), "replay_rule": asdict(rule.ratio)})
        ratios.append(best.ratio)
    error = sum(ratio.error**2 for ratio in ratios) ** 0.5 / len(ratios)
    gated = statistics.mean(ratio.value for ratio in ratios)
    return {"metrics": {"validation/replay_gated": gated, "validation/replay_error": error}, "modes": modes}


def choose(found: dict[str, dict[str, Any]]) -> str:
    """The fastest selector on the validation texts. Any other than the light regressor must be ahead of it by a
    standard error."""
    speeds = {name: float(row["metrics"]["validation/replay_gated"]) for name, row in found.items()}
    best, plain = max(speeds, key=speeds.__getitem__), f"regressor-{LIGHT}"
    error = found[best]["metrics"]["validation/replay_error"]
    return plain if plain in found and speeds[best] - TIE * error <= speeds[plain] else best


def table_of(found: dict[str, dict[str, Any]], chosen: str) -> Table:
    rows = []
    for number, mode in enumerate(found[chosen]["modes"]):
        rule = " *" if mode["rule"] and not mode["decides"] else ""
        cells = {
            "setting": str(Sampling(mode["temperature"], mode["top_p"])),
            "static tree": str(Action.of(mode["action"])),
            "lookup rule": f"{Ratio(**mode['replay_rule'])}{rule}",
        }
        for name, row in found.items():
            own, kept = row["modes"][number], "\n(kept)" if name == chosen else ""
            cells[name + kept] = f"{Ratio(**own['replay'])}{' *' if own['decides'] else ''}"
        rows.append(cells)
    caption = (
        "* This one decides under the setting: a network that is two standard errors ahead of the better one of the "
        "best static tree and the lookup rule, or a rule that is one ahead. Else the static tree is drafted."
    )
    title = "Validation texts, replayed: speed over the best static tree\n(± one standard error over sources)"
    return table(rows, title, caption)
