"""The decision: which action to draft, given the block efficiency and the time of each.

Time has a *price* in tokens per second, and the best action maximises `E - price T`. If each step's
difficulty were independent of the last one's, the right price would be the speed `g` of the whole
text, because a saved second is spent elsewhere. If it never changed, the right price would be the
root's own best ratio `E / T`. Text lies in between, so

    price = g^(1 - rho) (max_a E(a) / T(a))^rho,

and rho is tuned by replay. At rho = 1 the action with the largest ratio E / T is the best.
Tuning, replay and serving decide by `choices`; `selector.export.torchscript` states the same for
engines that run TorchScript.

Legend: B roots, A actions, K actions that may be chosen, T trees.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from selector.actions import Action, ActionSpace, Ranks
from selector.files import Array
from selector.sampling import Sampling
from selector.schema import DRAFTER, FULL, LIGHT, MATCH, InputError

# who decides
STATIC = "static"
RULE = "rule"
NETWORK = "network"
RHOS = (0.0, 0.25, 0.5, 0.75, 1.0)
NEVER = -1e9  # the score, in tokens, of an action that may not be chosen


class LookupRule(NamedTuple):
    """Drafts a lookup of `length` tokens wherever the match has at least `least` tokens, and after
    longer matches one of another length; with `ranks`, in one tree with that shape by rank.

    Attributes:
        longer: least matches, above `least` and ascending, with the length from each of them on.
    """

    least: int
    length: int
    ranks: Ranks = ()
    longer: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, lengths: Sequence[tuple[int, int]], ranks: Ranks = ()) -> LookupRule:
        """The rule with these `lengths`."""
        (least, length), *longer = lengths
        return cls(least, length, ranks, tuple(longer))

    @property
    def lengths(self) -> tuple[tuple[int, int], ...]:
        """Least matches, ascending, with the length from each of them on."""
        return ((self.least, self.length), *self.longer)

    @property
    def lookups(self) -> dict[int, Action]:
        """By least match, ascending, the action from there on."""
        return {least: self._lookup(length) for least, length in self.lengths}

    def after(self, match: float) -> Action | None:
        """The lookup after a match; None after one that is too short."""
        chosen = None
        for least, length in self.lengths:
            if match >= least:
                chosen = length
        return None if chosen is None else self._lookup(chosen)

    def within(self, actions: Collection[Action]) -> LookupRule | None:
        """The rule with those of its lookups that are among some actions; None where none is."""
        lookups = self.lookups
        left = [(least, length) for least, length in self.lengths if lookups[least] in actions]
        return LookupRule.of(left, self.ranks) if left else None

    def _lookup(self, length: int) -> Action:
        if self.ranks:
            return Action.ranked(self.ranks, length)
        return Action.copy(length)


@dataclass(frozen=True)
class Setting:
    """How a selector decides under one `Sampling`, for a number of requests that are decoded
    together.

    A network with several `feature_levels` is first asked with the early features. A lookup or the
    empty tree, which need no forward pass of the draft, is its final choice. Otherwise it is asked
    again after the draft's forward pass over the root, with all features. Outside that one
    (`Sampling.covers`) and the text lengths of its training, it decides `without_network`.
    """

    sampling: Sampling
    # the best static tree, which is drafted where no features are known, and where nothing is
    # decided
    action: Action
    feature_levels: tuple[str, ...] = ()  # in turn; empty where no network decides
    speed: float = 1.0  # g, tokens per second
    rho: float = 1.0  # from 0 to 1
    # positions of the actions that may be chosen, ascending; all actions if empty
    allowed: tuple[int, ...] = ()
    # decides where no network does, and where the text is longer than `longest`
    rule: LookupRule | None = None
    longest: int = 0  # the tokens of a text up to which the network decides; 0 for no limit
    batch: int = 1
    # `text` or `drafter`, the features that a log's selector needs; "" for a pair's selector
    level: str = ""
    # tokens per second of the whole batch, for joint decisions; 0 where each request decides alone
    joint: float = 0.0
    # Tokens per step of every static tree, in the order of `ActionSpace.trees`; empty if not known.
    mean_efficiency: tuple[float, ...] = field(default=(), compare=False, repr=False)

    @property
    def decider(self) -> str:
        if self.feature_levels:
            return NETWORK
        return RULE if self.rule else STATIC

    @property
    def asked(self) -> tuple[str, ...]:
        """The features that a decision needs, in turn: the network's levels, or the match for the
        rule."""
        return (MATCH,) if self.decider == RULE else self.feature_levels

    @property
    def sees_all(self) -> bool:
        """Whether a network also uses the scalars that its schema's second level adds."""
        return not {LIGHT, FULL, DRAFTER}.isdisjoint(self.feature_levels)

    @property
    def label(self) -> str:
        """In words: the sampling, and of a log's setting the batch size and the features."""
        if self.level:
            return f"{self.sampling}, batch {self.batch}, {self.level}"
        return str(self.sampling)

    @property
    def key(self) -> tuple[float, float, float]:
        """Its coordinates; `nearest` sums their absolute differences."""
        return self.sampling.temperature, self.sampling.top_p, of_batch(self.batch)

    def positions(self, space: ActionSpace) -> Array:
        """Positions of the actions that the network may choose, int64 [K], ascending."""
        return np.array(self.allowed or range(len(space)))

    def copied(self, match: float) -> Action:
        """The choice of the lookup rule: a lookup or the static tree."""
        lookup = None
        if self.rule is not None:
            lookup = self.rule.after(match)
        return self.action if lookup is None else lookup

    def without_network(self) -> Setting:
        """The setting of the lookup rule, or of the static tree where there is none."""
        return replace(self, feature_levels=(), longest=0, joint=0.0)

    def static_only(self) -> Setting:
        return replace(self.without_network(), rule=None)

    def restricted(self, space: ActionSpace, positions: Iterable[int], speed_T: Tensor) -> Setting:
        """The setting of an engine that can draft only the actions at some positions, among them at
        least one tree.

        The static tree becomes the fastest one that remains, and the prices change in proportion to
        the trees' speeds, `speed_T`, in tokens per second. The rule keeps those of its lookups
        that remain, and is dropped where none does. If one of them and the static tree remain, that
        tree stays. `allowed` becomes the positions that it shares with `positions`, or all of these
        where it shares none.
        """
        left = sorted(positions)
        static_at = space.index(self.action)
        best = max((a for a in left if a < len(space.trees)), key=speed_T.__getitem__)
        rule = self.rule
        if rule is not None:
            rule = rule.within([space.actions[position] for position in left])
        if rule is not None and static_at in left:
            best = static_at
        kept = [a for a in left if a in self.allowed]
        if not kept:  # also where `allowed` is empty, which means all actions
            kept = left
        priced = self.faster(float(speed_T[best] / speed_T[static_at]))
        allowed = tuple(sorted({*kept, best}))
        return replace(priced, action=space.trees[best], allowed=allowed, rule=rule)

    def faster(self, ratio: float) -> Setting:
        """The setting with the prices of time of a decoder that is `ratio` times as fast."""
        return replace(self, speed=self.speed * ratio, joint=self.joint * ratio)

    def row(self) -> dict[str, Any]:
        """The setting's entry in JSON, with the numbers of the sampling beside the others."""
        entry = asdict(self)
        del entry["sampling"]
        for name, value in entry.items():
            if isinstance(value, tuple):
                entry[name] = list(value)
        return {
            **asdict(self.sampling),
            **entry,
            "feature_levels": list(self.asked),
            "decides": self.decider == NETWORK,
        }

    @classmethod
    def of(cls, entry: dict[str, Any]) -> Setting:
        """The setting of an entry that `row` made; other keys are ignored."""
        levels = tuple(entry["feature_levels"])
        rule = None
        if entry["rule"] is not None:
            least, length, ranks, longer = entry["rule"]
            rule = LookupRule(least, length, tuple(map(tuple, ranks)), tuple(map(tuple, longer)))
        return cls(
            sampling=Sampling(
                **{parameter.name: entry[parameter.name] for parameter in fields(Sampling)}
            ),
            action=Action.of(entry["action"]),
            feature_levels=() if levels == (MATCH,) else levels,
            speed=entry["speed"],
            rho=entry["rho"],
            allowed=tuple(entry["allowed"]),
            rule=rule,
            longest=entry["longest"],
            batch=entry["batch"],
            level=entry["level"],
            joint=entry["joint"],
            mean_efficiency=tuple(entry.get("mean_efficiency", ())),
        )


def of_batch(batch: float) -> float:
    """A batch size's coordinate in the distance between settings; small, so that the sampling
    comes first."""
    return 1e-3 * math.log2(batch)


def nearest(settings: Sequence[Setting], asked: Sampling, batch: float = 1) -> Setting:
    """The setting of the nearest `Sampling`, of those that cover the asked one if there are any;
    among several with the same one, that of the nearest batch size. InputError where `batch` is
    no number of requests."""
    if not 1 <= batch < math.inf:
        raise InputError(f"batch {batch:g}: there is at least one request")
    asked_key = asked.temperature, asked.top_p, of_batch(batch)

    def distance(setting: Setting) -> float:
        return sum(abs(a - b) for a, b in zip(setting.key, asked_key, strict=True))

    covering = [setting for setting in settings if setting.sampling.covers(asked)]
    return min(covering or settings, key=distance)


def net_tokens(efficiency_BA: Array, seconds_BA: Array, speed: float, rho: float) -> Array:
    """`E - price T` in tokens, [.., A], of actions that may be chosen.

    Args:
        efficiency_BA: block efficiencies E in tokens, above 0, [.., A].
        seconds_BA: times T of a step, [.., A].
        speed: g, in tokens per second.
        rho: the exponent of the root's own best ratio, from 0 to 1.
    """
    ratio_B1 = (efficiency_BA / seconds_BA).max(-1, keepdims=True)
    price_B1 = speed ** (1 - rho) * ratio_B1**rho
    net_BA: Array = efficiency_BA - price_B1 * seconds_BA
    return net_BA


def worth(
    predicted_BA: Array, seconds_BA: Array, setting: Setting, are_logits: bool = False
) -> Array:
    """What actions that may be chosen are worth under a setting, [.., A]: `net_tokens` of predicted
    block efficiencies, or the policy objective's logits (DDTE, eq. 12), which already allow for the
    times."""
    if are_logits:
        return predicted_BA
    return net_tokens(predicted_BA, seconds_BA, setting.speed, setting.rho)


def choices(
    predicted_BK: Array,
    seconds_BK: Array,
    positions_K: Array,
    setting: Setting,
    are_logits: bool = False,
) -> Array:
    """Positions of the actions that a setting's network chooses, int64 [..], of those that it may
    choose (`Setting.positions`); arguments as `worth`."""
    best: Array = worth(predicted_BK, seconds_BK, setting, are_logits).argmax(-1)
    return positions_K[best]
