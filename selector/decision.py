"""The decision: what to draft, given what every action would yield and what it costs.

Time has a *price*, in tokens per second, and the best tree maximises `E - price T`, the tokens of a step less what its
time is worth. What is the right price? If how hard the text is changed from one step to the next, it would be the speed
`g` of the whole text: a second saved here is spent elsewhere. If it never changed, it would be the state's own best
ratio `max_a E(a) / T(a)`: a second saved here is spent here. Text lies in between, so the price is

    price = g^(1 - rho) (max_a E(a) / T(a))^rho,

and rho is found by replay. At rho = 1 the best tree is the one of the largest own ratio. With g = 100 tokens/s, and a
place where a tree of 20 ms yields 4 tokens and one of 10 ms yields 2.5, the speed of the text says that 10 ms more are
worth 1 token, and takes the larger tree (4 - 2 > 2.5 - 1); the own ratio, 250 tokens/s, says 2.5, and takes the
smaller.

This is the one home of that rule: training, replay, evaluation, the exported file and the runtime all call it.

Legend: B roots, A actions, L context lengths.
"""

# No postponed annotations here: TorchScript reads the annotations of functions as objects.

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selector.actions import EMPTY, Action, ActionSpace, Choice, Lookup
from selector.schema import DRAFTER, EARLY, FULL, LEVELS, LIGHT, MATCH, TEXT

ASKED = ((), (MATCH,), *((level,) for level in LEVELS), (EARLY, LIGHT), (EARLY, FULL))  # in turn, until it answers
RHOS = (0.0, 0.25, 0.5, 0.75, 1.0)
NEVER = -1e9  # the score, in tokens, of a tree that is not to be drafted


class LookupRule(NamedTuple):
    """Copy where the text repeats itself: a lookup of `length` tokens wherever the match is at least `least` tokens."""

    least: int
    length: int


@dataclass(frozen=True)
class Mode:
    """How a selector decides under one sampling setting, for a number of requests that are decoded together.

    It is asked in turn with what each of `feature_levels` holds, until it answers. With the early features it answers
    where it chooses a lookup or nothing, for these need no pass of the draft; where it would have the draft draft, it
    lets the draft pass the root first and decides again with all features, if they are among `feature_levels`.

    Attributes:
        action: the best static tree: what is drafted where nothing is decided, and at a text's first root.
        feature_levels: what it is asked with, `schema.LEVELS` in order; the match alone for the rule; nothing for the
            static tree everywhere.
        speed: g, tokens per second.
        rho: how far the price of time is a place's own, from 0 to 1.
        allowed: positions of the actions that may be chosen, ascending; all of them if empty.
        rule: what is done with the match alone.
        batch: how many requests are decoded together, all of them with one mode's decisions.
        level: what an engine must know of the text for this mode, of the levels of a log's selector; "" for a pair's,
            which has one mode for whatever is known.
        joint: the speed of the whole batch, in tokens per second, at which decisions for different requests charge time
            when they are made together (`selector.train.mixed`); 0 where they are not.
    """

    temperature: float
    top_p: float
    action: Action
    feature_levels: tuple[str, ...] = ()
    speed: float = 1.0
    rho: float = 1.0
    allowed: tuple[int, ...] = ()
    rule: LookupRule | None = None
    batch: int = 1
    level: str = ""
    joint: float = 0.0

    @property
    def decides(self) -> bool:
        """Whether it is a network that decides."""
        return len(self.feature_levels) > 0 and self.feature_levels != (MATCH,)

    @property
    def key(self) -> tuple[float, float, float]:
        """What it is for, as `distance` compares it."""
        return self.temperature, self.top_p, of_batch(self.batch)

    def distance(self, temperature: float, top_p: float, batch: int = 1) -> float:
        return sum(abs(a - b) for a, b in zip(self.key, (temperature, top_p, of_batch(batch)), strict=True))

    def mask(self, space: ActionSpace) -> Tensor:
        """Which actions may be chosen where the match does not decide, bool [A]."""
        if not self.decides:
            return torch.tensor([action == self.action for action in space])
        allowed = self.allowed or range(len(space))
        return torch.tensor([a in set(allowed) for a in range(len(space))])

    def copied(self, match: float) -> Choice:
        """What the rule does with a match: a lookup, or the static tree."""
        return Lookup(self.rule.length) if self.rule is not None and match >= self.rule.least else self.action

    def static_only(self) -> "Mode":
        """The same without decisions."""
        return replace(self, feature_levels=(), rule=None)

    def restricted(self, space: ActionSpace, positions: Iterable[int], speed_T: Tensor) -> "Mode":
        """The mode where only some actions can be drafted.

        The static tree becomes the fastest one among them, and `speed` falls in proportion to the speeds of the static
        trees: slower decoding makes time worth less. The rule is dropped where its lookup is not among them; where
        the lookup and the rule's own static tree both are, that tree stays, although it need not be the fastest.

        Args:
            positions: of the actions that remain, at least one tree among them. Of these `allowed` keeps its own, or
                all of them where none of its own remain.
            speed_T: tokens per second of every static tree, in the order of `space.trees`.
        """
        left, own = sorted(positions), space.index(self.action)
        best = max((a for a in left if a < len(space.trees)), key=speed_T.__getitem__)
        copies = self.rule is not None and space.index(Lookup(self.rule.length)) in left
        if copies and own in left:
            best = own
        kept = [a for a in left if not self.allowed or a in self.allowed] or left
        speed = self.speed * float(speed_T[best] / speed_T[own])
        mode = self if self.rule is None or copies else self.static_only()
        return replace(mode, action=space.trees[best], speed=speed, allowed=tuple(sorted({*kept, best})))

    def row(self) -> dict[str, Any]:
        """As JSON has it."""
        listed = {
            "action": list(self.action),
            "feature_levels": list(self.feature_levels),
            "allowed": list(self.allowed),
        }
        return {**asdict(self), **listed, "rule": self.rule and list(self.rule), "decides": self.decides}

    @classmethod
    def of(cls, entry: dict[str, Any]) -> "Mode":
        """From JSON; further keys are left out. KeyError, TypeError or ValueError where it is no mode."""
        numbers = {name: float(entry[name]) for name in ("temperature", "top_p", "speed", "rho", "joint")}
        action, allowed, feature_levels = (
            Action(*entry["action"]),
            tuple(entry["allowed"]),
            tuple(entry["feature_levels"]),
        )
        rule = None if entry["rule"] is None else LookupRule(*entry["rule"])
        if not all(type(at) is int and at >= 0 for at in (*action, *allowed, *(rule or ()))):
            raise TypeError("a tree is no tree")
        if feature_levels not in ASKED or (feature_levels == (MATCH,)) != (rule is not None):
            raise ValueError("what it is asked with makes no sense")
        if not all(map(math.isfinite, numbers.values())) or numbers["speed"] <= 0 or numbers["joint"] < 0:
            raise ValueError("a number is out of range")
        batch, level = entry["batch"], entry["level"]
        if type(batch) is not int or batch < 1 or level not in ("", TEXT, DRAFTER):
            raise ValueError("batch or level is out of range")
        return cls(
            action=action,
            allowed=allowed,
            feature_levels=feature_levels,
            rule=rule,
            batch=batch,
            level=level,
            **numbers,
        )


def without_draft(action: Choice) -> bool:
    """Whether an action needs no pass of the draft."""
    return isinstance(action, Lookup) or action == EMPTY


def of_batch(batch: float) -> float:
    """A number of requests as it counts in the distance between modes: doubling it counts as 0.001 of a temperature, so
    that the sampling setting comes first."""
    return 1e-3 * math.log2(batch)


def nearest(modes: Sequence[Mode], temperature: float, top_p: float, batch: int = 1) -> Mode:
    """The mode of the sampling setting that is nearest, and of its modes the one of the nearest number of requests."""
    return min(modes, key=lambda mode: mode.distance(temperature, top_p, batch))


def net_tokens(
    efficiency_BA: Tensor,
    seconds_BA: Tensor,
    speed_B1: Tensor,
    rho_B1: Tensor,
    allowed_BA: Tensor,
    never: float = NEVER,
) -> Tensor:
    """`E - price T` in tokens, [B, A]: the tree with the most is drafted; `NEVER` where it may not be. Scriptable.

    Args:
        efficiency_BA: block efficiencies, in tokens.
        seconds_BA: times of a step with each tree.
        speed_B1, rho_B1: g and rho; broadcastable.
        allowed_BA: bool; broadcastable.
    """
    own_BA = (efficiency_BA / seconds_BA).masked_fill(~allowed_BA, 0.0)
    price_B1 = speed_B1 ** (1 - rho_B1) * own_BA.amax(-1, keepdim=True) ** rho_B1
    return (efficiency_BA - price_B1 * seconds_BA).masked_fill(~allowed_BA, never)


def choice(tokens: Sequence[float], seconds: Sequence[float], speed: float, rho: float) -> int:
    """The position that `choices` gives at one root: a handful of plain numbers take less time than a call of torch."""
    price = speed ** (1 - rho) * max(e / t for e, t in zip(tokens, seconds, strict=True)) ** rho
    worth = [e - price * t for e, t in zip(tokens, seconds, strict=True)]
    return worth.index(max(worth))


def choices(efficiency_BA: Tensor, seconds_BA: Tensor, mode: Mode, space: ActionSpace) -> Tensor:
    """Positions of the trees that a mode drafts, int64 [B]."""
    speed, rho = torch.tensor(mode.speed).view(1, 1), torch.tensor(mode.rho).view(1, 1)
    return net_tokens(efficiency_BA, seconds_BA, speed, rho, mode.mask(space).unsqueeze(0)).argmax(-1)
