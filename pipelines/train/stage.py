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
from pipelines.data.recorded import load_traces, settings_of, timed, traces_folder
from pipelines.latency.profile import load_profile
from pipelines.run import Stage, console, write_json
from pipelines.tracking import describe, mlflow_run
from pipelines.train.fitting import fit, module_of
from pipelines.train.judging import Statics, judge, judge_rules, monitored, setting_of, statics, step_times
from pipelines.train.potential import potentials
from pipelines.train.potential import rows_of as potential_rows
from pipelines.train.potential import table_of as potential_table
from pipelines.train.result import chosen_of, inputs
from selector.actions import ActionSpace
from selector.decision import Mode
from selector.files import atomically
from selector.latency import LatencyProfile
from selector.schema import FULL, HIDDEN_STATES, LIGHT, read_manifest
from selector.train.data import Texts
from selector.train.module import RootsModule, SelectorModule
from selector.train.replay import Ratio
from selector.train.tuning import TIE, Judged

SECTIONS = ("pair", "prompts", "sampling", "verifiers", "data", "train")

SPACE = ActionSpace.with_lookups()


def kinds(config: Config) -> list[tuple[str, str]]:
    """Objective and features of the selectors that are trained: a policy sees what the cheaper selector sees."""
    seen = (LIGHT, FULL) if config.data.features == FULL else (LIGHT,)
    return [
        (objective, level)
        for objective in config.train.objectives
        for level in (seen if objective == "regressor" else (LIGHT,))
    ]


def plan(config: Config) -> list[str]:
    names = ", ".join(f"{objective} ({level})" for objective, level in kinds(config))
    return [f"{names}: {config.train.epochs} epochs each, judged by replay of the validation texts"]


def run(config: Config) -> None:
    folder = config.folder / "training"
    profile = load_profile(config)
    stage = Stage("train", config, inputs(config, profile), (folder,))
    splits = load_traces(config, profile.pair)
    if not stage.begin():
        return
    with atomically(folder) as partial:
        result = _train(config, splits, profile, partial)
        stage.replace()
    console.print(table_of(result["selectors"], result["chosen"]))
    stage.finish()


def _train(config: Config, splits: dict[str, Texts], profile: LatencyProfile, folder: Path) -> dict[str, Any]:
    """All kinds of selectors, one nested MLflow run each; what `result.json` in the folder says of them."""
    settings, verifier = settings_of(config), config.train.verifier
    with mlflow_run(config, "train", SECTIONS) as mlflow:
        mlflow.log_dict(read_manifest(traces_folder(config)), "manifest.json")
        mlflow.log_params({f"texts.{split}": len(texts) for split, texts in splits.items()})
        train, validation = (
            {setting: timed(splits[split], setting, verifier, profile) for setting in settings}
            for split in ("train", "validation")
        )
        hopes = potentials({setting: (train[setting], validation[setting]) for setting in train})
        console.print(potential_table(hopes))
        bases = statics(splits, settings, verifier, profile)
        rules = judge_rules(splits, bases, verifier, profile)
        found = {}
        for objective, level in kinds(config):
            name = kind_name(objective, level)
            with mlflow.start_run(run_name=f"train-{name}", nested=True) as nested:
                run_id = nested.info.run_id
                module = trained(config, objective, level, splits, bases, profile, folder / name, run_id)
                judged = judge(module, splits["validation"], bases, verifier, profile)
                found[name] = row_of(name, objective, level, judged, rules, bases, run_id)
                mlflow.log_params({"objective": objective, "feature_level": level})
                mlflow.log_metrics(found[name]["metrics"])
        result: dict[str, Any] = {"chosen": choose(found), "selectors": found, "potential": potential_rows(hopes)}
        mlflow.set_tag("chosen", result["chosen"])
        mlflow.log_metrics(found[result["chosen"]]["metrics"])  # so that the list of runs shows them
        describe(mlflow, in_words(result))
        write_json(folder / "result.json", result)
    return result


def in_words(result: dict[str, Any]) -> str:
    """What was kept, and where it decides."""
    modes = list(map(Mode.of, chosen_of(result)["modes"]))
    decides, copies = (
        ", ".join(str(Sampling(mode.temperature, mode.top_p)) for mode in modes if of(mode))
        for of in (lambda mode: mode.decides, lambda mode: mode.rule is not None)
    )
    also = f"; copies by rule at {copies}" if copies else ""
    return f"{result['chosen']} is kept, and decides at {decides or 'no sampling setting'}{also}"


def kind_name(objective: str, level: str) -> str:
    return f"{objective}-{level}"


def trained(
    config: Config,
    objective: str,
    level: str,
    splits: dict[str, Texts],
    bases: list[Statics],
    profile: LatencyProfile,
    folder: Path,
    run_id: str,
) -> SelectorModule:
    """One selector, as it was at its best epoch."""
    own, verifier = {name: splits[name] for name in ("train", "validation")}, config.train.verifier
    widths = [splits["train"].hidden[name].shape[1] for name in HIDDEN_STATES] if level == FULL else []
    module = module_of(config, objective, level, widths)
    further = None
    if objective == "policy":
        further = {name: step_times(texts, bases, verifier, profile, level) for name, texts in own.items()}
    roots = RootsModule(
        own,
        verifier,
        level,
        config.data.stride,
        config.train.batch,
        config.seed,
        further,
    )
    module.begin_at(own["train"], own["train"].labels(verifier, slice(None), SPACE), roots.rows["train"])
    module.judged = [
        (timed(own["validation"], setting_of(base.mode), verifier, profile), monitored(base.mode, module.asked))
        for base in bases
    ]
    return fit(config, module, roots, folder, run_id)


def row_of(
    name: str,
    objective: str,
    level: str,
    judged: list[Judged],
    rules: list[Judged],
    bases: list[Statics],
    run_id: str,
) -> dict[str, Any]:
    """What `result.json` holds of a selector."""
    modes = [
        {
            **kept(each, rule, base.mode).mode.row(),
            "replay": asdict(each.ratio),
            "replay_rule": asdict(rule.ratio),
            "mean_efficiency": base.mean_efficiency,
        }
        for each, rule, base in zip(judged, rules, bases, strict=True)
    ]
    ratios = [kept(each, rule, base.mode).ratio for each, rule, base in zip(judged, rules, bases, strict=True)]
    error = sum(ratio.error**2 for ratio in ratios) ** 0.5 / len(ratios)
    gated = statistics.mean(ratio.value for ratio in ratios)
    metrics = {"validation/replay_gated": gated, "validation/replay_error": error}
    checkpoint = f"{name}/best.ckpt"
    facts = {"objective": objective, "feature_level": level, "checkpoint": checkpoint, "run_id": run_id}
    return {**facts, "metrics": metrics, "modes": modes}


def kept(judged: Judged, rule: Judged, static: Mode) -> Judged:
    """What is done under a setting: what the network decides where that pays and is ahead of the rule for lookups; else
    the rule where it pays; else the static tree."""
    if judged.pays and judged.is_ahead_of(rule):
        return judged
    return rule if rule.pays else Judged(static, Ratio(1.0, 0.0))


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


def table_of(found: dict[str, dict[str, Any]], chosen: str) -> Table:
    """Speed over the best static tree by replay, by sampling setting and selector."""
    table = Table(title="Validation texts, replayed: speed over the best static tree (± one standard error)")
    table.title_justify = "left"
    table.add_column("setting")
    table.add_column("static tree")
    table.add_column("rule: lookup or tree", justify="right")
    for name in found:
        table.add_column(f"{name}{' (kept)' if name == chosen else ''}", justify="right")
    for number, mode in enumerate(found[chosen]["modes"]):
        cells = []
        for own in found.values():
            replayed = own["modes"][number]["replay"]
            mark = " *" if own["modes"][number]["decides"] else ""
            cells.append(f"{Ratio(**replayed)}{mark}")
        own_rule = f"{Ratio(**mode['replay_rule'])}{' *' if mode['rule'] else ''}"
        table.add_row(str(Sampling(mode["temperature"], mode["top_p"])), str(tuple(mode["action"])), own_rule, *cells)
    table.caption = "* decides there: ahead by two standard errors, and of the rule; elsewhere the static tree is kept"
    return table
