"""What an evaluation on a log finds, without decoding: its figures by batch size, the time of
decisions, and words."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, product
from typing import Any

from data_gen.texts.log_labels import VERIFIER, correction_of, imputed
from pipelines.config import Config
from pipelines.data.recorded import load_traces, timed
from pipelines.evaluate import arrivals
from pipelines.evaluate.gains import (
    BASELINES,
    CHARGED,
    FIXED,
    LEVELS,
    NGRAMS,
    entries,
    measured,
    selector_at,
    widened,
)
from pipelines.evaluate.methods import COPYING, NETWORK, PLAIN, drafts_in_words
from pipelines.evaluate.replays import rank_correlation
from pipelines.evaluate.table import (
    ALL,
    CORRELATION,
    Cells,
    Figure,
    Table,
    correlations_in_words,
    fastest_first,
    text_of,
)
from pipelines.latency.decisions import CONTEXT
from pipelines.latency.stage import load_profile
from pipelines.pair.log import LogSource, log_source
from pipelines.terminal import watched
from pipelines.tracking import metric_name
from pipelines.train.judging import too_few
from pipelines.train.result import CASE, Case, load_module, load_result
from selector import decision
from selector.actions import EMPTY
from selector.latency import LatencyProfile
from selector.schema import MATCH
from selector.train.data import Texts
from selector.train.tuning import SURE

Columns = dict[str, Any]  # of a table: the setting, and the requests of a step


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
    outcome["decision_seconds"] = _decision_seconds(profile)
    predicted = {level: module.scores(data["test"], level) for level in LEVELS}
    cases_by_batch: dict[int, dict[str, Case]] = {}
    for case in result.best.cases:
        if case.setting.level in outcome["levels"]:
            cases_by_batch.setdefault(case.setting.batch, {})[case.setting.level] = case
            outcome["cases"].append(json.loads(CASE.dump_json(case)))
    bounds: list[Texts] = []  # the test texts with the least and the most correction
    correction = correction_of(data["train"])
    if correction is not None:
        for again in (correction.low, correction.high):
            bounds.append(imputed(data["test"], correction, again))
    figures: list[Figure] = []
    for batch, cases in watched(cases_by_batch.items(), "replay, by batch size"):
        test = timed(data["test"], sampling, VERIFIER, profile, batch)
        batch_figures = list(measured(cases, test, predicted, profile))
        others = []
        for texts in bounds:
            bound = timed(texts, sampling, VERIFIER, profile, batch)
            others.append(list(measured(cases, bound, predicted, profile)))
        batch_figures = widened(batch_figures, others)
        outcome["by_batch"] += entries(Table(batch_figures), cases)
        figures += batch_figures
    load = arrivals.load_of(source.logs.arrived, len(data["test"]))
    if load is not None:
        test = timed(data["test"], sampling, VERIFIER, profile)
        served = arrivals.served(load, cases_by_batch, test, predicted, profile)
        outcome["arrivals"] = list(served)
    test = timed(data["test"], sampling, VERIFIER, profile)
    for level in outcome["levels"]:
        value = rank_correlation(predicted[level], test)
        columns: Columns = {"setting": str(sampling), "method": f"{NETWORK}, {LEVELS[level]}"}
        figures.append(Figure(**columns, statistic=CORRELATION, value=value))
    return {"logs": outcome, "summary": None}, Table(figures)


def _contents(source: LogSource, data: dict[str, Texts]) -> dict[str, Any]:
    """What a log holds, before anything is replayed."""
    levels = list(LEVELS)
    if not source.drafts:
        levels = levels[:1]  # without a drafter there are no hits
    correction = correction_of(data["train"])
    accepted = {}
    for name, texts in data.items():
        mean_S = texts.survivals[VERIFIER].float().nanmean(0)
        accepted[name] = mean_S.cumsum(0).tolist()
    return {
        "drafter": source.drafter,
        "texts": {name: len(texts) for name, texts in data.items()},
        "roots": {name: int(texts.size_X.sum()) for name, texts in data.items()},
        # how labels follow from the steps of a log that is not dense
        "steps": None if correction is None else asdict(correction),
        "levels": levels,
        # of the drafter's longest chain, by the number of its tokens
        "accepted": accepted,
        "by_batch": [],
        "arrivals": [],  # what methods are worth where requests come as in the log
        "cases": [],  # what training decided, by batch size and level
        "exported": not source.why_untrained,
        "why": source.why_untrained,
        "doubt": too_few(data["validation"]),
    }


def _decision_seconds(profile: LatencyProfile) -> dict[str, Any]:
    """Seconds of all decisions of a step, by what they see and batch size."""
    seconds: dict[str, Any] = {"context": CONTEXT}
    if profile.batches is None:
        return seconds
    for batch, by_level in zip(profile.batches.sizes, profile.batches.decide, strict=True):
        for level, level_seconds in by_level.items():
            seconds.setdefault(level, {})[str(batch)] = level_seconds
    return seconds


@dataclass(frozen=True)
class Choice:
    """What the selector does for a number of requests with one level of features. Its speeds on
    held-out texts are charged with its decisions."""

    table: Table
    columns: Columns
    case: Case

    def speed(self) -> float:
        """Over plain decoding."""
        return self.over(PLAIN).value

    def over(self, rival: str) -> Figure:
        method = selector_at(self.case.setting.level) + CHARGED
        return self.table.of(**self.columns, method=method, rival=rival)

    @property
    def is_loss(self) -> bool:
        """Whether it is surely slower than plain decoding."""
        over_plain = self.over(PLAIN).ratio
        return over_plain.value + SURE * over_plain.error < 1

    @property
    def advice(self) -> str:
        """What to do, in a few words."""
        setting = self.case.setting
        if setting.decider == decision.STATIC and setting.action == EMPTY:
            return "serve without a drafter, because no draft surely pays"
        if self.is_loss:
            return "serve without a drafter, because drafting is a loss"
        if setting.decider == decision.NETWORK:
            gain = self.over(COPYING + CHARGED).value - 1
            return f"the network ({LEVELS[setting.level]}), {gain:+.1%} over the {COPYING}"
        return drafts_in_words(setting)

    @property
    def line(self) -> str:
        """The advice, and the speed over all that an engine could do instead."""
        case = self.case
        rivals = [
            (COPYING, COPYING + CHARGED, case.rule),
            (NGRAMS, NGRAMS, case.copies or case.rule),
            (FIXED, FIXED, case.static),
        ]
        over_plain = self.over(PLAIN)
        ratios = [f"{over_plain.text(3)} times plain decoding"]
        if not self.is_loss and over_plain.value < 1:
            ratios[0] += " (WARNING: not faster on held-out texts)"
        for name, method, setting in rivals:
            words = drafts_in_words(setting)
            if words != self.advice:
                ratios.append(f"{self.over(method).text(3)} of the {name} ({words})")
            elif method == NGRAMS:  # which take no time to decide
                ratios.append(f"{self.over(method).text(3)} of the {name}")
        return (
            f"{requests_in_words(self.columns)}: {self.advice}. With its decisions, "
            f"{', '.join(ratios)}."
        )


def choices(logs: dict[str, Any], table: Table) -> list[list[Choice]]:
    """For every number of requests, ascending, what the selector does with each level of
    features."""
    cases_by_batch: dict[int, list[Case]] = {}
    for entry in logs["cases"]:
        case = CASE.validate_python(entry)
        cases_by_batch.setdefault(case.setting.batch, []).append(case)
    return [
        [Choice(table, columns, case) for case in cases_by_batch[columns["batch"]]]
        for columns in tuned_columns(table)
    ]


def losses(logs: dict[str, Any], table: Table) -> list[str]:
    """The labels of the settings under which the selector is surely slower than plain decoding."""
    by_batch = choices(logs, table)
    return [c.case.setting.label for of_batch in by_batch for c in of_batch if c.is_loss]


def in_words(logs: dict[str, Any], table: Table) -> Iterator[str]:
    """What to do first, then a line for each batch size, and what it rests on."""
    tuned = [max(levels, key=Choice.speed) for levels in choices(logs, table)]
    if tuned:
        yield f"What to do, by requests in a step: {_by_batch(tuned)}."
    texts = logs["texts"]
    yield (
        f"{logs['drafter']}: {sum(texts.values())} texts, {texts['test']} held out, "
        f"{logs['roots']['test']:,} positions."
    )
    if logs["doubt"]:
        yield f"WARNING: {logs['doubt']}."
    depth = len(logs["accepted"]["test"])
    if logs["steps"]:
        yield from _steps_in_words(logs, depth)
    if depth:
        training = _mean_accepted(logs, "train")
        others = _mean_accepted(logs, "test")
        yield (
            f"Accepted of a chain of {depth}: {training} tokens on average on training texts, "
            f"{others} on others."
        )
    for choice in tuned:
        yield choice.line
    yield from arrivals.in_words(logs["arrivals"])
    yield from correlations_in_words(table)
    if logs["exported"]:
        for level in (MATCH, *logs["levels"]):
            yield _seconds_in_words(logs["decision_seconds"], level)
    if logs["why"]:
        yield logs["why"]


def _by_batch(tuned: Sequence[Choice]) -> str:
    """The advice for each range of batch sizes."""
    parts = []
    for advice, alike in groupby(tuned, key=lambda choice: choice.advice):
        batches = [choice.columns["batch"] for choice in alike]
        requests = str(batches[0])
        if len(tuned) > 1 and batches[-1] == tuned[-1].columns["batch"]:
            requests += " and more"
        elif len(batches) > 1:
            requests += f" to {batches[-1]}"
        parts.append(f"{requests}: {advice}")
    return "; ".join(parts)


def _steps_in_words(logs: dict[str, Any], depth: int) -> Iterator[str]:
    """What follows from a log of steps alone, what does not, and what to change for that."""
    steps = logs["steps"]
    yield (
        "The log holds steps alone, from which follows what other drafts would have had accepted; "
        f"{steps['unknown']:.0%} of the tokens were predicted by no draft, and count as the mean."
    )
    shares = f"{steps['again']:.2f} ({steps['low']:.2f} to {steps['high']:.2f})"
    if steps["is_told"]:
        yield (
            "Of the tokens that a deeper draft missed, a nearer one hits, by steps of several "
            f"lengths, {shares}."
        )
    elif depth > 1:
        yield (
            "How many of the tokens that a deeper draft missed a nearer one hits, this log's "
            f"steps do not tell: {shares} are taken, and the errors hold the difference. To know "
            f"it better, let the engine draft 1 to {max(depth, 3)} tokens in one step of ten."
        )
    if any(entry["fixed_length"] == depth for entry in logs["by_batch"]):
        yield (
            f"The best fixed length is the longest that was drafted, {depth}. Of longer ones the "
            f"log says nothing: let the engine draft {depth + 2} in one step of ten."
        )


def _mean_accepted(logs: dict[str, Any], split: str) -> str:
    """How many tokens of the longest chain are accepted."""
    return f"{logs['accepted'][split][-1]:.2f}".replace("nan", "unknown")


def _seconds_in_words(latencies: dict[str, Any], level: str) -> str:
    times = [f"{1e3 * seconds:.2f} ms at {batch}" for batch, seconds in latencies[level].items()]
    who = f"the {COPYING}" if level == MATCH else f"the network ({LEVELS[level]})"
    return (
        f"All decisions of a step by {who}, features at {latencies['context']:,} tokens included: "
        f"{', '.join(times)}."
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


def methods(table: Table) -> dict[str, list[Cells]]:
    """For the report: by setting every method, the fastest first, its speed over plain decoding and
    the lookup rule, and the selectors' over it."""
    rows_by_sampling = {}
    for columns in tuned_columns(table):
        plain = table.select(**columns, kind=ALL, rival=PLAIN)
        rows = [(figure.value, "", _cells(table, columns, figure)) for figure in plain]
        rows_by_sampling[requests_in_words(columns)] = fastest_first(rows)
    return rows_by_sampling


def _cells(table: Table, columns: Columns, over_plain: Figure) -> Cells:
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
    return {"method": method} | {name: text_of(figure, 3) for name, figure in shown.items()}
