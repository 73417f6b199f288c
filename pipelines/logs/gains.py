"""What a selector gains on the held-out texts of a log, from exact replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import torch

from pipelines.logs.rivals import rivals
from pipelines.train.judging import BatchModes
from selector.actions import EMPTY
from selector.latency import LatencyProfile
from selector.schema import LOG
from selector.train.data import Timed
from selector.train.mixed import MixedBatches, MixedReplay
from selector.train.replay import Ratio, fastest_possible, ratio_of_speeds
from selector.train.tuning import Predictions, decide, replay_mode, static_replay

Figures = dict[str, Any]
Replays = dict[str, Any]  # `Replayed` or `MixedReplay`, by name; the selector's by level
Over = Callable[[Any, Any], Ratio]


def entries(modes: BatchModes, test: Timed, predicted: Predictions, profile: LatencyProfile) -> Iterator[Figures]:
    """One entry of `by_batch` for each level and kind of batch of one batch size."""
    kinds = sorted(set(test.texts.kind_X))
    parts = [(test, predicted), *(_of_kind(test, predicted, kind) for kind in kinds)]
    for mixed in (False, True)[: min(modes.fixed.batch, 2)]:
        found = [_mixed(modes, *part, profile) if mixed else _equal(modes, *part) for part in parts]
        for level in LOG.levels:
            whole, *each = (_figures(modes, level, *replays) for replays in found)
            by_kind = dict(zip(kinds, each, strict=True))
            yield {"batch": modes.fixed.batch, "level": level, "mixed": mixed, **whole, "by_kind": by_kind}


def _of_kind(timed: Timed, predicted: Predictions, kind: str) -> tuple[Timed, Predictions]:
    texts = timed.texts
    chosen_X = torch.tensor([own == kind for own in texts.kind_X])
    of_kind = replace(timed, texts=texts.take(chosen_X.nonzero()[:, 0]))
    return of_kind, {level: own[chosen_X[texts.text_R]] for level, own in predicted.items()}


def _equal(modes: BatchModes, timed: Timed, predicted: Predictions) -> tuple[Replays, Over]:
    return {
        "plain": static_replay(timed, EMPTY),
        "fixed": static_replay(timed, modes.fixed.action),
        "rule": replay_mode(timed, {}, modes.rule),
        "oracle": fastest_possible(timed.survivals_RS, timed.seconds(), timed.texts.size_X, timed.space),
        **{level: replay_mode(timed, predicted, mode) for level, mode in modes.selector.items()},
    }, partial(ratio_of_speeds, source_X=timed.texts.source_number_X)


def _mixed(modes: BatchModes, timed: Timed, predicted: Predictions, profile: LatencyProfile) -> tuple[Replays, Over]:
    batches = MixedBatches(timed, profile, modes.fixed.batch)
    apart = {"plain": replace(modes.fixed, action=EMPTY), "fixed": modes.fixed, "rule": modes.rule}
    found = {name: batches.replay(decide(timed, {}, mode).action_R) for name, mode in apart.items()}
    labels_RA = timed.space.efficiencies(timed.survivals_RS)
    found["oracle"] = batches.select(labels_RA, batches.speed_of(labels_RA, found["rule"].speed))
    for level, mode in modes.selector.items():
        found[level] = batches.select(predicted[level], mode.joint) if mode.joint else found["rule"]
    return found, MixedReplay.over


def _figures(modes: BatchModes, level: str, found: Replays, over: Over) -> Figures:
    speeds = {name: found[name].speed / found["plain"].speed for name in ("fixed", "rule", "oracle", level)}
    return {
        "fixed_length": modes.fixed.action.nodes,
        "rule_lengths": [*(modes.rule.rule or (0, 0)), modes.rule.action.nodes],  # least match, copied, drafted
        "selector": speeds.pop(level),
        **speeds,
        **{f"selector_over_{name}": asdict(over(found[level], found[name])) for name in ("rule", "fixed")},
    }


def rival_rows(modes: BatchModes, train: Timed, test: Timed, predicted: Predictions) -> list[Figures]:
    """Stronger rules, tuned on the training texts: speed over plain decoding, the selector over each."""
    found, over = _equal(modes, test, predicted)
    return [
        {
            "batch": modes.fixed.batch,
            "rule": name,
            "speed": rival.speed / found["plain"].speed,
            "selector_over_it": {level: asdict(over(found[level], rival)) for level in modes.selector},
        }
        for name, rival in rivals(train, test, modes.rule).items()
    ]
