"""Stage `logs`: from an engine's logs to a selector, without a model: training, exact replay, artefact, report."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch

from data_gen.features.root import DrafterKnowledge
from data_gen.models.sampling import Sampling
from data_gen.texts.log_labels import VERIFIER, Labeller, splits_of
from data_gen.texts.logs import NO_DRAFTER, LoggedText, Logs, drafter_of, read_all
from pipelines.config import Config
from pipelines.evaluate.methods import COPYING, PLAIN, SELECTOR
from pipelines.evaluate.table import ALL, Table, replayed
from pipelines.evaluate.verdict import Evaluation
from pipelines.export.stage import register
from pipelines.latency.timings import misfit, profile_of, read_timings
from pipelines.logs.gains import CHARGED, FIXED, LEVELS, ONE_LENGTH, entries, measured, selector_at
from pipelines.report.page import write_page
from pipelines.run import Stage, console, provenance, watched
from pipelines.tracking import describe, log_data, mlflow_run
from pipelines.train.fitting import fitted, module_of
from pipelines.train.judging import BatchModes, monitored, tune_batch, untuned
from pipelines.train.result import package
from selector.actions import ActionSpace
from selector.decision import Mode
from selector.files import atomically
from selector.latency import LatencyProfile
from selector.runtime.selector import Selector, load_selector
from selector.schema import LOG, InputError, sha256
from selector.train.data import SPLITS, Texts, Timed
from selector.train.module import SelectorModule
from selector.train.tuning import StaticTable, best_static

SECTIONS = ("prompts", "sampling", "data", "latency", "train", "logs")
LONGEST_LOOKUP = 20  # tokens
SQUARED = 0.03  # weight of the squared error; with 1, lookups of 20 tokens would outweigh the drafter's chains
OUTPUTS = ("evaluation.json", "evaluation.parquet", "report.html", "training", "selector")  # the last two of a selector
TIMED_DECISIONS = 200
CONTEXT = 8000  # tokens of context at which decisions are timed
COMPARED = 12  # texts on which the artefact must decide as the trained network does
TIMELESS = "No step times were given: add --timings FILE to train a selector, to measure its gain and to export it."
UNMEASURED = (
    "WARNING: no selector is written, because a log of steps alone cannot tell whether it gains. Log dense steps, set "
    "logs.drafter=none for copies, whose labels are always exact, or export it all the same with logs.force=true."
)


def plan(config: Config) -> list[str]:
    logs, labeller = _read(config)
    return [
        f"{len(logs.all)} texts, {sum(text.roots for text in logs.all):,} positions; {labeller.drafter} of up to "
        f"{labeller.space.depth} tokens, lookups of up to {LONGEST_LOOKUP}",
        *logs.remarks,
        f"train {config.train.epochs} epochs, replay, write {config.folder / 'selector'}"
        if config.logs.force or _is_dense(logs, labeller)
        else UNMEASURED,
    ]


def run(config: Config) -> None:
    logs, labeller = _read(config)
    splits = splits_of(logs, config.prompts.validation, config.prompts.test)
    profile, doubt = _profile(config, labeller.drafter)
    dense = _is_dense(logs, labeller)
    profile = profile if dense or config.logs.force else None
    outputs = tuple(config.folder / name for name in OUTPUTS[: len(OUTPUTS) if profile else 3])
    stage = Stage("logs", config, _depends(config), outputs)
    for remark in (*logs.remarks, *filter(None, [doubt])):
        stage.say(remark)
    if not stage.begin():
        console.print("\n".join(_in_words(config, Evaluation.read(config))), soft_wrap=True)
        return
    with mlflow_run(config, "logs", SECTIONS) as mlflow:
        stage.replace()
        if profile is None:
            shutil.rmtree(config.folder / "selector", ignore_errors=True)  # an earlier one would pass for this log's
        evaluation = _evaluated(config, splits, labeller, dense, profile, mlflow.active_run().info.run_id)
        evaluation.write(config)
        words, gains = list(_in_words(config, evaluation)), metrics(evaluation.table)
        page(config, evaluation, words)
        for path in outputs:
            mlflow.log_artifact(str(path))
        for split, paths in (("train", config.logs.files), ("test", config.logs.test)):
            for path in paths:
                digest, sizes = stage.depends["files"][str(path)], {"bytes": path.stat().st_size}
                log_data(mlflow, path.name, split, digest, path, sizes)
        if profile is not None:
            tags = {name.replace("/", " "): f"{value:.3f}" for name, value in gains.items()}
            register(stage, mlflow, load_selector(config.folder / "selector"), config.folder / "selector", tags)
        describe(mlflow, "\n".join(words), gains)
    console.print("\n".join(words), soft_wrap=True)
    stage.finish()


def _is_dense(logs: Logs, labeller: Labeller) -> bool:
    """Whether it is known at every position what would have been accepted, so that every policy can be replayed."""
    survivals = [text.of(labeller.drafter) for text in logs.all]
    return not labeller.space.depth or all(own.shape[1] > 0 and not np.isnan(own).any() for own in survivals)


def _read(config: Config) -> tuple[Logs, Labeller]:
    if not config.logs.files:
        raise InputError("logs.files: name at least one log: espalier logs FILES.. --timings FILE")
    for path in [*config.logs.files, *config.logs.test]:
        if path.exists() and not (path.is_file() or path.is_dir()):  # it would be empty once it is read
            raise InputError(f"{path}: a pipe, no file: write the log to a file first")
    sampling = config.sampling[0].build()
    logs = read_all(config.logs.files, config.logs.test, sampling)
    drafter = drafter_of(logs.all, config.logs.drafter)
    logs = logs.of(drafter)
    space = ActionSpace.chains(max(text.of(drafter).shape[1] for text in logs.all), LONGEST_LOOKUP)
    return logs, Labeller(drafter, space, sampling)


def _depends(config: Config) -> dict[str, Any]:
    files = filter(None, [*config.logs.files, *config.logs.test, config.latency.timings])
    manifests = {path: path / "manifest.json" for path in files}
    return {
        "scalars": LOG.fingerprint,
        "files": {str(path): sha256(own if own.exists() else path) for path, own in manifests.items()},
        "logs": config.logs.model_dump(mode="json"),
        "train": config.train.model_dump(mode="json"),
        "shares": [config.prompts.validation, config.prompts.test],
        "sampling": config.sampling[0].model_dump(mode="json"),
        "stepped": config.latency.stepped,
        "seed": config.seed,
    }


def _profile(config: Config, drafter: str) -> tuple[LatencyProfile | None, str]:
    """The engine's profile, if there are step times, and what it misses of them."""
    if (path := config.latency.timings) is None:
        return None, ""
    rows, drafts = read_timings(path), drafter != NO_DRAFTER
    profile = profile_of(rows, str(path), config.latency.stepped, f"log:{drafter}", (VERIFIER,), drafts)
    return profile, misfit(rows if drafts else rows[rows["passes"] == 0], profile)


def _evaluated(
    config: Config,
    splits: dict[str, list[LoggedText]],
    labeller: Labeller,
    dense: bool,
    profile: LatencyProfile | None,
    run_id: str,
) -> Evaluation:
    data: dict[str, Texts] = {}
    for name in watched(SPLITS, "features"):  # training texts first: the others' features need their statistics
        if name == "train":
            labeller, data[name] = labeller.learn_from(splits[name])
        else:
            data[name] = labeller.label(splits[name])
    found: dict[str, Any] = {
        "drafter": labeller.drafter,
        "texts": {name: len(own) for name, own in data.items()},
        "roots": {name: int(own.size_X.sum()) for name, own in data.items()},
        "dense": dense,
        "levels": list(LEVELS)[: 1 if labeller.drafter == NO_DRAFTER else 2],  # without a drafter there are no hits
        "accepted": {  # of the drafter's longest chain, by the number of its tokens
            name: own.survivals[VERIFIER].float().nanmean(0).cumsum(0).tolist() for name, own in data.items()
        },
        "by_batch": [],
        "exported": profile is not None,
    }
    table = Table([])
    if profile is None or profile.batches is None:
        return Evaluation({"logs": found}, table)
    on = {batch: profile.at_batch(batch) for batch in profile.batches.sizes}
    timed = {name: Timed(texts, VERIFIER, profile) for name, texts in data.items()}
    module = _trained(config, timed, list(on.values()) if dense else [], run_id)
    predicted = {name: {level: module.scores(data[name], level) for level in LEVELS} for name in SPLITS[1:]}
    tuned: dict[int, BatchModes] = {}
    modes: list[Mode] = []
    for batch, times in watched(on.items(), "tuning, by batch size"):
        train, validation = (timed[name].on(times) for name in SPLITS[:2])
        if dense:
            tuned[batch] = tune_batch(train, validation, predicted["validation"], profile, batch)
        modes += tuned[batch].selector.values() if dense else untuned(module, train, batch)
    few = data["test"].take(torch.arange(len(data["test"]))[:COMPARED])
    facts: dict[str, Any] = {
        "pair": {"target": "of the log", "draft": labeller.drafter, "fingerprint": profile.pair},
        "run_id": run_id,
        "metrics": {"evaluation": None},
        "provenance": provenance(config),
    }
    own = config.folder / "selector", module, VERIFIER, profile, [mode.row() for mode in modes], facts
    selector = package(*own, lambda mode: Timed(few, VERIFIER, on[mode.batch]), labeller.tokens)
    found["decision_seconds"] = _decision_seconds(selector, splits["test"], labeller.sampling, list(on))
    for batch, each in watched(tuned.items(), "replay, by batch size"):
        train, test = (timed[name].on(on[batch]) for name in ("train", "test"))
        taken = {level: found["decision_seconds"][level][str(batch)] for level in LEVELS}
        shown = each._replace(selector={level: each.selector[level] for level in found["levels"]})
        own_table = Table(measured(shown, train, test, predicted["test"], profile, taken))
        found["by_batch"] += entries(own_table, shown)
        table = Table([*table.figures, *own_table.figures])
    return Evaluation({"logs": found}, table)


def _trained(config: Config, timed: dict[str, Timed], times: list[LatencyProfile], run_id: str) -> SelectorModule:
    """The network of the best epoch, by replay of the validation texts for the smallest and the middle batch size;
    without `times`, by the loss."""
    data = {name: each.texts for name, each in timed.items()}
    space = data["train"].space.to_json()
    module = module_of(config, "regressor", LOG.levels[1], [], schema=LOG.name, space=space, squared_weight=SQUARED)
    own = [timed["validation"].on(times[at]) for at in sorted({0, len(times) // 2}) if times]
    statics = [(each, best_static(each, StaticTable.of(each))) for each in own]
    judged = [(each, monitored(static, (level,))) for each, static in statics for level in LOG.levels]
    with atomically(config.folder / "training") as folder:
        return fitted(config, module, data, VERIFIER, judged, folder, run_id)


def _decision_seconds(
    selector: Selector, texts: list[LoggedText], sampling: Sampling, batches: Sequence[int]
) -> dict[str, Any]:
    """Median seconds by level and batch size that the decisions of all requests of a step take together, features
    included, one process after another; the requests have contexts of `CONTEXT` tokens and one new token each."""
    most = max(TIMED_DECISIONS, 5 * max(batches))
    tokens = np.resize(np.concatenate([text.tokens for text in texts]), CONTEXT + most).tolist()
    found: dict[str, Any] = {"context": CONTEXT, **{level: {} for level in LEVELS}}
    setting = {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "min_p")}
    for level, batch in product(LEVELS, batches):
        known = DrafterKnowledge(tokens[:CONTEXT], sampling, selector.tokens)
        asked, taken = selector.at(**setting, level=level, batch=batch), []
        for begin in range(CONTEXT, CONTEXT + max(TIMED_DECISIONS, 5 * batch), batch):
            start, features = time.perf_counter(), []
            for token in tokens[begin : begin + batch]:  # the requests' texts are one text, one token longer each time
                known.committed([token], [1.0])
                features.append(known.features(level))
            asked.select_jointly(features) if batch > 1 else asked.select(features[0])
            taken.append(time.perf_counter() - start)
        found[level][str(batch)] = float(np.median(taken))
    return found


def page(config: Config, evaluation: Evaluation, words: list[str]) -> None:
    table = evaluation.table
    write_page(
        config.folder / "report.html",
        "logs.j2",
        title=f"{config.name}: what a selector gains on logs of {evaluation.found['logs']['drafter']}",
        lead=words,
        methods={setting: list(_methods(table, setting)) for setting in table.settings},
        provenance=json.dumps(provenance(config), indent=1),
    )


def _in_words(config: Config, evaluation: Evaluation) -> Iterator[str]:
    logs, table = evaluation.found["logs"], evaluation.table
    texts, roots, accepted = (logs[key] for key in ("texts", "roots", "accepted"))
    yield f"{logs['drafter']}: {sum(texts.values())} texts, {texts['test']} held out, {roots['test']:,} positions."
    if not logs["dense"]:
        yield "The log holds only what its own steps drafted: no other policy can be replayed on it."
    if depth := len(accepted["test"]):
        means = f"{accepted['train'][-1]:.2f} tokens on average on training texts, {accepted['test'][-1]:.2f} on others"
        yield f"Accepted of a chain of {depth}: {means}."
    for setting, level in product(table.settings, logs["levels"]):
        own, words = selector_at(level), LEVELS[level]
        over = {rival: table.of(setting, own, replayed(rival)).text(3) for rival in (PLAIN, COPYING, FIXED)}
        gains = f"{over[COPYING]} of the lookup rule, {over[FIXED]} of the best fixed length"
        yield f"{setting}, {words}: {over[PLAIN]} times plain decoding, {gains}."
        yield f"  with its decisions {table.of(setting, own + CHARGED, replayed(COPYING)).text(3)} of the rule"
        if figure := table.get(setting, own + ONE_LENGTH, replayed(FIXED)):
            yield f"  with one length for all requests {figure.text(3)} of the fixed one"
    if not logs["exported"]:
        yield TIMELESS if logs["dense"] or config.logs.force else UNMEASURED
    else:
        found = logs["decision_seconds"]
        for level in logs["levels"]:
            times = ", ".join(f"{1e3 * seconds:.2f} ms at {batch}" for batch, seconds in found[level].items())
            words = LEVELS[level]
            yield f"All decisions of a step, {words}, features at {found['context']:,} tokens included: {times}."
    yield f"Written to {config.folder}: report.html, evaluation.json{', selector/' if logs['exported'] else ''}."


def metrics(table: Table) -> dict[str, float]:
    """For MLflow: the speed of every selector over the lookup rule and the best fixed length by setting."""
    measures = replayed(COPYING), replayed(FIXED)
    own = [each for each in table.figures if each.kind == ALL and each.method.startswith(SELECTOR)]
    names = {f"test/{each.setting}/{each.method}/{each.measure}": each for each in own if each.measure in measures}
    return {re.sub(r"[^\w./ -]", "", name).replace(" ", "_"): each.value for name, each in names.items()}


def _methods(table: Table, setting: str) -> Iterator[dict[str, str]]:
    methods = table.methods(setting, replayed(PLAIN))
    for method in methods:
        over = {"over plain decoding": table.get(setting, method, replayed(PLAIN))}
        for level, words in LEVELS.items():
            if (own := selector_at(level)) in methods:
                over[f"selector over it, {words}"] = table.get(setting, own, replayed(method))
        for kind in table.kinds(setting)[1:]:
            over[f"over the {COPYING}, {kind}"] = table.get(setting, method, replayed(COPYING), kind)
        yield {"method": method, **{name: each.text(3) if each else "" for name, each in over.items()}}
