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

FIXED, ORACLE = "best fixed length", "oracle"
CHARGED, ONE_LENGTH = ", decisions charged", ", one length, decisions charged"  # after a selector
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
        for row, mode in ((row, Mode.of(row)) for row in rows):
            fixed = replace(mode.static_only(), action=Action.of(row["static"]), level="")
            rule = replace(
                fixed, action=Action.of(row["drafted"]), rule=LookupRule(*row["lookup_rule"])
            )
            modes = modes_by_batch.setdefault(mode.batch, cls(fixed, rule, {}, {}))
            modes.selector[mode.level], modes.common[mode.level] = mode, row["common"]
        return modes_by_batch


def place_of(mode: Mode, mixed: bool = False) -> str:
    """The setting of the figures of a mode's batch size."""
    return (
        f"{mode.sampling}, {f'{mode.batch} different requests' if mixed else f'batch {mode.batch}'}"
    )


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
    kinds = sorted(set(test.texts.kind_X))
    parts = {ALL: (test, predicted), **{kind: _of_kind(test, predicted, kind) for kind in kinds}}
    for mixed, (kind, part) in product((False, True)[: min(modes.fixed.batch, 2)], parts.items()):
        replays = _mixed(modes, *part, profile) if mixed else _equal(modes, *part)
        over = partial(ratio_of_speeds, source_X=None if mixed else part[0].texts.source_number_X)
        for level, mode in modes.selector.items():
            name = selector_at(level)
            replays[name + CHARGED] = replays[name].charged(
                taken[level] if mode.decider == NETWORK else 0.0
            )
            if mixed:
                replays[name + ONE_LENGTH] = replays[name + ONE_LENGTH].charged(taken[level])
        yield from compared(place_of(modes.fixed, mixed), replays, over, (PLAIN,), kind)


def entries(table: Table, modes: BatchModes) -> Iterator[dict[str, Any]]:
    """The entries of `by_batch` of one batch size: one for each kind of batch and level."""
    drafted = modes.rule.action.nodes
    lengths = {
        "fixed_length": modes.fixed.action.nodes,
        "rule_lengths": [*(modes.rule.rule or (0, 0)), drafted],
    }
    for setting, level in product(table.settings, modes.selector):
        selector_name = selector_at(level)
        ratios = {
            f"selector_over_{key}": (selector_name, rival)
            for key, rival in (("rule", COPYING), ("fixed", FIXED))
        }
        ratios["charged_over_rule"] = selector_name + CHARGED, COPYING
        ratios["one_length_over_fixed"] = selector_name + ONE_LENGTH, FIXED
        by_kind = {}
        for kind in table.kinds(setting):
            speeds = {"selector": selector_name, "fixed": FIXED, "rule": COPYING, "oracle": ORACLE}
            values = {
                key: table.of(setting, method, replayed(PLAIN), kind).value
                for key, method in speeds.items()
            }
            figures = {
                key: table.get(setting, method, replayed(rival), kind)
                for key, (method, rival) in ratios.items()
            }
            errors = {key: asdict(figure.ratio) for key, figure in figures.items() if figure}
            by_kind[kind] = {**lengths, **values, **errors}
        mixed = setting != place_of(modes.fixed)
        yield {
            "batch": modes.fixed.batch,
            "level": level,
            "mixed": mixed,
            **by_kind.pop(ALL),
            "by_kind": by_kind,
        }


def _of_kind(timed: Timed, predicted: Predictions, kind: str) -> tuple[Timed, Predictions]:
    texts = timed.texts
    chosen_X = torch.tensor([text_kind == kind for text_kind in texts.kind_X])
    of_kind = replace(timed, texts=texts.take(chosen_X.nonzero()[:, 0]))
    return of_kind, {
        level: tokens_RA[chosen_X[texts.text_R]] for level, tokens_RA in predicted.items()
    }


def _equal(modes: BatchModes, timed: Timed, predicted: Predictions) -> Replays:
    return {
        PLAIN: replay_mode(timed, {}, replace(modes.fixed, action=EMPTY)),
        FIXED: replay_mode(timed, {}, modes.fixed),
        COPYING: replay_mode(timed, {}, modes.rule),
        ORACLE: fastest_possible(
            timed.survivals_RS, timed.seconds(), timed.texts.size_X, timed.space
        ),
        **{
            selector_at(level): replay_mode(timed, predicted, mode)
            for level, mode in modes.selector.items()
        },
    }


def _mixed(
    modes: BatchModes, timed: Timed, predicted: Predictions, profile: LatencyProfile
) -> Replays:
    batches = MixedBatches(timed, profile, modes.fixed.batch)
    baselines = {PLAIN: replace(modes.fixed, action=EMPTY), FIXED: modes.fixed, COPYING: modes.rule}
    replays = {
        name: batches.replay(decide(timed, {}, mode).action_R) for name, mode in baselines.items()
    }
    labels_RA = timed.space.efficiencies(timed.survivals_RS)
    replays[ORACLE] = batches.select(labels_RA, batches.speed_of(labels_RA, replays[COPYING].speed))
    for level, mode in modes.selector.items():
        tokens_RA, name = predicted[level], selector_at(level)
        ruled_R = decide(timed, {}, mode.without_network()).action_R
        replays[name] = (
            batches.select(tokens_RA, mode.joint) if mode.joint else batches.replay(ruled_R)
        )
        replays[name + ONE_LENGTH] = batches.select(tokens_RA, modes.common[level], common=True)
    return replays
