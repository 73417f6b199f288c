"""What an evaluation on a log finds, without decoding: its figures by batch size, the time of
decisions, and words."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from data_gen.features.root import DrafterKnowledge
from data_gen.models.sampling import Sampling
from data_gen.texts.log_labels import VERIFIER
from data_gen.texts.logs import NO_DRAFTER, LoggedText
from pipelines.config import Config
from pipelines.data.recorded import load_traces, timed
from pipelines.evaluate.gains import (
    CHARGED,
    FIXED,
    LEVELS,
    ONE_LENGTH,
    BatchModes,
    entries,
    measured,
    selector_at,
)
from pipelines.evaluate.methods import COPYING, PLAIN, SELECTOR
from pipelines.evaluate.table import ALL, Figure, Table, replayed
from pipelines.latency.stage import load_profile
from pipelines.pair.log import log_of, why_untrained
from pipelines.run import watched
from pipelines.tracking import metric_name
from pipelines.train.result import build, chosen_of, load_module, load_result
from selector.runtime.selector import Selector, Tuned

TIMED_DECISIONS = 200
CONTEXT = 8000  # tokens of context at which decisions are timed


def evaluated(config: Config) -> tuple[dict[str, Any], Table]:
    """What `evaluation.json` holds of a run on a log, and its figures."""
    log = log_of(config)
    data = load_traces(config, log.fingerprint)
    outcome: dict[str, Any] = {
        "drafter": log.labeller.drafter,
        "texts": {name: len(texts) for name, texts in data.items()},
        "roots": {name: int(texts.size_X.sum()) for name, texts in data.items()},
        "dense": log.is_dense,
        # without a drafter there are no hits
        "levels": list(LEVELS)[: 1 if log.labeller.drafter == NO_DRAFTER else 2],
        "accepted": {  # of the drafter's longest chain, by the number of its tokens
            name: texts.survivals[VERIFIER].float().nanmean(0).cumsum(0).tolist()
            for name, texts in data.items()
        },
        "by_batch": [],
        "exported": not why_untrained(config),
        "why": why_untrained(config),
    }
    if not outcome["exported"]:
        return {"logs": outcome, "summary": None}, Table([])
    result, profile, sampling = (
        load_result(config),
        load_profile(config),
        config.sampling[0].build(),
    )
    module, rows = load_module(config, result), chosen_of(result)["modes"]
    with tempfile.TemporaryDirectory() as temporary:
        selector = build(config, Path(temporary) / "selector", data)
    outcome["decision_seconds"] = _decision_seconds(selector, log.splits["test"], sampling)
    predicted = {level: module.scores(data["test"], level) for level in LEVELS}
    figures: list[Figure] = []
    tuned = BatchModes.by_batch(rows) if log.is_dense else {}
    for batch, modes in watched(tuned.items(), "replay, by batch size"):
        test = timed(data["test"], sampling, VERIFIER, profile, batch)
        taken = {level: outcome["decision_seconds"][level][str(batch)] for level in LEVELS}
        compared_modes = modes._replace(
            selector={level: modes.selector[level] for level in outcome["levels"]}
        )
        batch_figures = list(measured(compared_modes, test, predicted, profile, taken))
        outcome["by_batch"] += entries(Table(batch_figures), compared_modes)
        figures += batch_figures
    return {"logs": outcome, "summary": None}, Table(figures)


def _decision_seconds(
    selector: Selector, texts: list[LoggedText], sampling: Sampling
) -> dict[str, Any]:
    """Median seconds by level and batch size that the decisions of all requests of a step take
    together, features included, one process after another; the requests have contexts of `CONTEXT`
    tokens and one new token each."""
    steps = {mode.batch: max(TIMED_DECISIONS, 5 * mode.batch) for mode in selector.modes}
    tokens = np.resize(
        np.concatenate([text.tokens for text in texts]), CONTEXT + 2 * max(steps.values())
    ).tolist()
    seconds: dict[str, Any] = {"context": CONTEXT, **{level: {} for level in LEVELS}}
    for mode in selector.modes:
        knowledge = DrafterKnowledge(tokens[:CONTEXT], sampling, selector.tokens)
        tuned, step_seconds = Tuned(mode, selector), []
        for begin in range(CONTEXT, CONTEXT + steps[mode.batch], mode.batch):
            start, features = time.perf_counter(), []
            # their texts are one, a token longer each time
            for token in tokens[begin : begin + mode.batch]:
                knowledge.committed([token], [1.0])
                features.append(knowledge.features(mode.level))
            tuned.select_jointly(features) if mode.batch > 1 else tuned.select(features[0])
            step_seconds.append(time.perf_counter() - start)
        seconds[mode.level][str(mode.batch)] = float(np.median(step_seconds))
    return seconds


def in_words(logs: dict[str, Any], table: Table) -> Iterator[str]:
    texts, roots, accepted = (logs[key] for key in ("texts", "roots", "accepted"))
    yield (
        f"{logs['drafter']}: {sum(texts.values())} texts, {texts['test']} held out, "
        f"{roots['test']:,} positions."
    )
    if not logs["dense"]:
        yield (
            "The log holds only what its own steps drafted: no other policy can be replayed on it."
        )
    if depth := len(accepted["test"]):
        training, others = (
            f"{accepted[name][-1]:.2f}".replace("nan", "unknown") for name in ("train", "test")
        )
        yield (
            f"Accepted of a chain of {depth}: {training} tokens on average on training texts, "
            f"{others} on others."
        )
    for setting, level in product(settings(table), logs["levels"]):
        selector_name, words = selector_at(level), LEVELS[level]
        over = {
            rival: table.of(setting, selector_name, replayed(rival)).text(3)
            for rival in (PLAIN, COPYING, FIXED)
        }
        gains = f"{over[COPYING]} of the lookup rule, {over[FIXED]} of the best fixed length"
        yield f"{setting}, {words}: {over[PLAIN]} times plain decoding, {gains}."
        yield (
            "  with its decisions "
            f"{table.of(setting, selector_name + CHARGED, replayed(COPYING)).text(3)} of the rule"
        )
        if figure := table.get(setting, selector_name + ONE_LENGTH, replayed(FIXED)):
            yield f"  with one length for all requests {figure.text(3)} of the fixed one"
    for level in logs["levels"] if logs["exported"] else ():
        latencies = logs["decision_seconds"]
        times = ", ".join(
            f"{1e3 * seconds:.2f} ms at {batch}" for batch, seconds in latencies[level].items()
        )
        yield (
            f"All decisions of a step, {LEVELS[level]}, features at {latencies['context']:,} "
            f"tokens included: {times}."
        )
    if logs["why"]:
        yield logs["why"]


def settings(table: Table) -> list[str]:
    """Those that rules and networks are tuned for: one request, or several with different texts."""
    # as of `place_of`
    return [
        setting
        for setting in table.settings
        if setting.endswith((", batch 1", " different requests"))
    ]


def metrics(table: Table) -> dict[str, float]:
    """For MLflow: the speed of every selector over the lookup rule and the best fixed length by
    setting."""
    measures, tuned_settings = (replayed(COPYING), replayed(FIXED)), settings(table)
    speeds = [
        figure
        for figure in table.figures
        if figure.setting in tuned_settings
        and figure.kind == ALL
        and figure.method.startswith(SELECTOR)
    ]
    speed_by_name = {
        f"test/{speed.setting}/{speed.method}/{speed.measure}": speed
        for speed in speeds
        if speed.measure in measures
    }
    return {metric_name(name): speed.value for name, speed in speed_by_name.items()}


def methods(table: Table, setting: str) -> Iterator[dict[str, str]]:
    """For the report: by method its speed over plain decoding and the lookup rule, and the
    selectors' over it."""
    names = table.methods(setting, replayed(PLAIN))
    for method in names:
        over = {"over plain decoding": table.get(setting, method, replayed(PLAIN))}
        for level, words in LEVELS.items():
            if (selector_name := selector_at(level)) in names:
                over[f"selector over it, {words}"] = table.get(
                    setting, selector_name, replayed(method)
                )
        for kind in table.kinds(setting)[1:]:
            over[f"over the {COPYING}, {kind}"] = table.get(
                setting, method, replayed(COPYING), kind
            )
        yield {
            "method": method,
            **{name: figure.text(3) if figure else "" for name, figure in over.items()},
        }
