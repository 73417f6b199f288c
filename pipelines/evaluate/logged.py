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
from pipelines.pair.log import LogSource, log_source
from pipelines.run import watched
from pipelines.tracking import metric_name
from pipelines.train.result import build, chosen_of, load_module, load_result
from selector.runtime.selector import Selector, Tuned
from selector.train.data import Texts

TIMED_DECISIONS = 200
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
    rows = chosen_of(result)["modes"]
    with tempfile.TemporaryDirectory() as temporary:
        selector = build(config, Path(temporary) / "selector", data)
    outcome["decision_seconds"] = _decision_seconds(selector, source.splits["test"], sampling)
    predicted = {level: module.scores(data["test"], level) for level in LEVELS}
    figures: list[Figure] = []
    tuned = BatchModes.by_batch(rows) if source.is_dense else {}
    for batch, modes in watched(tuned.items(), "replay, by batch size"):
        test = timed(data["test"], sampling, VERIFIER, profile, batch)
        taken = {level: outcome["decision_seconds"][level][str(batch)] for level in LEVELS}
        selector_modes = {level: modes.selector[level] for level in outcome["levels"]}
        compared_modes = modes._replace(selector=selector_modes)
        batch_figures = list(measured(compared_modes, test, predicted, profile, taken))
        outcome["by_batch"] += entries(Table(batch_figures), compared_modes)
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
    steps = {mode.batch: max(TIMED_DECISIONS, 5 * mode.batch) for mode in selector.modes}
    text_tokens = np.concatenate([text.tokens for text in texts])
    tokens = np.resize(text_tokens, CONTEXT + 2 * max(steps.values())).tolist()
    seconds: dict[str, Any] = {"context": CONTEXT}
    for level in LEVELS:
        seconds[level] = {}
    for mode in selector.modes:
        knowledge = DrafterKnowledge(tokens[:CONTEXT], sampling, selector.tokens)
        tuned = Tuned(mode, selector)
        step_seconds = []
        for begin in range(CONTEXT, CONTEXT + steps[mode.batch], mode.batch):
            start = time.perf_counter()
            features = []
            # their texts are one, a token longer each time
            for token in tokens[begin : begin + mode.batch]:
                knowledge.committed([token], [1.0])
                features.append(knowledge.features(mode.level))
            if mode.batch > 1:
                tuned.select_jointly(features)
            else:
                tuned.select(features[0])
            step_seconds.append(time.perf_counter() - start)
        seconds[mode.level][str(mode.batch)] = float(np.median(step_seconds))
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
    for setting, level in product(settings(table), logs["levels"]):
        yield from _gains_in_words(table, setting, level)
    if logs["exported"]:
        for level in logs["levels"]:
            yield _seconds_in_words(logs["decision_seconds"], level)
    if logs["why"]:
        yield logs["why"]


def _mean_accepted(logs: dict[str, Any], split: str) -> str:
    """How many tokens of the longest chain are accepted."""
    return f"{logs['accepted'][split][-1]:.2f}".replace("nan", "unknown")


def _gains_in_words(table: Table, setting: str, level: str) -> Iterator[str]:
    selector_name = selector_at(level)
    over_plain = table.of(setting, selector_name, replayed(PLAIN)).text(3)
    over_rule = table.of(setting, selector_name, replayed(COPYING)).text(3)
    over_fixed = table.of(setting, selector_name, replayed(FIXED)).text(3)
    yield (
        f"{setting}, {LEVELS[level]}: {over_plain} times plain decoding, {over_rule} of the lookup "
        f"rule, {over_fixed} of the best fixed length."
    )
    charged = table.of(setting, selector_name + CHARGED, replayed(COPYING))
    yield f"  with its decisions {charged.text(3)} of the rule"
    one_length = table.get(setting, selector_name + ONE_LENGTH, replayed(FIXED))
    if one_length:
        yield f"  with one length for all requests {one_length.text(3)} of the fixed one"


def _seconds_in_words(latencies: dict[str, Any], level: str) -> str:
    times = [f"{1e3 * seconds:.2f} ms at {batch}" for batch, seconds in latencies[level].items()]
    return (
        f"All decisions of a step, {LEVELS[level]}, features at {latencies['context']:,} "
        f"tokens included: {', '.join(times)}."
    )


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
    measures = replayed(COPYING), replayed(FIXED)
    tuned_settings = settings(table)
    speeds: dict[str, float] = {}
    for figure in table.figures:
        if (
            figure.setting in tuned_settings
            and figure.kind == ALL
            and figure.method.startswith(SELECTOR)
            and figure.measure in measures
        ):
            name = f"test/{figure.setting}/{figure.method}/{figure.measure}"
            speeds[metric_name(name)] = figure.value
    return speeds


def methods(table: Table, setting: str) -> Iterator[dict[str, str]]:
    """For the report: by method its speed over plain decoding and the lookup rule, and the
    selectors' over it."""
    names = table.methods(setting, replayed(PLAIN))
    for method in names:
        over = {"over plain decoding": table.get(setting, method, replayed(PLAIN))}
        for level, words in LEVELS.items():
            selector_name = selector_at(level)
            if selector_name in names:
                figure = table.get(setting, selector_name, replayed(method))
                over[f"selector over it, {words}"] = figure
        for kind in table.kinds(setting)[1:]:
            figure = table.get(setting, method, replayed(COPYING), kind)
            over[f"over the {COPYING}, {kind}"] = figure
        cells = {"method": method}
        for name, figure in over.items():
            cells[name] = figure.text(3) if figure else ""
        yield cells
