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
from data_gen.texts.logs import LoggedText
from pipelines.config import Config
from pipelines.data.recorded import load_traces, timed
from pipelines.evaluate.gains import (
    BASELINES,
    CHARGED,
    FIXED,
    LEVELS,
    ONE_LENGTH,
    entries,
    measured,
    selector_at,
)
from pipelines.evaluate.methods import COPYING, PLAIN
from pipelines.evaluate.table import ALL, Figure, Table
from pipelines.latency.stage import load_profile
from pipelines.pair.log import LogSource, log_source
from pipelines.run import watched
from pipelines.tracking import metric_name
from pipelines.train.result import Case, build, load_module, load_result
from selector.runtime.selector import Policy, Selector
from selector.train.data import Texts

TIMED_DECISIONS = 200
Columns = dict[str, Any]  # of a table: the setting, and the requests of a step
CONTEXT = 8000  # tokens of context at which decisions are timed


def evaluated(config: Config) -> tuple[dict[str, Any], Table]:
    """What `evaluation.json` holds of a run on a log, and its figures."""
    source = log_source(config)
    data = load_traces(config)
    outcome = _contents(source, data)
    if not outcome["exported"]:
        return {"logs": outcome, "summary": None}, Table([])
    result = load_result(config)
    profile = load_profile(config)
    sampling = config.sampling[0].build()
    module = load_module(config, result)
    with tempfile.TemporaryDirectory() as temporary:
        selector = build(config, Path(temporary) / "selector", data)
    outcome["decision_seconds"] = _decision_seconds(selector, source.splits["test"], sampling)
    if not source.is_dense:
        return {"logs": outcome, "summary": None}, Table([])
    predicted = {level: module.scores(data["test"], level) for level in LEVELS}
    cases_by_batch: dict[int, dict[str, Case]] = {}
    for case in result.best.cases:
        if case.setting.level in outcome["levels"]:
            cases_by_batch.setdefault(case.setting.batch, {})[case.setting.level] = case
    figures: list[Figure] = []
    for batch, cases in watched(cases_by_batch.items(), "replay, by batch size"):
        test = timed(data["test"], sampling, VERIFIER, profile, batch)
        seconds = {level: outcome["decision_seconds"][level][str(batch)] for level in cases}
        batch_figures = list(measured(cases, test, predicted, profile, seconds))
        outcome["by_batch"] += entries(Table(batch_figures), cases)
        figures += batch_figures
    return {"logs": outcome, "summary": None}, Table(figures)


def _contents(source: LogSource, data: dict[str, Texts]) -> dict[str, Any]:
    """What a log holds, before anything is replayed."""
    levels = list(LEVELS)
    if not source.drafts:
        levels = levels[:1]  # without a drafter there are no hits
    accepted = {}
    for name, texts in data.items():
        mean_S = texts.survivals[VERIFIER].float().nanmean(0)
        accepted[name] = mean_S.cumsum(0).tolist()
    return {
        "drafter": source.drafter,
        "texts": {name: len(texts) for name, texts in data.items()},
        "roots": {name: int(texts.size_X.sum()) for name, texts in data.items()},
        "dense": source.is_dense,
        "levels": levels,
        # of the drafter's longest chain, by the number of its tokens
        "accepted": accepted,
        "by_batch": [],
        "exported": not source.why_untrained,
        "why": source.why_untrained,
    }


def _decision_seconds(
    selector: Selector, texts: list[LoggedText], sampling: Sampling
) -> dict[str, Any]:
    """Median seconds by level and batch size that the decisions of all requests of a step take
    together, features included, one process after another; the requests have contexts of `CONTEXT`
    tokens and one new token each."""
    steps = {
        setting.batch: max(TIMED_DECISIONS, 5 * setting.batch) for setting in selector.settings
    }
    text_tokens = np.concatenate([text.tokens for text in texts])
    tokens = np.resize(text_tokens, CONTEXT + 2 * max(steps.values())).tolist()
    seconds: dict[str, Any] = {"context": CONTEXT}
    for level in LEVELS:
        seconds[level] = {}
    for setting in selector.settings:
        knowledge = DrafterKnowledge(tokens[:CONTEXT], sampling, selector.tokens)
        policy = Policy(setting, selector)
        step_seconds = []
        for begin in range(CONTEXT, CONTEXT + steps[setting.batch], setting.batch):
            start = time.perf_counter()
            features = []
            # their texts are one, a token longer each time
            for token in tokens[begin : begin + setting.batch]:
                knowledge.committed([token], [1.0])
                features.append(knowledge.features(setting.level))
            if setting.batch > 1:
                policy.select_jointly(features)
            else:
                policy.select(features[0])
            step_seconds.append(time.perf_counter() - start)
        seconds[setting.level][str(setting.batch)] = float(np.median(step_seconds))
    return seconds


def in_words(logs: dict[str, Any], table: Table) -> Iterator[str]:
    texts = logs["texts"]
    yield (
        f"{logs['drafter']}: {sum(texts.values())} texts, {texts['test']} held out, "
        f"{logs['roots']['test']:,} positions."
    )
    if not logs["dense"]:
        yield (
            "The log holds only what its own steps drafted: no other policy can be replayed on it."
        )
    depth = len(logs["accepted"]["test"])
    if depth:
        training = _mean_accepted(logs, "train")
        others = _mean_accepted(logs, "test")
        yield (
            f"Accepted of a chain of {depth}: {training} tokens on average on training texts, "
            f"{others} on others."
        )
    for columns, level in product(tuned_columns(table), logs["levels"]):
        yield from _gains_in_words(table, columns, level)
    if logs["exported"]:
        for level in logs["levels"]:
            yield _seconds_in_words(logs["decision_seconds"], level)
    if logs["why"]:
        yield logs["why"]


def _mean_accepted(logs: dict[str, Any], split: str) -> str:
    """How many tokens of the longest chain are accepted."""
    return f"{logs['accepted'][split][-1]:.2f}".replace("nan", "unknown")


def _gains_in_words(table: Table, columns: Columns, level: str) -> Iterator[str]:
    selector_name = selector_at(level)
    speeds = {}
    for rival in (PLAIN, COPYING, FIXED):
        speeds[rival] = table.of(**columns, method=selector_name, rival=rival).text(3)
    yield (
        f"{requests_in_words(columns)}, {LEVELS[level]}: {speeds[PLAIN]} times plain decoding, "
        f"{speeds[COPYING]} of the lookup rule, {speeds[FIXED]} of the best fixed length."
    )
    charged = table.of(**columns, method=selector_name + CHARGED, rival=COPYING)
    yield f"  with its decisions {charged.text(3)} of the rule"
    one_length = table.get(**columns, method=selector_name + ONE_LENGTH, rival=FIXED)
    if one_length:
        yield f"  with one length for all requests {one_length.text(3)} of the fixed one"


def _seconds_in_words(latencies: dict[str, Any], level: str) -> str:
    times = [f"{1e3 * seconds:.2f} ms at {batch}" for batch, seconds in latencies[level].items()]
    return (
        f"All decisions of a step, {LEVELS[level]}, features at {latencies['context']:,} "
        f"tokens included: {', '.join(times)}."
    )


def tuned_columns(table: Table) -> list[Columns]:
    """The settings that rules and networks are tuned for: one request, or several with different
    texts."""
    tuned = {}
    for figure in table.figures:
        if figure.batch == 1 or figure.is_mixed:
            columns = {name: getattr(figure, name) for name in ("setting", "batch", "is_mixed")}
            tuned[requests_in_words(columns)] = columns
    return list(tuned.values())


def requests_in_words(columns: Columns) -> str:
    if columns["is_mixed"]:
        return f"{columns['setting']}, {columns['batch']} different requests"
    return f"{columns['setting']}, batch {columns['batch']}"


def metrics(table: Table) -> dict[str, float]:
    """For MLflow: the speed of every selector over the lookup rule and the best fixed length by
    setting."""
    speeds: dict[str, float] = {}
    for columns, rival in product(tuned_columns(table), (COPYING, FIXED)):
        for figure in table.select(**columns, kind=ALL, rival=rival):
            if figure.method not in BASELINES:
                name = f"test/{requests_in_words(columns)}/{figure.method}/{figure.label}"
                speeds[metric_name(name)] = figure.value
    return speeds


def methods(table: Table) -> dict[str, list[dict[str, str]]]:
    """For the report: by setting every method, the fastest first, its speed over plain decoding and
    the lookup rule, and the selectors' over it."""
    rows_by_sampling = {}
    for columns in tuned_columns(table):
        plain = table.select(**columns, kind=ALL, rival=PLAIN)
        plain.sort(key=lambda figure: -figure.value)
        rows = [_cells(table, columns, figure) for figure in plain]
        rows_by_sampling[requests_in_words(columns)] = rows
    return rows_by_sampling


def _cells(table: Table, columns: Columns, over_plain: Figure) -> dict[str, str]:
    method = over_plain.method
    shown: dict[str, Figure | None] = {"over plain decoding": over_plain}
    for level, words in LEVELS.items():
        selector_name = selector_at(level)
        if table.get(**columns, method=selector_name, rival=PLAIN):
            over_it = table.get(**columns, method=selector_name, rival=method)
            shown[f"selector over it, {words}"] = over_it
    for kind in table.kinds(**columns)[1:]:
        over_rule = table.get(**columns, kind=kind, method=method, rival=COPYING)
        shown[f"over the {COPYING}, {kind}"] = over_rule
    cells = {"method": method}
    for name, figure in shown.items():
        cells[name] = figure.text(3) if figure else ""
    return cells
