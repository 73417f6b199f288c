"""What a selector gains on held-out texts of a log over fixed lengths and rules, from exact replay
with the same times.

Legend: R roots, X texts, A actions.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch

from pipelines.evaluate.methods import COPYING, PLAIN, SELECTOR
from pipelines.evaluate.table import ALL, Figure, Table, compared, replayed
from selector.actions import EMPTY, Action
from selector.decision import NETWORK, LookupRule, Mode
from selector.latency import LatencyProfile
from selector.schema import DRAFTER, TEXT
from selector.train.data import Timed
from selector.train.mixed import MixedBatches
from selector.train.replay import Replayed, fastest_possible, ratio_of_speeds
from selector.train.tuning import Predictions, decide, replay_mode

FIXED = "best fixed length"
ORACLE = "oracle"
# after a selector's name
CHARGED = ", decisions charged"
ONE_LENGTH = ", one length, decisions charged"
LEVELS = {TEXT: "token ids alone", DRAFTER: "with the drafter's hits"}
Replays = dict[str, Replayed]  # by method


class BatchModes(NamedTuple):
    """What is compared for one batch size: the best fixed length, the lookup rule, and by level
    what is exported and the price of time, in tokens per second, where one length serves all
    requests of a step."""

    fixed: Mode
    rule: Mode
    selector: dict[str, Mode]
    common: dict[str, float]

    @classmethod
    def by_batch(cls, rows: list[dict[str, Any]]) -> dict[int, BatchModes]:
        """From the modes that training found."""
        modes_by_batch: dict[int, BatchModes] = {}
        for row in rows:
            mode = Mode.of(row)
            fixed = replace(mode.static_only(), action=Action.of(row["static"]), level="")
            rule = replace(
                fixed, action=Action.of(row["drafted"]), rule=LookupRule(*row["lookup_rule"])
            )
            modes = modes_by_batch.setdefault(mode.batch, cls(fixed, rule, {}, {}))
            modes.selector[mode.level] = mode
            modes.common[mode.level] = row["common"]
        return modes_by_batch


def place_of(mode: Mode, mixed: bool = False) -> str:
    """The setting of the figures of a mode's batch size."""
    if mixed:
        return f"{mode.sampling}, {mode.batch} different requests"
    return f"{mode.sampling}, batch {mode.batch}"


def selector_at(level: str) -> str:
    """The method of a selector with one feature level."""
    return f"{SELECTOR}, {LEVELS[level]}"


def measured(
    modes: BatchModes,
    test: Timed,
    predicted: Predictions,
    profile: LatencyProfile,
    taken: dict[str, float],
) -> Iterator[Figure]:
    """The figures of one batch size, over all kinds of work and for each; `predicted` are the
    network's predictions on the held-out texts `test`, and `taken` the seconds of the decisions of
    all requests of a step, both by level."""
    parts = {ALL: (test, predicted)}
    for kind in sorted(set(test.texts.kind_X)):
        parts[kind] = _of_kind(test, predicted, kind)
    mixtures = [False]
    if modes.fixed.batch > 1:
        mixtures.append(True)
    for mixed, kind in product(mixtures, parts):
        timed, predictions = parts[kind]
        if mixed:
            replays = _mixed(modes, timed, predictions, profile)
            over = partial(ratio_of_speeds, source_X=None)
        else:
            replays = _equal(modes, timed, predictions)
            over = partial(ratio_of_speeds, source_X=timed.texts.source_number_X)
        for level, mode in modes.selector.items():
            name = selector_at(level)
            seconds = taken[level] if mode.decider == NETWORK else 0.0
            replays[name + CHARGED] = replays[name].charged(seconds)
            if mixed:
                replays[name + ONE_LENGTH] = replays[name + ONE_LENGTH].charged(taken[level])
        yield from compared(place_of(modes.fixed, mixed), replays, over, (PLAIN,), kind)


def entries(table: Table, modes: BatchModes) -> Iterator[dict[str, Any]]:
    """The entries of `by_batch` of one batch size: one for each kind of batch and level."""
    lookup_rule = modes.rule.rule or (0, 0)
    lengths = {
        "fixed_length": modes.fixed.action.nodes,
        "rule_lengths": [*lookup_rule, modes.rule.action.nodes],
    }
    for setting, level in product(table.settings, modes.selector):
        by_kind = {
            kind: lengths | _gains(table, setting, level, kind) for kind in table.kinds(setting)
        }
        yield {
            "batch": modes.fixed.batch,
            "level": level,
            "mixed": setting != place_of(modes.fixed),
            **by_kind.pop(ALL),
            "by_kind": by_kind,
        }


def _gains(table: Table, setting: str, level: str, kind: str) -> dict[str, Any]:
    """Speeds over plain decoding, and with their errors the selector's over its rivals; of these
    only what was measured."""
    selector_name = selector_at(level)
    gains: dict[str, Any] = {}
    speeds = {"selector": selector_name, "fixed": FIXED, "rule": COPYING, "oracle": ORACLE}
    for key, method in speeds.items():
        gains[key] = table.of(setting, method, replayed(PLAIN), kind).value
    ratios = {
        "selector_over_rule": (selector_name, COPYING),
        "selector_over_fixed": (selector_name, FIXED),
        "charged_over_rule": (selector_name + CHARGED, COPYING),
        "one_length_over_fixed": (selector_name + ONE_LENGTH, FIXED),
    }
    for key, (method, rival) in ratios.items():
        figure = table.get(setting, method, replayed(rival), kind)
        if figure:
            gains[key] = asdict(figure.ratio)
    return gains


def _of_kind(timed: Timed, predicted: Predictions, kind: str) -> tuple[Timed, Predictions]:
    texts = timed.texts
    chosen_X = torch.tensor([text_kind == kind for text_kind in texts.kind_X])
    of_kind = replace(timed, texts=texts.take(chosen_X.nonzero()[:, 0]))
    chosen_R = chosen_X[texts.text_R]
    return of_kind, {level: tokens_RA[chosen_R] for level, tokens_RA in predicted.items()}


def _equal(modes: BatchModes, timed: Timed, predicted: Predictions) -> Replays:
    replays = {
        PLAIN: replay_mode(timed, {}, replace(modes.fixed, action=EMPTY)),
        FIXED: replay_mode(timed, {}, modes.fixed),
        COPYING: replay_mode(timed, {}, modes.rule),
        ORACLE: fastest_possible(
            timed.survivals_RS, timed.seconds(), timed.texts.size_X, timed.space
        ),
    }
    for level, mode in modes.selector.items():
        replays[selector_at(level)] = replay_mode(timed, predicted, mode)
    return replays


def _mixed(
    modes: BatchModes, timed: Timed, predicted: Predictions, profile: LatencyProfile
) -> Replays:
    batches = MixedBatches(timed, profile, modes.fixed.batch)
    baselines = {PLAIN: replace(modes.fixed, action=EMPTY), FIXED: modes.fixed, COPYING: modes.rule}
    replays = {}
    for name, mode in baselines.items():
        replays[name] = batches.replay(decide(timed, {}, mode).action_R)
    labels_RA = timed.space.efficiencies(timed.survivals_RS)
    price = batches.speed_of(labels_RA, replays[COPYING].speed)
    replays[ORACLE] = batches.select(labels_RA, price)
    for level, mode in modes.selector.items():
        name = selector_at(level)
        if mode.joint:
            replays[name] = batches.select(predicted[level], mode.joint)
        else:
            ruled_R = decide(timed, {}, mode.without_network()).action_R
            replays[name] = batches.replay(ruled_R)
        one_length = batches.select(predicted[level], modes.common[level], common=True)
        replays[name + ONE_LENGTH] = one_length
    return replays
