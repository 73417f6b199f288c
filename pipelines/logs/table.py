"""What a selector gains on held-out texts of a log, by batch size, level and kind of work: exact replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from pipelines.logs.judging import Predictions, Tuning
from selector.decision import Mode
from selector.latency import LatencyProfile
from selector.schema import LOG
from selector.train.data import Timed
from selector.train.mixed import MixedBatches, MixedReplay
from selector.train.replay import Ratio, Replayed, fastest_possible, ratio_of_speeds
from selector.train.tuning import decide, replay_mode, sources, static_replay

Figures = dict[str, Any]


@dataclass(frozen=True)
class Measured:
    """Held-out texts, or those of one kind, and what is said of them, for one batch size.

    Attributes:
        timed: with the batch's times.
        profile: with all of them.
    """

    timed: Timed
    predicted: Predictions
    tuning: Tuning
    profile: LatencyProfile

    def of_kind(self, kind: str) -> Measured:
        timed = self.timed
        chosen_X = torch.tensor([x for x, own in enumerate(timed.texts.kind_X) if own == kind])
        rows_R = torch.isin(timed.texts.text_R, chosen_X)
        part = Timed(timed.texts.take(chosen_X), timed.verifier, timed.profile, timed.space)
        return Measured(part, {name: own[rows_R] for name, own in self.predicted.items()}, self.tuning, self.profile)


def entries(test: Timed, predicted: Predictions, tuning: Tuning, profile: LatencyProfile) -> Iterator[Figures]:
    """Of one batch size, one entry for each level and kind of batch: speeds over plain decoding, ratios with their
    errors, and the same for every kind of work."""
    whole = Measured(test.on(profile.at_batch(tuning.batch)), predicted, tuning, profile)
    parts = {kind: whole.of_kind(kind) for kind in sorted(set(test.texts.kind_X))}
    for mixed, measure in ((False, _equal), (True, _mixed)):
        if mixed and tuning.batch == 1:
            continue
        of_all, of_kinds = measure(whole), {kind: measure(part) for kind, part in parts.items()}
        for level in LOG.levels:
            by_kind = {kind: own[level] for kind, own in of_kinds.items()}
            place = {"batch": tuning.batch, "level": level, "mixed": mixed}
            yield {**place, **of_all[level], "by_kind": by_kind}


def _equal(measured: Measured) -> dict[str, Figures]:
    """All requests of a batch take one decision: each text by itself, on the batch's clock. By level."""
    timed, tuning = measured.timed, measured.tuning
    found = {
        "fixed": static_replay(timed, tuning.fixed.action),
        "rule": replay_mode(timed, {}, tuning.rule),
        "oracle": fastest_possible(timed.survivals_RS, timed.seconds(), timed.texts.size_X, timed.space),
    }
    plain = static_replay(timed, timed.space.chain(0)).speed

    def ratio(one: Replayed, other: Replayed) -> Ratio:
        return ratio_of_speeds(one, other, sources(timed.texts))

    own = {level: replay_mode(timed, measured.predicted, tuning.selector[level]) for level in LOG.levels}
    return {level: _figures(plain, {**found, "selector": own[level]}, ratio, tuning) for level in LOG.levels}


def _mixed(measured: Measured) -> dict[str, Figures]:
    """B different requests in flight. The oracle knows all labels and decides as the selector does."""
    timed, tuning = measured.timed, measured.tuning
    batches = MixedBatches(timed, measured.profile, tuning.batch)

    def of(mode: Mode) -> MixedReplay:
        return batches.replay(decide(timed, {}, mode).action_R)

    fixed, rule = of(tuning.fixed), of(tuning.rule)
    labels_RA = timed.space.efficiencies(timed.survivals_RS)
    oracle = batches.select(labels_RA, batches.speed_of(labels_RA, rule.speed))
    plain = of(Mode(*timed.setting, timed.space.chain(0))).speed
    result = {}
    for level in LOG.levels:
        joint = tuning.joint[level]
        selector = batches.select(measured.predicted[level], joint) if joint else rule
        found = {"fixed": fixed, "rule": rule, "oracle": oracle, "selector": selector}
        result[level] = _figures(plain, found, MixedReplay.over, tuning)
    return result


def _figures(plain: float, found: dict[str, Any], ratio: Callable[[Any, Any], Ratio], tuning: Tuning) -> Figures:
    """Speeds over plain decoding, and the selector over its rivals."""
    selector = found["selector"]
    return {
        "fixed_length": tuning.fixed.action.nodes,
        **{name: own.speed / plain for name, own in found.items()},
        "selector_over_rule": asdict(ratio(selector, found["rule"])),
        "selector_over_fixed": asdict(ratio(selector, found["fixed"])),
    }


def rival_rows(rivals: dict[str, Replayed], timed: Timed, predicted: Predictions, tuning: Tuning) -> list[Figures]:
    """The rules of other projects on the same texts: speed over plain decoding, and the selector over each."""
    plain = static_replay(timed, timed.space.chain(0)).speed
    own = {level: replay_mode(timed, predicted, tuning.selector[level]) for level in LOG.levels}
    return [
        {
            "batch": tuning.batch,
            "rule": name,
            "speed": replayed.speed / plain,
            "selector_over_it": {
                level: asdict(ratio_of_speeds(own[level], replayed, sources(timed.texts))) for level in LOG.levels
            },
        }
        for name, replayed in rivals.items()
    ]
