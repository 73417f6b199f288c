"""What a selector gains on the held-out texts of a log, by batch size, level and kind of work, from exact replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from pipelines.logs.labelling import VERIFIER
from pipelines.logs.rivals import rivals
from pipelines.logs.tuned import Tuning
from selector.actions import ActionSpace
from selector.decision import Mode
from selector.latency import LatencyProfile
from selector.schema import LOG
from selector.train.data import Texts, Timed
from selector.train.mixed import MixedBatches, MixedReplay
from selector.train.module import SelectorModule
from selector.train.replay import Ratio, Replayed, fastest_possible, ratio_of_speeds, replay
from selector.train.tuning import Predictions, decide, replay_mode, static_replay

Figures = dict[str, Any]
LENGTH = 8  # tokens of the chain whose predictions are compared with what was accepted


@dataclass(frozen=True)
class HeldOut:
    """Held-out texts, or those of one kind, for one batch size."""

    timed: Timed  # with the times of the batch size
    predicted: Predictions  # at the roots of these texts
    tuning: Tuning
    profile: LatencyProfile  # with all batch sizes

    def of_kind(self, kind: str) -> HeldOut:
        texts = self.timed.texts
        chosen_X = torch.tensor([own == kind for own in texts.kind_X])
        predicted = {name: own[chosen_X[texts.text_R]] for name, own in self.predicted.items()}
        timed = replace(self.timed, texts=texts.take(chosen_X.nonzero()[:, 0]))
        return replace(self, timed=timed, predicted=predicted)

    def ratio(self, mine: Replayed, other: Replayed) -> Ratio:
        return ratio_of_speeds(mine, other, self.timed.texts.source_number_X)

    def by_level(self) -> dict[str, Replayed]:
        """The selector's replays where all requests of a batch share a decision."""
        return {level: replay_mode(self.timed, self.predicted, mode) for level, mode in self.tuning.selector.items()}

    def plain_speed(self) -> float:
        """Tokens per second without drafting."""
        return static_replay(self.timed, self.timed.space.chain(0)).speed


def entries(whole: HeldOut) -> Iterator[Figures]:
    """One entry of `by_batch` for each level and kind of batch of one batch size."""
    batch = whole.tuning.batch
    parts = {kind: whole.of_kind(kind) for kind in sorted(set(whole.timed.texts.kind_X))}
    for mixed, measure in ((False, _equal), (True, _mixed)):
        if mixed and batch == 1:
            continue
        of_all, of_kinds = measure(whole), {kind: measure(part) for kind, part in parts.items()}
        for level in LOG.levels:
            by_kind = {kind: own[level] for kind, own in of_kinds.items()}
            yield {"batch": batch, "level": level, "mixed": mixed, **of_all[level], "by_kind": by_kind}


def _equal(held_out: HeldOut) -> dict[str, Figures]:
    """The figures, by level, where all requests of a batch share a decision: each text is replayed alone."""
    timed, tuning = held_out.timed, held_out.tuning
    others = {
        "fixed": static_replay(timed, tuning.fixed.action),
        "rule": replay_mode(timed, {}, tuning.rule),
        "oracle": fastest_possible(timed.survivals_RS, timed.seconds(), timed.texts.size_X, timed.space),
    }
    plain, by_level = held_out.plain_speed(), held_out.by_level().items()
    return {level: _figures(plain, {**others, "selector": own}, held_out.ratio, tuning) for level, own in by_level}


def _mixed(held_out: HeldOut) -> dict[str, Figures]:
    """The figures, by level, for batches of different requests. The oracle is a selector that predicts the labels."""
    timed, tuning = held_out.timed, held_out.tuning
    batches = MixedBatches(timed, held_out.profile, tuning.batch)

    def of(mode: Mode) -> MixedReplay:
        return batches.replay(decide(timed, {}, mode).action_R)

    fixed, rule = of(tuning.fixed), of(tuning.rule)
    labels_RA = timed.space.efficiencies(timed.survivals_RS)
    oracle = batches.select(labels_RA, batches.speed_of(labels_RA, rule.speed))
    plain = of(Mode(*timed.setting, timed.space.chain(0))).speed
    result = {}
    for level, price in tuning.joint.items():
        selector = batches.select(held_out.predicted[level], price) if price else rule
        found = {"fixed": fixed, "rule": rule, "oracle": oracle, "selector": selector}
        result[level] = _figures(plain, found, MixedReplay.over, tuning)
    return result


def _figures(plain: float, found: dict[str, Any], ratio: Callable[[Any, Any], Ratio], tuning: Tuning) -> Figures:
    """Speeds over plain decoding, and the selector over the lookup rule and the fixed length."""
    return {
        "fixed_length": tuning.fixed.action.nodes,
        "rule_lengths": [*(tuning.rule.rule or (0, 0)), tuning.rule.action.nodes],  # least match, copied, drafted
        **{name: own.speed / plain for name, own in found.items()},
        **{f"selector_over_{name}": asdict(ratio(found["selector"], found[name])) for name in ("rule", "fixed")},
    }


def rival_rows(train: Timed, held_out: HeldOut) -> list[Figures]:
    """Stronger rules, tuned on the training texts: speed over plain decoding, the selector over each."""
    plain, own = held_out.plain_speed(), held_out.by_level()
    found = rivals(train.on(held_out.timed.profile), held_out.timed, held_out.tuning.rule)
    return [
        {
            "batch": held_out.tuning.batch,
            "rule": name,
            "speed": replayed.speed / plain,
            "selector_over_it": {level: asdict(held_out.ratio(mine, replayed)) for level, mine in own.items()},
        }
        for name, replayed in found.items()
    ]


def fixed_lengths(data: dict[str, Texts], space: ActionSpace) -> list[Figures]:
    """For each fixed length, on training and held-out texts: tokens per step, and the share of drafted tokens that was
    accepted."""
    rows: list[Figures] = [{"length": length} for length in range(space.depth + 1)]
    for split in ("train", "test"):
        survivals_RS, size_X = data[split].labels(VERIFIER, slice(None), space), data[split].size_X
        for length, row in enumerate(rows):
            action_R = torch.full((len(survivals_RS),), space.index(space.chain(length)))
            tokens = replay(survivals_RS, action_R, torch.ones(len(action_R)), size_X, space).block_efficiency
            row[split] = {"tokens_per_step": tokens, "accepted": (tokens - 1) / length if length else None}
    return rows


def accepted(module: SelectorModule, texts: Texts, space: ActionSpace) -> Figures:
    """Mean accepted tokens of a chain of `LENGTH` tokens, by the labels and as predicted, at roots with labels."""
    length = min(LENGTH, space.depth)
    labels_RD = texts.survivals[VERIFIER][:, :length].float()
    known_R = ~labels_RD.isnan().any(1)
    predicted_R = module.scores(texts)[:, space.index(space.chain(length))] - 1
    return {
        "length": length,
        "labelled": float(labels_RD[known_R].sum(-1).mean()),
        "predicted": float(predicted_R[known_R].mean()),
    }
