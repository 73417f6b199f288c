"""The decision: what to draft, given what every action would yield and what it costs.

Time has a *price*, in tokens per second, and the best action maximises `E - price T`: the tokens of a step less what
its time is worth. If the difficulty of the text changed at every step, the right price would be the speed `g` of the
whole text, because a second saved here is spent elsewhere. If it never changed, it would be the root's own best ratio
`max_a E(a) / T(a)`. Text lies in between, so the price is

    price = g^(1 - rho) (max_a E(a) / T(a))^rho,

and rho is found by replay. At rho = 1 the action with the largest ratio is the best. An example with g = 100 tokens/s:
one tree yields 4 tokens in 20 ms, another one 2.5 in 10 ms. At rho = 0 the additional 10 ms cost 1 token, and the
larger tree is taken (4 - 2 > 2.5 - 1); at rho = 1 the price is 250 tokens/s, and the smaller one is taken.

`net_tokens` states the rule for tensors (training, replay, the exported file), `best_action` for one root;
`selector.plain` restates it in NumPy. The tests compare the three.

Legend: B roots, A actions, K actions that may be chosen, L context lengths, T trees, S sampling settings.
"""

# Annotations are not postponed, because TorchScript reads those of functions as objects.

import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from selector.actions import EMPTY, Action, ActionSpace, Choice, Lookup
from selector.jit import jit
from selector.schema import DRAFTER, EARLY, FULL, LEVELS, LIGHT, MATCH, TEXT
from selector.tables import number, place

ASKED = ((), (MATCH,), *((level,) for level in LEVELS), (EARLY, LIGHT), (EARLY, FULL))  # what `feature_levels` may be
RHOS = (0.0, 0.25, 0.5, 0.75, 1.0)
NEVER = -1e9  # the score, in tokens, of an action that may not be chosen


class LookupRule(NamedTuple):
    """Copy where the text repeats itself: a lookup of `length` tokens wherever the match is at least `least` tokens."""

    least: int
    length: int

    @property
    def lookup(self) -> Lookup:
        """What it copies."""
        return Lookup(self.length)

    def copies(self, match: Any) -> Any:
        """Whether it copies; for a number a bool, for a tensor of matches a bool tensor."""
        return match >= self.least


@dataclass(frozen=True)
class Mode:
    """How a selector decides under one sampling setting, for a number of requests that are decoded together.

    It is asked in turn with what each of `feature_levels` holds, until it answers. With the early features it answers
    where it chooses a lookup or nothing, because these need no pass of the draft. Elsewhere the draft first passes the
    root, and the mode decides again with all features, if they are among `feature_levels`.

    Attributes:
        action: the best static tree: drafted where nothing is decided, and at a text's first root.
        feature_levels: what it is asked with, `schema.LEVELS` in order; the match alone for the lookup rule; nothing
            for the static tree everywhere.
        speed: g, tokens per second.
        rho: the exponent of the root's own ratio in the price of time, from 0 to 1.
        allowed: positions of the actions that may be chosen, ascending; all of them if empty.
        rule: what is done with the match alone.
        batch: how many requests are decoded together.
        level: `text` or `drafter`, what the engine must know for this mode of a log's selector; "" for a pair's.
        joint: the speed of the whole batch, tokens per second, that prices time when decisions for different requests
            are made together (`selector.runtime.joint`); 0 where they are not.
        mean_efficiency: tokens per step of every static tree under this setting, in the order of `ActionSpace.trees`;
            empty where it is not known. It is not compared.
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
    mean_efficiency: tuple[float, ...] = field(default=(), compare=False, repr=False)

    @property
    def decides(self) -> bool:
        """Whether a network decides."""
        return len(self.feature_levels) > 0 and self.feature_levels != (MATCH,)

    @property
    def key(self) -> tuple[float, float, float]:
        """What it is for: modes are compared by the sum of absolute differences."""
        return self.temperature, self.top_p, of_batch(self.batch)

    def mask(self, space: ActionSpace) -> Tensor:
        """Which actions may be chosen where the match does not decide, bool [A]."""
        if not self.decides:
            return torch.tensor([action == self.action for action in space])
        allowed = set(self.allowed or range(len(space)))
        return torch.tensor([a in allowed for a in range(len(space))])

    def copied(self, match: float) -> Choice:
        """What is drafted by the lookup rule alone: a lookup or the static tree."""
        return self.rule.lookup if self.rule is not None and self.rule.copies(match) else self.action

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
        copies = self.rule is not None and space.index(self.rule.lookup) in left
        if copies and own in left:
            best = own
        kept = [a for a in left if not self.allowed or a in self.allowed] or left
        speed = self.speed * float(speed_T[best] / speed_T[own])
        mode = self if self.rule is None or copies else self.static_only()
        return replace(mode, action=space.trees[best], speed=speed, allowed=tuple(sorted({*kept, best})))

    def row(self) -> dict[str, Any]:
        """As JSON has it."""
        tuples = ("action", "feature_levels", "allowed", "mean_efficiency")
        listed = {name: list(getattr(self, name)) for name in tuples}
        return {**asdict(self), **listed, "rule": self.rule and list(self.rule), "decides": self.decides}

    @classmethod
    def of(cls, entry: dict[str, Any]) -> "Mode":
        """From JSON; other keys are ignored. Raises KeyError, TypeError or ValueError where it is no mode."""
        mode = cls(
            action=Action(*entry["action"]),
            allowed=tuple(entry["allowed"]),
            feature_levels=tuple(entry["feature_levels"]),
            rule=None if entry["rule"] is None else LookupRule(*entry["rule"]),
            batch=entry["batch"],
            level=entry["level"],
            mean_efficiency=tuple(map(number, entry.get("mean_efficiency", ()))),
            **{name: float(entry[name]) for name in ("temperature", "top_p", "speed", "rho", "joint")},
        )
        if not all(type(at) is int and at >= 0 for at in (*mode.action, *mode.allowed, *(mode.rule or ()))):
            raise TypeError("action, allowed and rule must be non-negative integers")
        if mode.feature_levels not in ASKED or (mode.feature_levels == (MATCH,)) != (mode.rule is not None):
            raise ValueError("feature_levels and rule do not fit together")
        numbers = mode.temperature, mode.top_p, mode.speed, mode.rho, mode.joint
        if not all(map(math.isfinite, numbers)) or mode.speed <= 0 or mode.joint < 0:
            raise ValueError("a number is out of range")
        if type(mode.batch) is not int or mode.batch < 1 or mode.level not in ("", TEXT, DRAFTER):
            raise ValueError("batch or level is out of range")
        return mode


def without_draft(action: Choice) -> bool:
    """Whether an action needs no pass of the draft."""
    return isinstance(action, Lookup) or action == EMPTY


def of_batch(batch: float) -> float:
    """A number of requests in the distance between modes: doubling it counts as 0.001 of a temperature, so that the
    sampling setting comes first."""
    return 1e-3 * math.log2(batch)


def nearest(modes: Sequence[Mode], temperature: float, top_p: float, batch: int = 1) -> Mode:
    """The mode of the nearest sampling setting, and of its modes the one of the nearest number of requests."""
    key = temperature, top_p, of_batch(batch)
    return min(modes, key=lambda mode: sum(abs(a - b) for a, b in zip(mode.key, key, strict=True)))


def net_tokens(
    efficiency_BA: Tensor,
    seconds_BA: Tensor,
    speed_B1: Tensor,
    rho_B1: Tensor,
    allowed_BA: Tensor,
    never: float = NEVER,
) -> Tensor:
    """`E - price T` in tokens, [B, A]; `NEVER` for actions that may not be chosen. Scriptable.

    Args:
        efficiency_BA: block efficiencies, in tokens.
        seconds_BA: times of a step with each action.
        speed_B1, rho_B1: g and rho; broadcastable.
        allowed_BA: bool; broadcastable.
    """
    own_BA = (efficiency_BA / seconds_BA).masked_fill(~allowed_BA, 0.0)
    price_B1 = speed_B1 ** (1 - rho_B1) * own_BA.amax(-1, keepdim=True) ** rho_B1
    return (efficiency_BA - price_B1 * seconds_BA).masked_fill(~allowed_BA, never)


def choices(efficiency_BA: Tensor, seconds_BA: Tensor, mode: Mode, space: ActionSpace) -> Tensor:
    """Positions of the actions that a mode takes, int64 [B]."""
    speed, rho = torch.tensor(mode.speed).view(1, 1), torch.tensor(mode.rho).view(1, 1)
    return net_tokens(efficiency_BA, seconds_BA, speed, rho, mode.mask(space).unsqueeze(0)).argmax(-1)


class Costs(NamedTuple):
    """What time costs at one root, of the actions that may be chosen: step times by context length, g and rho.

    Attributes:
        lengths_L: float64, ascending, at least two.
        seconds_LK: float64.
    """

    lengths_L: NDArray[Any]
    seconds_LK: NDArray[Any]
    speed: float
    rho: float


@jit
def best_action(tokens_K: NDArray[Any], length: float, costs: Costs) -> int:
    """The position that `choices` gives at one root, from its block efficiencies, float64, and its context length."""
    above, share = place(costs.lengths_L, length)
    low_K, high_K = costs.seconds_LK[above - 1], costs.seconds_LK[above]
    seconds_K = low_K + share * (high_K - low_K)
    price = costs.speed ** (1 - costs.rho) * (tokens_K / seconds_K).max() ** costs.rho
    return int(np.argmax(tokens_K - price * seconds_K))
