"""The decision: which action to draft, given the block efficiency and the time of each.

Time has a *price* in tokens per second, and the best action maximises `E - price T`. If each step's difficulty were
independent of the last one's, the right price would be the speed `g` of the whole text, because a saved second is spent
elsewhere. If it never changed, the right price would be the root's own best ratio `E / T`. Text lies in between, so

    price = g^(1 - rho) (max_a E(a) / T(a))^rho,

and rho is tuned by replay. At rho = 1 the action with the largest ratio E / T is the best. `net_tokens` computes this
for tensors, `selector.runtime.one_root` for NumPy arrays.

Legend: B roots, A actions, T trees.
"""

# Annotations are not postponed, because TorchScript reads those of functions as objects.

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selector.actions import Action, ActionSpace
from selector.schema import DRAFTER, EARLY, FULL, LEVELS, LIGHT, MATCH, TEXT
from selector.tables import number

ASKED = ((), (MATCH,), *((level,) for level in LEVELS), (EARLY, LIGHT), (EARLY, FULL))  # values of `feature_levels`
RHOS = (0.0, 0.25, 0.5, 0.75, 1.0)
FAR = 0.1, 0.05, 0.02, 0.02  # in temperature, top-p, 1 / top-k and min-p: where a mode no longer decides
NEVER = -1e9  # the score, in tokens, of an action that may not be chosen


class LookupRule(NamedTuple):
    """Drafts a lookup of `length` tokens wherever the match has at least `least` tokens."""

    least: int
    length: int

    @property
    def lookup(self) -> Action:
        return Action.copy(self.length)

    def copies(self, match: Any) -> Any:
        """Whether the rule drafts its lookup: a bool for a number, a bool tensor for a tensor of matches."""
        return match >= self.least


@dataclass(frozen=True)
class Mode:
    """How a selector decides under one sampling setting, for a number of requests that are decoded together.

    A selector with several `feature_levels` first gets the early features. It answers where it chooses a lookup or the
    empty tree, which need no draft pass. Otherwise the draft passes the root, and the mode decides with all features.
    Beyond the sampling settings (`covers`) and the lengths of the network's training, the mode decides as `by_rule`.
    """

    temperature: float
    top_p: float
    action: Action  # the best static tree, which is drafted where no features are known or needed
    feature_levels: tuple[str, ...] = ()  # of `schema.LEVELS`, in order; `MATCH` alone for the lookup rule
    speed: float = 1.0  # g, tokens per second
    rho: float = 1.0  # from 0 to 1
    allowed: tuple[int, ...] = ()  # positions of the actions that may be chosen, ascending; all actions if empty
    rule: LookupRule | None = None  # which decides, or would decide on longer texts than the network
    longest: int = 0  # the tokens of a text up to which the network decides; 0 for no limit
    batch: int = 1
    level: str = ""  # `text` or `drafter`, the features that a log's selector needs; "" for a pair's selector
    joint: float = 0.0  # tokens per second of the whole batch, for joint decisions; 0 where each request decides alone
    top_k: int = 0  # 0 keeps the whole vocabulary
    min_p: float = 0.0
    draft_temperature: float | None = None  # None for the target's
    # Tokens per step of every static tree, in the order of `ActionSpace.trees`; empty if not known.
    mean_efficiency: tuple[float, ...] = field(default=(), compare=False, repr=False)

    @property
    def decides(self) -> bool:
        """Whether a network decides."""
        return self.feature_levels not in ((), (MATCH,))

    @property
    def sees_all(self) -> bool:
        """Whether a network decides by what its schema's second level adds, too."""
        return self.feature_levels[-1:] in ((LIGHT,), (FULL,), (DRAFTER,))

    @property
    def copies(self) -> bool:
        """Whether the lookup rule decides."""
        return self.feature_levels == (MATCH,)

    @property
    def setting(self) -> tuple[float, float]:
        """Temperature and top-p."""
        return self.temperature, self.top_p

    @property
    def key(self) -> tuple[float, float, float]:
        """Coordinates of the setting; `nearest` sums their absolute differences."""
        return *self.setting, of_batch(self.batch)

    def covers(self, temperature: float, top_p: float, top_k: int = 0, min_p: float = 0.0) -> bool:
        """Whether the mode may decide under a sampling setting.

        Temperatures may differ by 0.1, top-p by 0.05, 1 / top-k (0 for the whole vocabulary) and min-p by 0.02: so a
        top-k from 50 on counts as none. At temperature 0 the other three change nothing. Beyond, drafted tokens are
        accepted at rates that the network has not seen. The distances are a judgement, not a fit.
        """
        own = self.temperature, self.top_p, 1 / self.top_k if self.top_k else 0.0, self.min_p
        asked = temperature, top_p, 1 / top_k if top_k else 0.0, min_p
        counted = zip(own, asked, FAR, strict=True) if temperature else [(own[0], 0.0, FAR[0])]
        return all(abs(a - b) <= far + 1e-6 for a, b, far in counted)

    def mask(self, space: ActionSpace) -> Tensor:
        """Which actions may be chosen where the lookup rule does not apply, bool [A]."""
        if not self.decides:
            return torch.tensor([action == self.action for action in space])
        allowed = set(self.allowed or range(len(space)))
        return torch.tensor([a in allowed for a in range(len(space))])

    def is_beyond(self, length: float) -> bool:
        """Whether the committed text is longer than those that the network was trained on."""
        return 0 < self.longest < length

    def by_rule(self) -> "Mode":
        """The mode of the lookup rule, or of the static tree where there is none."""
        return replace(self, feature_levels=(MATCH,) if self.rule else (), longest=0, joint=0.0)

    def copied(self, match: float) -> Action:
        """The choice of the lookup rule: its lookup or the static tree."""
        return self.rule.lookup if self.rule is not None and self.rule.copies(match) else self.action

    def static_only(self) -> "Mode":
        """The mode that always drafts the static tree."""
        return replace(self, feature_levels=(), rule=None, longest=0, joint=0.0)

    def restricted(self, space: ActionSpace, positions: Iterable[int], speed_T: Tensor) -> "Mode":
        """The mode of an engine that can draft only the actions at some positions, among them at least one tree.

        The static tree becomes the fastest one that remains, and `speed` changes in proportion to the trees' speeds,
        `speed_T`, in tokens per second. The rule is dropped where its lookup does not remain. If the lookup and the
        static tree both remain, that tree stays. `allowed` becomes the positions that it shares with `positions`, or
        all of these where it shares none.
        """
        left, own = sorted(positions), space.index(self.action)
        best = max((a for a in left if a < len(space.trees)), key=speed_T.__getitem__)
        copies = self.rule is not None and space.index(self.rule.lookup) in left
        if copies and own in left:
            best = own
        kept = [a for a in left if not self.allowed or a in self.allowed] or left
        speed = self.speed * float(speed_T[best] / speed_T[own])
        mode = self if copies or self.decides else self.static_only()
        rule = self.rule if copies else None
        return replace(mode, action=space.trees[best], speed=speed, allowed=tuple(sorted({*kept, best})), rule=rule)

    def row(self) -> dict[str, Any]:
        """The mode's entry in JSON."""
        tuples = ("action", "feature_levels", "allowed", "mean_efficiency")
        listed = {name: list(getattr(self, name)) for name in tuples}
        return {**asdict(self), **listed, "rule": self.rule and list(self.rule), "decides": self.decides}

    @classmethod
    def of(cls, entry: dict[str, Any]) -> "Mode":
        """The mode of a JSON entry; other keys are ignored. Raises KeyError, TypeError or ValueError for other data."""
        mode = cls(
            action=Action.of(entry["action"]),
            allowed=tuple(entry["allowed"]),
            feature_levels=tuple(entry["feature_levels"]),
            rule=None if entry["rule"] is None else LookupRule(*entry["rule"]),
            batch=entry["batch"],
            longest=entry["longest"],
            level=entry["level"],
            top_k=entry["top_k"],
            draft_temperature=entry["draft_temperature"],
            mean_efficiency=tuple(map(number, entry.get("mean_efficiency", ()))),
            **{name: float(entry[name]) for name in ("temperature", "top_p", "min_p", "speed", "rho", "joint")},
        )
        if not all(type(at) is int and at >= 0 for at in (*mode.action[:3], *mode.allowed, *(mode.rule or ()))):
            raise TypeError("action, allowed and rule must be non-negative integers")
        if mode.feature_levels not in ASKED or (not mode.decides and bool(mode.feature_levels) != bool(mode.rule)):
            raise ValueError("feature_levels and rule do not fit together")
        numbers = *mode.setting, mode.min_p, mode.speed, mode.rho, mode.joint, mode.draft_temperature or 0.0
        if not all(map(math.isfinite, numbers)) or mode.speed <= 0 or mode.joint < 0 or not 0 <= mode.rho <= 1:
            raise ValueError("a number is out of range")
        if any(type(each) is not int or each < 0 for each in (mode.top_k, mode.longest)):
            raise TypeError("top_k and longest must be non-negative integers")
        if type(mode.batch) is not int or mode.batch < 1 or mode.level not in ("", TEXT, DRAFTER):
            raise ValueError("batch or level is out of range")
        return mode


def of_batch(batch: float) -> float:
    """A batch size's coordinate in the distance between modes; small, so that the sampling setting comes first."""
    return 1e-3 * math.log2(batch)


def nearest(
    modes: Sequence[Mode], temperature: float, top_p: float, batch: float = 1, top_k: int = 0, min_p: float = 0.0
) -> Mode:
    """The mode of the nearest sampling setting, of those that cover the asked one if there are any; among several with
    one setting the mode of the nearest batch size."""
    key = temperature, top_p, of_batch(batch)
    covering = [mode for mode in modes if mode.covers(temperature, top_p, top_k, min_p)]
    return min(covering or modes, key=lambda mode: sum(abs(a - b) for a, b in zip(mode.key, key, strict=True)))


def net_tokens(
    efficiency_BA: Tensor,
    seconds_BA: Tensor,
    speed_B1: Tensor,
    rho_B1: Tensor,
    allowed_BA: Tensor,
    never: float = NEVER,
) -> Tensor:
    """`E - price T` in tokens, [B, A]; `NEVER` for actions that may not be chosen. Scriptable.

    `efficiency_BA` is in tokens; `speed_B1` (g), `rho_B1` and `allowed_BA` (bool) are broadcast.
    """
    own_BA = (efficiency_BA / seconds_BA).masked_fill(~allowed_BA, 0.0)
    price_B1 = speed_B1 ** (1 - rho_B1) * own_BA.amax(-1, keepdim=True) ** rho_B1
    return (efficiency_BA - price_B1 * seconds_BA).masked_fill(~allowed_BA, never)


def choices(efficiency_BA: Tensor, seconds_BA: Tensor, mode: Mode, space: ActionSpace) -> Tensor:
    """Positions of the actions that a mode chooses, int64 [B]."""
    speed, rho = torch.tensor(mode.speed).view(1, 1), torch.tensor(mode.rho).view(1, 1)
    return net_tokens(efficiency_BA, seconds_BA, speed, rho, mode.mask(space).unsqueeze(0)).argmax(-1)
