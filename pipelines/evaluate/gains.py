"""What a selector gains on held-out texts of a log over fixed lengths and rules, from exact replay
with the same times.

Legend: R roots, X texts, A actions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import product
from typing import Any

import torch

from pipelines.evaluate.methods import COPYING, PLAIN, SELECTOR
from pipelines.evaluate.replays import compared, oracle
from pipelines.evaluate.table import ALL, Figure, Table
from pipelines.train.result import Case
from selector.actions import EMPTY
from selector.decision import Setting
from selector.latency import LatencyProfile
from selector.schema import DRAFTER, TEXT
from selector.train.data import Timed
from selector.train.mixed import MixedBatches
from selector.train.replay import Replayed
from selector.train.tuning import Predictions, decide, replay_setting

FIXED = "best fixed length"
NGRAMS = "engine's own n-grams"
ORACLE = "oracle"
# after the name of what decides
CHARGED = ", decisions charged"
BASELINES = (PLAIN, FIXED, NGRAMS, COPYING, COPYING + CHARGED, ORACLE)
ONE_LENGTH = ", one length, decisions charged"
LEVELS = {TEXT: "token ids alone", DRAFTER: "with the drafter's hits"}
MOST_KINDS = 20  # of work, whose figures are told apart
Cases = Mapping[str, Case]  # by feature level, of one batch size; their baselines are the same
Replays = dict[str, Replayed]  # by method


def selector_at(level: str) -> str:
    """The method of a selector with one feature level."""
    return f"{SELECTOR}, {LEVELS[level]}"


def measured(
    cases: Cases,
    test: Timed,
    predicted: Predictions,
    profile: LatencyProfile,
) -> Iterator[Figure]:
    """The figures of one batch size, over all kinds of work and for each of the `MOST_KINDS` with
    the most texts; `predicted` are the network's predictions on the held-out texts `test`, by
    level. Decisions take no time unless a method's name says that they are charged."""
    decisions = test.profile
    test = test.on(replace(decisions, decide=dict.fromkeys(decisions.decide, 0.0)), test.batch)
    parts = {ALL: (test, predicted)}
    for kind, _ in Counter(test.texts.kind_X).most_common(MOST_KINDS):
        parts[kind] = _of_kind(test, predicted, kind)
    columns = {"setting": str(test.sampling), "batch": test.batch}
    for kind, (timed, predictions) in parts.items():
        replays_of = {False: _alike(cases, timed, predictions)}
        if test.batch > 1:
            replays_of[True] = _mixed(cases, timed, predictions, profile)
        for is_mixed, replays in replays_of.items():
            _charge(replays, cases, decisions)
            selectors = replays.keys() - BASELINES
            source_X = None if is_mixed else timed.texts.source_number_X
            of_batch = {**columns, "kind": kind, "is_mixed": is_mixed}
            yield from compared(replays, [PLAIN], selectors, source_X, **of_batch)


def widened(figures: Sequence[Figure], others: Sequence[Sequence[Figure]]) -> list[Figure]:
    """The figures with errors that are larger by the most that the same figures under other labels
    differ from them."""
    wider = []
    for figure, *under_others in zip(figures, *others, strict=True):
        if figure.low is not None and figure.high is not None:
            distances = [abs(other.value - figure.value) for other in under_others]
            most = max(distances, default=0.0)
            figure = replace(figure, low=figure.low - most, high=figure.high + most)
        wider.append(figure)
    return wider


def entries(table: Table, cases: Cases) -> Iterator[dict[str, Any]]:
    """The entries of `by_batch` of one batch size: one for each kind of batch and level."""
    case = next(iter(cases.values()))
    lengths = {"fixed_length": case.static.action.nodes}
    batch = case.setting.batch
    for is_mixed, level in product(sorted({f.is_mixed for f in table.figures}), cases):
        columns = {"setting": str(case.setting.sampling), "batch": batch, "is_mixed": is_mixed}
        by_kind = {}
        for kind in table.kinds(**columns):
            by_kind[kind] = lengths | _gains(table, level, {**columns, "kind": kind})
        yield {
            "batch": batch,
            "level": level,
            "mixed": is_mixed,
            **by_kind.pop(ALL),
            "by_kind": by_kind,
        }


def _gains(table: Table, level: str, columns: Mapping[str, Any]) -> dict[str, Any]:
    """Speeds over plain decoding, and with their errors the selector's over its rivals; of these
    only what was measured."""
    selector_name = selector_at(level)
    gains: dict[str, Any] = {}
    speeds = {
        "selector": selector_name,
        "charged": selector_name + CHARGED,
        "fixed": FIXED,
        "copies": NGRAMS,
        "rule": COPYING,
        "oracle": ORACLE,
    }
    for key, method in speeds.items():
        gains[key] = table.of(**columns, method=method, rival=PLAIN).value
    ratios = {
        "selector_over_rule": (selector_name, COPYING),
        "selector_over_fixed": (selector_name, FIXED),
        "charged_over_rule": (selector_name + CHARGED, COPYING + CHARGED),
        "one_length_over_fixed": (selector_name + ONE_LENGTH, FIXED),
    }
    for key, (method, rival) in ratios.items():
        figure = table.get(**columns, method=method, rival=rival)
        if figure:
            gains[key] = asdict(figure.ratio)
    return gains


def _of_kind(timed: Timed, predicted: Predictions, kind: str) -> tuple[Timed, Predictions]:
    texts = timed.texts
    chosen_X = torch.tensor([text_kind == kind for text_kind in texts.kind_X])
    of_kind = replace(timed, texts=texts.take(chosen_X.nonzero()[:, 0]))
    chosen_R = chosen_X[texts.text_R]
    return of_kind, {level: tokens_RA[chosen_R] for level, tokens_RA in predicted.items()}


def settings_of(cases: Cases) -> dict[str, Setting]:
    """What the methods of one batch size do, by name: the baselines, which see the same texts
    whatever the level, and the selectors."""
    case = next(iter(cases.values()))
    settings = {
        PLAIN: replace(case.static, action=EMPTY),
        FIXED: case.static,
        NGRAMS: case.copies or case.rule,
        COPYING: case.rule,
    }
    for level, case in cases.items():
        settings[selector_at(level)] = case.setting
    return settings


def _charge(replays: Replays, cases: Cases, decisions: LatencyProfile) -> None:
    """Add what the replays of selectors and of the lookup rule become with the time of their
    decisions, and charge those with one length for all requests of a step, which a network
    chooses. Plain decoding is that of a server without a drafter."""
    replays[PLAIN] = replays[PLAIN].charged(-decisions.presence)
    for level in cases:
        one_length = selector_at(level) + ONE_LENGTH
        if one_length in replays:
            replays[one_length] = replays[one_length].charged(decisions.decision_seconds([level]))
    for name, setting in settings_of(cases).items():
        if name not in (PLAIN, FIXED, NGRAMS):
            seconds = decisions.decision_seconds(setting.asked)
            replays[name + CHARGED] = replays[name].charged(seconds)


def _alike(cases: Cases, timed: Timed, predicted: Predictions) -> Replays:
    """All requests of a step have the same text, and take one decision."""
    replays = {ORACLE: oracle(timed)}
    for name, setting in settings_of(cases).items():
        replays[name] = replay_setting(timed, predicted, setting)
    return replays


def _mixed(cases: Cases, timed: Timed, predicted: Predictions, profile: LatencyProfile) -> Replays:
    """The requests of a step have different texts, and decide jointly."""
    batches = MixedBatches(timed, profile, timed.batch)
    replays = {}
    for name, setting in settings_of(cases).items():
        if setting.joint:
            replays[name] = batches.select(predicted[setting.level], setting.joint)
        else:
            ruled = decide(timed, {}, setting.without_network())
            replays[name] = batches.replay(ruled.action_R)
    labels_RA = timed.space.efficiencies(timed.survivals_RS)
    price = batches.speed_of(labels_RA, replays[COPYING].speed)
    replays[ORACLE] = batches.select(labels_RA, price)
    for level, case in cases.items():
        one_length = batches.select(predicted[level], case.common, common=True)
        replays[selector_at(level) + ONE_LENGTH] = one_length
    return replays
