"""What a selector gains on held-out texts of a log over fixed lengths and rules, from exact replay with the same times.

Legend: R roots, X texts, A actions, F features.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from pipelines.train.judging import BatchModes
from selector.actions import EMPTY
from selector.decision import NETWORK, Mode
from selector.latency import LatencyProfile
from selector.schema import LOG, PRECEDENT_LENGTHS
from selector.train.data import Timed
from selector.train.mixed import MixedBatches, MixedReplay
from selector.train.replay import Ratio, Replayed, fastest_possible, ratio_of_speeds, replay
from selector.train.tuning import LEASTS, Predictions, decide, replay_mode, static_replay, tune_lookup_rule

COPIES = (2, 4, 8, 20)  # lengths of copies that are tried together with when to copy
HITS = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, math.inf)  # shares of recent hits
UNIT = 0.5  # tokens of a payoff that count as one of `LEASTS`
PAYOFF_SCALARS = (  # what a predicted payoff is linear in
    *("match", "copied", "copied_mean_0.8", "copied_mean_0.95", "source_steady", "source_in_prompt"),
    *("source_predicted", "second_match", "second_agrees"),
    *(f"{name}_{count}" for name in ("seen", "agree") for count in PRECEDENT_LENGTHS),
)
Figures = dict[str, Any]
Replays = dict[str, Any]  # `Replayed` or `MixedReplay`, by name; the selector's by level
Over = Callable[[Any, Any], Ratio]


def entries(
    modes: BatchModes, test: Timed, predicted: Predictions, profile: LatencyProfile, decisions: dict[str, float]
) -> Iterator[Figures]:
    """One entry of `by_batch` for each level and kind of batch of one batch size; `decisions` are the seconds, by
    level, that those of all requests of a step take together."""
    kinds = sorted(set(test.texts.kind_X))
    parts = [(test, predicted), *(_of_kind(test, predicted, kind) for kind in kinds)]
    for mixed in (False, True)[: min(modes.fixed.batch, 2)]:
        found = [_mixed(modes, *part, profile) if mixed else _equal(modes, *part) for part in parts]
        for level in LOG.levels:
            whole, *each = (_figures(modes, level, decisions[level], *replays) for replays in found)
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
        found[f"{level}, one length"] = batches.select(predicted[level], modes.common[level], common=True)
    return found, MixedReplay.over


def _figures(modes: BatchModes, level: str, decision: float, found: Replays, over: Over) -> Figures:
    one, mode = f"{level}, one length", modes.selector[level]
    decides = mode.decider == NETWORK and (mode.joint > 0 or one not in found)  # else it is the rule
    speeds = {name: found[name].speed / found["plain"].speed for name in ("fixed", "rule", "oracle", level)}
    figures = {
        "fixed_length": modes.fixed.action.nodes,
        "rule_lengths": [*(modes.rule.rule or (0, 0)), modes.rule.action.nodes],  # least match, copied, drafted
        "selector": speeds.pop(level),
        **speeds,
        **{f"selector_over_{name}": asdict(over(found[level], found[name])) for name in ("rule", "fixed")},
        "charged_over_rule": asdict(over(found[level].charged(decision * decides), found["rule"])),
    }
    if one in found:
        figures["one_length_over_fixed"] = asdict(over(found[one].charged(decision), found["fixed"]))
    return figures


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


def rivals(train: Timed, test: Timed, rule: Mode) -> dict[str, Replayed]:
    """The replays of the rules on held-out texts; `rule` is the lookup rule as tuned on the training texts."""
    weights_F = payoff_weights(train)
    own, held_out = (with_payoff(timed, weights_F) for timed in (train, test))
    return {
        "the lookup rule with all options": best_rule(train, rule).replayed(test),
        "HVD": replay_mode(held_out, {}, tune_lookup_rule(own, rule)),
    }


def payoff_weights(train: Timed) -> Tensor:
    """The regression of Hybrid Verified Decoding (HVD, arXiv 2606.01019): copy where a copy's predicted accepted length
    is large. It follows the idea of the abstract, not the paper's predictor: the accepted length is linear in scalars
    of the match, fitted at the training roots with a match. The threshold and both lengths are tuned.

    Returns:
        The weights of a constant 1 and of `PAYOFF_SCALARS`, float64 [F].
    """
    has_R = train.texts.scalar("match") > 0
    own_RF, accepted_R = _payoff_scalars(train)[has_R], train.survivals_RS[has_R, train.space.depth :].sum(1).double()
    ridge_FF = 1e-6 * max(len(own_RF), 1) * torch.eye(own_RF.shape[1], dtype=torch.float64)
    return torch.linalg.solve(own_RF.T @ own_RF + ridge_FF, own_RF.T @ accepted_R)


def with_payoff(timed: Timed, weights_F: Tensor) -> Timed:
    """The texts with the predicted accepted length of a copy, in units of `UNIT`, in the place of the match, so that a
    lookup rule copies by it."""
    texts = timed.texts
    payoff_R = (_payoff_scalars(timed) @ weights_F / UNIT).float()
    scalars_RF = texts.scalars_RF.clone()
    scalars_RF[:, texts.schema.index("match")] = payoff_R.where(texts.scalar("match") > 0, 0.0)
    return replace(timed, texts=replace(texts, scalars_RF=scalars_RF))


def _payoff_scalars(timed: Timed) -> Tensor:
    columns = [timed.texts.scalar(name) for name in PAYOFF_SCALARS]
    return torch.stack([torch.ones_like(columns[0]), *columns], dim=1).double()


@dataclass(frozen=True)
class Rule:
    """A lookup rule with two lengths of copies, by the match, and two of the drafter, by its recent hits."""

    drafted: int
    least: float  # the match from which `copied` tokens are copied
    copied: int
    longer: float = math.inf  # the match from which `far` tokens are copied
    far: int = 1
    hits: float = math.inf  # the share of recent hits above which `steady` tokens are drafted
    steady: int = 0

    def replayed(self, timed: Timed) -> Replayed:
        texts, depth = timed.texts, timed.space.depth
        match_R = texts.scalar("match")
        action_R = torch.where(texts.scalar("hit_mean_0.8") > self.hits, self.steady, self.drafted)
        action_R = torch.where(match_R >= self.least, depth + self.copied, action_R)
        action_R = torch.where(match_R >= self.longer, depth + self.far, action_R)
        return replay(timed.survivals_RS, action_R, timed.seconds_of(action_R), texts.size_X, timed.space)


def best_rule(train: Timed, rule: Mode) -> Rule:
    """The fastest rule that a coordinate search finds, beginning with the tuned lookup rule: it takes the best of each
    grid of changes in turn, until none of them helps."""
    assert rule.rule is not None
    lengths, drafted = train.space.lookups, range(train.space.depth + 1)
    copies = [length for length in COPIES if length in lengths]
    moves: list[dict[str, Any]] = [
        *({"copied": copies, when: LEASTS} for when in ("longer", "least")),
        {"longer": LEASTS, "far": copies},
        *({"hits": HITS, own: drafted} for own in ("steady", "drafted")),
        *({"copied": lengths}, {"far": lengths}, {"drafted": drafted}),
    ]
    speed = cache(lambda tried: tried.replayed(train).speed)
    best, before = Rule(rule.action.nodes, *rule.rule, far=rule.rule.length, steady=rule.action.nodes), None
    while best != before:
        before = best
        for values in moves:
            changes = (dict(zip(values, each, strict=True)) for each in product(*values.values()))
            best = max([best, *(replace(best, **change) for change in changes)], key=speed)
    return best
