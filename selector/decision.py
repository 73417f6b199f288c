"""The decision: which tree to draft, given what every tree would yield and what it costs.

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
from typing import Any

import torch
from torch import Tensor

from selector.actions import Action, ActionSpace

RHOS = (0.0, 0.25, 0.5, 0.75, 1.0)
NEVER = -1e9  # the score, in tokens, of a tree that is not to be drafted


@dataclass(frozen=True)
class Mode:
    """How a selector decides under one sampling setting.

    Attributes:
        action: the best static tree: what is drafted where nothing is decided, and at a text's first root.
        decides: whether decisions pay; if not, `action` is the answer to everything.
        speed: g, tokens per second.
        rho: how far the price of time is a place's own, from 0 to 1.
        allowed: positions of the trees that may be chosen, ascending; all of them if empty.
    """

    temperature: float
    top_p: float
    action: Action
    decides: bool = False
    speed: float = 1.0
    rho: float = 1.0
    allowed: tuple[int, ...] = ()

    def distance(self, temperature: float, top_p: float) -> float:
        return abs(self.temperature - temperature) + abs(self.top_p - top_p)

    def mask(self, space: ActionSpace) -> Tensor:
        """Which trees may be chosen, bool [A]."""
        if not self.decides:
            return torch.tensor([action == self.action for action in space])
        allowed = self.allowed or range(len(space))
        return torch.tensor([a in set(allowed) for a in range(len(space))])

    def static_only(self) -> "Mode":
        """The same without decisions."""
        return replace(self, decides=False)

    def row(self) -> dict[str, Any]:
        """As JSON has it."""
        return {**asdict(self), "action": list(self.action), "allowed": list(self.allowed)}

    @classmethod
    def of(cls, entry: dict[str, Any]) -> "Mode":
        """From JSON; further keys are left out. KeyError, TypeError or ValueError where it is no mode."""
        numbers = {name: float(entry[name]) for name in ("temperature", "top_p", "speed", "rho")}
        action, allowed = Action(*entry["action"]), tuple(entry["allowed"])
        if not all(type(at) is int and at >= 0 for at in (*action, *allowed)):
            raise TypeError("a tree is no tree")
        if type(entry["decides"]) is not bool or not all(map(math.isfinite, numbers.values())) or numbers["speed"] <= 0:
            raise ValueError("a number is out of range")
        return cls(action=action, allowed=allowed, decides=entry["decides"], **numbers)


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
