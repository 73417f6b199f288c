"""Stage `logs`: from an engine's logs to a selector, without a model: training, exact replay, artefact, report."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from data_gen.features.root import DrafterKnowledge
from data_gen.texts.log_labels import VERIFIER, Labeller, splits_of
from data_gen.texts.logs import NO_DRAFTER, LoggedText, Logs, drafter_of, read_all
from pipelines.config import Config
from pipelines.latency.timings import misfit, profile_of, read_timings
from pipelines.logs import summary
from pipelines.logs.gains import Figures, entries, rival_rows
from pipelines.run import Stage, console, provenance, watched, write_json
from pipelines.tracking import describe, mlflow_run
from pipelines.train.fitting import fitted, module_of
from pipelines.train.judging import monitored, tune_batch, untuned
from pipelines.train.packaging import package
from selector.actions import ActionSpace
from selector.decision import Mode
from selector.files import atomically
from selector.latency import LatencyProfile
from selector.runtime.selector import Selector
from selector.schema import LOG, InputError, sha256
from selector.train.data import SPLITS, Texts, Timed
from selector.train.module import SelectorModule
from selector.train.tuning import StaticTable, best_static

SECTIONS = ("prompts", "sampling", "data", "latency", "train", "logs")
LONGEST_LOOKUP = 20  # tokens
SQUARED = 0.03  # weight of the squared error; with 1, lookups of 20 tokens would outweigh the drafter's chains
OUTPUTS = ("evaluation.json", "report.html", "report.txt", "training", "selector")  # the last two with step times
TIMED_DECISIONS = 2000
CONTEXT = 8000  # tokens of context at which decisions are timed
COMPARED = 12  # texts on which the artefact must decide as the trained network does


def plan(config: Config) -> list[str]:
    logs, labeller = _read(config)
    return [
        f"{len(logs.all)} texts, {sum(text.roots for text in logs.all):,} positions; {labeller.drafter} of up to "
        f"{labeller.space.depth} tokens, lookups of up to {LONGEST_LOOKUP}",
        *logs.remarks,
        f"train {config.train.epochs} epochs, replay, write {config.folder / 'selector'}",
    ]


def run(config: Config) -> None:
    logs, labeller = _read(config)
    splits = splits_of(logs, config.prompts.validation, config.prompts.test)
    profile, doubt = _profile(config, labeller.drafter)
    outputs = tuple(config.folder / name for name in OUTPUTS[: len(OUTPUTS) if profile else 3])
    stage = Stage("logs", config, _depends(config), outputs)
    for remark in (*logs.remarks, *filter(None, [doubt])):
        stage.say(remark)
    if not stage.begin():
        console.print((config.folder / "report.txt").read_text(), soft_wrap=True)
        return
    with mlflow_run(config, "logs", SECTIONS) as mlflow:
        stage.replace()
        found = _found(config, splits, labeller, profile, mlflow.active_run().info.run_id)
        write_json(config.folder / "evaluation.json", {"logs": found})
        words = summary.write(config, found)
        for path in outputs:
            mlflow.log_artifact(str(path))
        describe(mlflow, words, summary.metrics(found))
    console.print(words, soft_wrap=True)
    stage.finish()


def _read(config: Config) -> tuple[Logs, Labeller]:
    if not config.logs.files:
        raise InputError("logs.files: name at least one log: espalier logs FILES.. --timings FILE")
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


def _found(
    config: Config, splits: dict[str, list[LoggedText]], labeller: Labeller, profile: LatencyProfile | None, run_id: str
) -> Figures:
    data: dict[str, Texts] = {}
    for name in watched(SPLITS, "features"):
        if name == "train":
            labeller, data[name] = labeller.learn_from(splits[name])
        else:
            data[name] = labeller.label(splits[name])
    found: Figures = {
        "drafter": labeller.drafter,
        "texts": {name: len(own) for name, own in data.items()},
        "roots": {name: int(own.size_X.sum()) for name, own in data.items()},
        "dense": not any(bool(texts.survivals[VERIFIER].isnan().any()) for texts in data.values()),
        "accepted": {  # of the drafter's longest chain, by the number of its tokens
            name: own.survivals[VERIFIER].float().nanmean(0).cumsum(0).tolist() for name, own in data.items()
        },
        "by_batch": [],
        "rivals": [],
        "exported": profile is not None,
    }
    if profile is None or profile.batches is None:
        return found
    on = {batch: profile.at_batch(batch) for batch in profile.batches.sizes}
    timed = {name: Timed(texts, VERIFIER, profile) for name, texts in data.items()}
    module = _trained(config, timed, list(on.values()) if found["dense"] else [], run_id)
    modes: list[Mode] = []
    predicted = {name: {level: module.scores(data[name], level) for level in LOG.levels} for name in SPLITS[1:]}
    for batch, times in watched(on.items(), "replay, by batch size"):
        train, validation, test = (timed[name].on(times) for name in SPLITS)
        if not found["dense"]:
            modes += untuned(module, train, batch)
            continue
        chosen = tune_batch(train, validation, predicted["validation"], profile, batch)
        modes += chosen.selector.values()
        found["by_batch"] += entries(chosen, test, predicted["test"], profile)
        found["rivals"] += rival_rows(chosen, train, test, predicted["test"])
    few = data["test"].take(torch.arange(len(data["test"]))[:COMPARED])
    rows = [mode.row() for mode in modes]
    facts: Figures = {
        "pair": {"target": "of the log", "draft": labeller.drafter, "fingerprint": profile.pair},
        "run_id": run_id,
        "metrics": {"evaluation": None},
        "provenance": provenance(config),
    }
    own = config.folder / "selector", module, VERIFIER, profile, rows, facts
    selector = package(*own, lambda mode: Timed(few, VERIFIER, on[mode.batch]), labeller.tokens)
    found["decision_seconds"] = _decision_seconds(selector, splits["test"], labeller)
    return found


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


def _decision_seconds(selector: Selector, texts: list[LoggedText], labeller: Labeller) -> dict[str, float]:
    tokens = np.resize(np.concatenate([text.tokens for text in texts]), CONTEXT + TIMED_DECISIONS).tolist()
    found: dict[str, float] = {"context": CONTEXT}
    sampling = labeller.sampling
    setting = sampling.temperature, sampling.top_p
    for level in LOG.levels:
        known, taken = DrafterKnowledge(tokens[:CONTEXT], labeller.sampling, selector.tokens), []
        asked = selector.at(*setting, level=level, top_k=sampling.top_k, min_p=sampling.min_p)
        for token in tokens[CONTEXT:]:
            begin = time.perf_counter()
            known.committed([token], [1.0])
            asked.select(known.features(level))
            taken.append(time.perf_counter() - begin)
        found[level] = float(np.median(taken))
    return found
