"""Stage `train`: selectors on all positions of the training texts, judged by replay of whole
validation texts.

The best one is kept, and decides only in those cases, sampling settings or batch sizes, where that
pays by two standard errors.
"""

from __future__ import annotations

import shutil
import statistics
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import Tensor

from pipelines.config import Config
from pipelines.data.recorded import load_traces, traces_folder
from pipelines.latency.stage import load_profile
from pipelines.pair.source import Source, source_of
from pipelines.run import Stage, console, table, watched, write_json
from pipelines.tracking import describe, log_traces, mlflow_run, named
from pipelines.train import judging
from pipelines.train.fitting import OWN, fitted, module_of, seen
from pipelines.train.result import chosen_of, inputs
from selector.actions import Action
from selector.decision import Mode
from selector.files import atomically
from selector.latency import LatencyProfile
from selector.schema import LIGHT
from selector.train.data import Texts, Timed
from selector.train.module import SelectorModule
from selector.train.replay import Ratio
from selector.train.tuning import TIE, Judged


def _name_of(objective: str, level: str) -> str:
    return f"{objective}-{level}"


def plan(config: Config) -> list[str]:
    source = source_of(config)
    if source.why_untrained:
        return [source.why_untrained]
    names = ", ".join(f"{objective} ({level})" for objective, level in source.selectors)
    return [f"{names}: {config.train.epochs} epochs each, judged by replay of the validation texts"]


def stage_of(config: Config) -> Stage:
    """The stage with what it depends on; InputError without a latency profile or traces."""
    return Stage(
        "train", config, inputs(config, load_profile(config)), (config.folder / "training",)
    )


def run(config: Config) -> None:
    source = source_of(config)
    if source.why_untrained:
        for name in ("training", "selector"):  # earlier ones would pass for this log's
            shutil.rmtree(config.folder / name, ignore_errors=True)
        console.print(source.why_untrained, soft_wrap=True)
        return
    profile = load_profile(config)
    stage = stage_of(config)
    splits = load_traces(config)
    if not stage.begin():
        return
    with atomically(stage.outputs[0]) as partial:
        result = _train(config, splits, profile, partial)
        stage.replace()
    if source.is_dense:
        console.print(table_of(result["selectors"], result["chosen"]))
    stage.finish()


def _train(
    config: Config, splits: dict[str, Texts], profile: LatencyProfile, folder: Path
) -> dict[str, Any]:
    source = source_of(config)
    is_dense = source.is_dense
    with mlflow_run(config, "train") as mlflow:
        log_traces(mlflow, traces_folder(config), OWN)
        mlflow.log_params({f"texts.{split}": len(texts) for split, texts in splits.items()})
        train = judging.by_setting(config, splits["train"], profile)
        validation = judging.by_setting(config, splits["validation"], profile)
        bases: list[Mode] = []
        rules: list[Judged] = []
        if is_dense:
            bases = judging.statics(train)
            rules = judging.judge_rules(train, validation, bases, profile, source.drafting_lead)
            train = []  # its labels take memory that the networks' training needs
        selectors: dict[str, dict[str, Any]] = {}
        for objective, level in source.selectors:
            name = _name_of(objective, level)
            with mlflow.start_run(run_name=f"train-{name}", nested=True) as nested:
                log_traces(mlflow, traces_folder(config), OWN)
                run_id = nested.info.run_id
                module = _untrained(config, objective, level, splits["train"])
                module = trained(config, module, splits, validation, bases, folder / name, run_id)
                facts = {"objective": objective, "feature_level": level}
                mlflow.log_params(facts)
                facts |= {"checkpoint": f"{name}/best.ckpt", "run_id": run_id}
                if is_dense:
                    row = row_of(module, validation, rules, bases, profile, source)
                    mlflow.log_metrics(figures(row))
                else:
                    row = _unjudged_row_of(module, train)
                selectors[name] = {**facts, **row}
        if is_dense:
            chosen = choose(selectors)
        else:  # the only one: there is one kind of selector for logs, and only they are not dense
            chosen = _name_of(*source.selectors[-1])
        result = {"chosen": chosen, "selectors": selectors}
        _log_choice(mlflow, result, is_dense)
        write_json(folder / "result.json", result)
    return result


def _untrained(config: Config, objective: str, level: str, texts: Texts) -> SelectorModule:
    return module_of(
        config,
        objective,
        *seen(level, texts),
        schema=texts.schema.name,
        space=texts.space.to_json(),
        squared_weight=source_of(config).squared_weight,
    )


def _unjudged_row_of(module: SelectorModule, train: list[Timed]) -> dict[str, Any]:
    """What `row_of` gives, for a log on which nothing can be replayed."""
    modes = []
    for case in train:
        for mode in judging.untuned(module, case):
            modes.append(mode.row())
    return {"metrics": {}, "modes": modes}


def _log_choice(mlflow: Any, result: dict[str, Any], is_dense: bool) -> None:
    chosen = chosen_of(result)
    mlflow.set_tag("chosen", result["chosen"])
    decides = [Mode.of(mode).place for mode in chosen["modes"] if mode["decides"]]
    places = "; ".join(decides) if decides else "no sampling setting"
    words = f"{result['chosen']} is kept, and decides at {places}"
    if is_dense:
        mlflow.log_metrics(figures(chosen))
    describe(mlflow, words)


def figures(row: dict[str, Any]) -> dict[str, float]:
    """MLflow's metrics, as speeds over the best static tree: of the network alone and of what is
    kept, as means over sampling settings and for each of them."""
    ratios = [mode["replay"]["value"] for mode in row["modes"]]
    metrics = {
        "kept_ratio": row["metrics"]["validation/replay_gated"],
        "replayed_ratio": statistics.mean(ratios),
    }
    for mode, ratio in zip(row["modes"], ratios, strict=True):
        kept = 1.0
        if mode["decides"]:
            kept = ratio
        elif mode["rule"]:
            kept = mode["replay_rule"]["value"]
        metrics |= named({"replayed_ratio": ratio, "kept_ratio": kept}, mode)
    return metrics


def trained(
    config: Config,
    module: SelectorModule,
    splits: dict[str, Texts],
    validation: list[Timed],
    bases: list[Mode],
    folder: Path,
    run_id: str,
) -> SelectorModule:
    """Train a module on the training texts, and return it as of its best epoch by replay of the
    validation texts: of several batch sizes for the smallest and the middle one. Without `bases` it
    is that of the least loss."""
    verifier = config.train.verifier
    further: dict[str, tuple[Tensor, Tensor]] | None = None
    if not module.is_regressor:
        further = {}
        for name in OWN:
            further[name] = judging.step_times(
                module, splits[name], bases, verifier, validation[0].profile
            )
    sizes = sorted({case.batch for case in validation})
    judged_sizes = (sizes[0], sizes[len(sizes) // 2])
    judged = []
    for case, base in zip(validation, bases, strict=False):
        if case.batch in judged_sizes:
            for levels, _ in module.ways:
                judged.append((case, replace(base, feature_levels=levels, rho=1.0)))
    return fitted(config, module, splits, verifier, judged, folder, run_id, further)


def row_of(
    module: SelectorModule,
    validation: list[Timed],
    rules: list[Judged],
    bases: list[Mode],
    profile: LatencyProfile,
    source: Source,
) -> dict[str, Any]:
    """What `result.json` holds of a selector's decisions: metrics over all cases, and the modes of
    each, with the best static tree and the lookup rule beside them."""
    # without models, whole texts are replayed
    longest = module.longest if source.decodes else 0
    modes = []
    ratios = []
    cases = list(zip(validation, rules, bases, strict=True))
    for case, rule, base in watched(cases, "tuning decisions"):
        times = 1.0 if rule.mode.action.drafts else source.drafting_lead
        for judged in judging.judge(module, [case], [base]):
            network = judged
            common = 0.0
            if case.batch > 1:
                predicted_RA = module.scores(case.texts, judged.mode.level)
                network, common = judging.judge_jointly(
                    case, predicted_RA, judged, rule, base, profile
                )
            best = judging.keep_if_ahead(network, rule, base, longest, times)
            mode = replace(best.mode, level=judged.mode.level)
            modes.append(
                {
                    **mode.row(),
                    "replay": asdict(network.ratio),
                    "replay_rule": asdict(rule.ratio),
                    "common": common,
                    "static": list(base.action),
                    "drafted": list(rule.mode.action),
                    "lookup_rule": list(rule.mode.rule or ()),
                }
            )
            ratios.append(best.ratio)
    gated = statistics.mean(ratio.value for ratio in ratios)
    error = statistics.mean(ratio.error for ratio in ratios)  # at most: the cases share prompts
    return {
        "metrics": {"validation/replay_gated": gated, "validation/replay_error": error},
        "modes": modes,
    }


def choose(found: dict[str, dict[str, Any]]) -> str:
    """The fastest selector on the validation texts, if one standard error ahead of the light
    regressor; else that."""
    speeds = {name: float(row["metrics"]["validation/replay_gated"]) for name, row in found.items()}
    best = max(speeds, key=speeds.__getitem__)
    plain = _name_of("regressor", LIGHT)
    error = found[best]["metrics"]["validation/replay_error"]
    if plain in found and speeds[best] - TIE * error <= speeds[plain]:
        return plain
    return best


def table_of(found: dict[str, dict[str, Any]], chosen: str) -> Table:
    rows = []
    for number, mode in enumerate(found[chosen]["modes"]):
        rule_mark = " *" if mode["rule"] and not mode["decides"] else ""
        cells = {
            "setting": Mode.of(mode).place,
            "static tree": str(Action.of(mode["action"])),
            "lookup rule": f"{Ratio(**mode['replay_rule'])}{rule_mark}",
        }
        for name, row in found.items():
            selector_mode = row["modes"][number]
            column = f"{name}\n(kept)" if name == chosen else name
            mark = " *" if selector_mode["decides"] else ""
            cells[column] = f"{Ratio(**selector_mode['replay'])}{mark}"
        rows.append(cells)
    caption = (
        "* This one decides under the setting: a network that is two standard errors ahead of "
        "the better one of the best static tree and the lookup rule, or a rule that is one ahead. "
        "Else the static tree is drafted."
    )
    title = (
        "Validation texts, replayed: speed over the best static tree\n(± one standard error over "
        "sources)"
    )
    return table(rows, title, caption)
