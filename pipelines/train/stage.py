"""Stage `train`: selectors on all positions of the training texts, judged by replay of whole
validation texts.

The best one is kept, and decides only in those cases, sampling settings or batch sizes, where that
pays by two standard errors.
"""

from __future__ import annotations

import shutil
import statistics
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.table import Table
from torch import Tensor

from pipelines.config import Config
from pipelines.data.recorded import load_traces, traces_folder
from pipelines.latency.stage import load_profile
from pipelines.pair.source import Source, source_of
from pipelines.run import Stage
from pipelines.terminal import console, table, watched
from pipelines.tracking import describe, log_traces, mlflow_run, named
from pipelines.train import judging
from pipelines.train.fitting import OWN, fitted, module_of
from pipelines.train.result import RESULT, Case, Result, TrainedSelector, inputs
from selector.decision import NETWORK, RULE, STATIC, Setting
from selector.files import atomically
from selector.latency import LatencyProfile
from selector.schema import LIGHT
from selector.train.data import Texts, Timed, offering
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
    console.print(table_of(result))
    doubt = judging.too_few(splits["validation"])
    if doubt:
        stage.say(f"warning: {doubt}")
    stage.finish()


def _train(
    config: Config, splits: dict[str, Texts], profile: LatencyProfile, folder: Path
) -> Result:
    source = source_of(config)
    with mlflow_run(config, "train") as mlflow:
        log_traces(mlflow, traces_folder(config), OWN)
        mlflow.log_params({f"texts.{split}": len(texts) for split, texts in splits.items()})
        splits = offering(splits, judging.space_that_pays(config, splits["train"], [profile]))
        train = judging.timed_cases(config, splits["train"], profile)
        validation = judging.timed_cases(config, splits["validation"], profile)
        bases = judging.statics(train)
        rules = judging.judge_rules(train, validation, bases, profile)
        copies: list[Judged] = []
        if not source.decodes:
            copies = rules
            if source.drafting_lead > 1:
                copies = judging.judge_rules(train, validation, bases, profile, drafts=False)
                rules = judging.drafting_where_ahead(rules, copies, source.drafting_lead)
            rules = judging.by_match(rules, train, validation, bases, profile)
        paying: list[list[Setting]] = []
        for case, judged, rule, base in zip(train, validation, rules, bases, strict=True):
            tried = [] if source.decodes else [rule.setting, base]
            paying.append(judging.that_pay(tried, [case, judged], base, profile))
        train = []  # its labels take memory that the networks' training needs
        selectors: dict[str, TrainedSelector] = {}
        for objective, level in source.selectors:
            name = _name_of(objective, level)
            with mlflow.start_run(run_name=f"train-{name}", nested=True) as nested:
                log_traces(mlflow, traces_folder(config), OWN)
                run_id = nested.info.run_id
                module = module_of(config, objective, level, splits["train"])
                module = trained(config, module, splits, validation, bases, folder / name, run_id)
                mlflow.log_params({"objective": objective, "feature_level": level})
                cases, kept = decided(module, validation, rules, bases, profile, source, paying)
                cases = with_copies(cases, copies)
                checkpoint = f"{name}/best.ckpt"
                selector = TrainedSelector(objective, level, checkpoint, run_id, cases, kept)
                mlflow.log_metrics(figures(selector))
                selectors[name] = selector
        result = Result(choose(selectors), selectors)
        _log_choice(mlflow, result)
        (folder / "result.json").write_bytes(RESULT.dump_json(result, indent=1))
    return result


def _log_choice(mlflow: Any, result: Result) -> None:
    mlflow.set_tag("chosen", result.chosen)
    decides = [case.setting.label for case in result.best.cases if case.setting.decider == NETWORK]
    places = "; ".join(decides) if decides else "no sampling setting"
    mlflow.log_metrics(figures(result.best))
    describe(mlflow, f"{result.chosen} is kept, and decides at {places}")


def figures(selector: TrainedSelector) -> dict[str, float]:
    """MLflow's metrics, as speeds over the best static tree: of the network alone and of what is
    kept, as means over sampling settings and for each of them."""
    metrics = {
        "kept_ratio": selector.kept.value,
        "replayed_ratio": statistics.mean(case.network_ratio.value for case in selector.cases),
    }
    for case in selector.cases:
        kept = {NETWORK: case.network_ratio.value, RULE: case.rule_ratio.value, STATIC: 1.0}
        ratios = {
            "replayed_ratio": case.network_ratio.value,
            "kept_ratio": kept[case.setting.decider],
        }
        metrics |= named(ratios, case.setting.row())
    return metrics


def trained(
    config: Config,
    module: SelectorModule,
    splits: dict[str, Texts],
    validation: list[Timed],
    bases: list[Setting],
    folder: Path,
    run_id: str,
) -> SelectorModule:
    """Train a module on the training texts, and return it as of its best epoch by replay of the
    validation texts: of several batch sizes for the smallest and the middle one."""
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
    for case, base in zip(validation, bases, strict=True):
        if case.batch in judged_sizes:
            for levels, _ in module.ways:
                judged.append((case, replace(base, feature_levels=levels, rho=1.0)))
    return fitted(config, module, splits, verifier, judged, folder, run_id, further)


def decided(
    module: SelectorModule,
    validation: list[Timed],
    rules: list[Judged],
    bases: list[Setting],
    profile: LatencyProfile,
    source: Source,
    paying: list[list[Setting]],
) -> tuple[list[Case], Ratio]:
    """What decides in every case, and its mean speed over the best static trees. `paying` are the
    rules and trees that surely pay in each case, where those that do not are not kept."""
    # without models, whole texts are replayed
    longest = module.longest if source.decodes else 0
    is_judged = not judging.too_few(validation[0].texts)
    cases = []
    ratios = []
    judged_texts = list(zip(validation, rules, bases, paying, strict=True))
    for texts, rule, base, that_pay in watched(judged_texts, "tuning decisions"):
        times = 1.0 if rule.setting.action.drafts else source.drafting_lead
        for alone in judging.judge(module, texts, base):
            network = alone
            common = 0.0
            if texts.batch > 1:
                predicted_RA = module.scores(texts.texts, alone.setting.level)
                network, common = judging.judge_jointly(
                    texts, predicted_RA, alone, rule, base, profile
                )
            best = judging.keep_if_ahead(network, rule, base, longest, times, is_judged)
            if not source.decodes:
                best = judging.unless_plain(best, that_pay, texts, base, profile)
            setting = replace(best.setting, level=alone.setting.level)
            cases.append(Case(setting, base, rule.setting, network.ratio, rule.ratio, common))
            ratios.append(best.ratio)
    value = statistics.mean(ratio.value for ratio in ratios)
    error = statistics.mean(ratio.error for ratio in ratios)  # at most: the cases share prompts
    return cases, Ratio(value, error)


def with_copies(cases: Sequence[Case], copies: Sequence[Judged]) -> list[Case]:
    """The cases with the rules that copy alone, which are by setting and batch size."""
    by_case = {alone.setting.key: alone.setting for alone in copies}
    return [replace(case, copies=by_case.get(case.setting.key)) for case in cases]


def choose(selectors: dict[str, TrainedSelector]) -> str:
    """The fastest selector on the validation texts, if one standard error ahead of the light
    regressor; else that."""
    best = max(selectors, key=lambda name: selectors[name].kept.value)
    plain = _name_of("regressor", LIGHT)
    if plain in selectors and not selectors[best].kept.is_ahead(TIE, selectors[plain].kept.value):
        return plain
    return best


def table_of(result: Result) -> Table:
    rows = []
    for number, best in enumerate(result.best.cases):
        rule_mark = " *" if best.setting.decider == RULE else ""
        cells = {
            "setting": best.setting.label,
            "static tree": str(best.setting.action),
            "lookup rule": f"{best.rule_ratio}{rule_mark}",
        }
        for name, selector in result.selectors.items():
            case = selector.cases[number]
            column = f"{name}\n(kept)" if name == result.chosen else name
            mark = " *" if case.setting.decider == NETWORK else ""
            cells[column] = f"{case.network_ratio}{mark}"
        rows.append(cells)
    caption = (
        "* This one decides under the setting: a network that is two standard errors ahead of "
        "the better one of the best static tree and the lookup rule, or a rule that is one ahead, "
        "on the training texts, too. Else the static tree is drafted."
    )
    title = (
        "Validation texts, replayed: speed over the best static tree\n(± one standard error over "
        "sources)"
    )
    return table(rows, title, caption)
