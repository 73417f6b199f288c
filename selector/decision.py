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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from selector.actions import EMPTY, Action, ActionSpace, Choice, Lookup
from selector.schema import EARLY, FULL, LIGHT, MATCH

ASKED = ((), (MATCH,), (EARLY,), (LIGHT,), (FULL,), (EARLY, LIGHT), (EARLY, FULL))  # in turn, until it answers
RHOS = (0.0, 0.25, 0.5, 0.75, 1.0)
NEVER = -1e9  # the score, in tokens, of a tree that is not to be drafted


class Rule(NamedTuple):
    """Copy where the text repeats itself: a lookup of `length` tokens wherever the match is at least `least` tokens."""

    least: int
    length: int


@dataclass(frozen=True)
class Mode:
    """How a selector decides under one sampling setting.

    It is asked in turn with what each of `sees` holds, until it answers. With the early features it answers where it
    chooses a lookup or nothing, for these need no pass of the draft; where it would have the draft draft, it lets the
    draft pass the root first and decides again with all features, if they are among `sees`.

    Attributes:
        action: the best static tree: what is drafted where nothing is decided, and at a text's first root.
        sees: what it is asked with, `schema.FEATURES` in order; the match alone for the rule; nothing for the static
            tree everywhere.
        speed: g, tokens per second.
        rho: how far the price of time is a place's own, from 0 to 1.
        allowed: positions of the actions that may be chosen, ascending; all of them if empty.
        rule: what is done with the match alone.
    """

    temperature: float
    top_p: float
    action: Action
    sees: tuple[str, ...] = ()
    speed: float = 1.0
    rho: float = 1.0
    allowed: tuple[int, ...] = ()
    rule: Rule | None = None

    @property
    def decides(self) -> bool:
        """Whether it is a network that decides."""
        return len(self.sees) > 0 and self.sees != (MATCH,)

    def distance(self, temperature: float, top_p: float) -> float:
        return abs(self.temperature - temperature) + abs(self.top_p - top_p)

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
        return replace(self, sees=(), rule=None)

    def row(self) -> dict[str, Any]:
        """As JSON has it."""
        listed = {"action": list(self.action), "sees": list(self.sees), "allowed": list(self.allowed)}
        return {**asdict(self), **listed, "rule": self.rule and list(self.rule), "decides": self.decides}

    @classmethod
    def of(cls, entry: dict[str, Any]) -> "Mode":
        """From JSON; further keys are left out. KeyError, TypeError or ValueError where it is no mode."""
        numbers = {name: float(entry[name]) for name in ("temperature", "top_p", "speed", "rho")}
        action, allowed, sees = Action(*entry["action"]), tuple(entry["allowed"]), tuple(entry["sees"])
        rule = None if entry["rule"] is None else Rule(*entry["rule"])
        if not all(type(at) is int and at >= 0 for at in (*action, *allowed, *(rule or ()))):
            raise TypeError("a tree is no tree")
        if sees not in ASKED or (sees == (MATCH,)) != (rule is not None):
            raise ValueError("what it is asked with makes no sense")
        if not all(map(math.isfinite, numbers.values())) or numbers["speed"] <= 0:
            raise ValueError("a number is out of range")
        return cls(action=action, allowed=allowed, sees=sees, rule=rule, **numbers)


def without_draft(action: Choice) -> bool:
    """Whether an action needs no pass of the draft."""
    return isinstance(action, Lookup) or action == EMPTY


def nearest(modes: Sequence[Mode], temperature: float, top_p: float) -> Mode:
    """The mode of the sampling setting that is nearest."""
    return min(modes, key=lambda mode: mode.distance(temperature, top_p))


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
