"""A selector under one sampling setting: where it decides there, and how.

Legend: A actions, L context lengths, T trunk tokens, D hidden width, F scalars.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from selector.actions import Action, ActionSpace
from selector.network import further_actions, further_cost
from selector.schema import SCALAR_NAMES, SCALARS_KEY

if TYPE_CHECKING:
    from selector.runtime import Selector

BARRED = 1e4  # tokens that an action costs which an engine has no graph for; differences of a mere 0.001 stay exact
LENGTH_AT = SCALAR_NAMES.index("context_length")
LONGEST = ActionSpace.default().chain(ActionSpace.default().decisions + 1)


@dataclass(frozen=True)
class Mode:
    """How a selector decides under one sampling setting.

    Attributes:
        at_root, on_trunk: whether decisions are made at the root, by all features, or there and along the trunk, by the
            draft's own state. Neither: `action` is the answer to everything.
        action: the best static action.
        gain: tokens per second at which time is charged.
        further: indices of the further actions that are weighed along the trunk.
        first: trunk tokens before which the answer is always to draft on; 0 is the root.
        verifier_of: position in the selector's `verifiers`, for every action.
    """

    temperature: float
    top_p: float
    action: Action
    at_root: bool
    on_trunk: bool
    gain: float
    further: tuple[int, ...] = ()
    first: int = 0
    verifier_of: tuple[int, ...] = (0,) * len(ActionSpace.default())

    @property
    def options(self) -> list[int]:
        """Of every action with its verifier, the position among every action with each verifier."""
        return [verifier * len(self.verifier_of) + action for action, verifier in enumerate(self.verifier_of)]

    def distance(self, temperature: float, top_p: float) -> float:
        return abs(self.temperature - temperature) + abs(self.top_p - top_p)

    @classmethod
    def of(cls, entry: dict) -> Mode:
        names = ("temperature", "top_p", "at_root", "on_trunk", "gain", "first")
        further, verifier_of = tuple(entry["further"]), tuple(entry["verifier_of"])
        values = {name: entry[name] for name in names}
        return cls(action=Action(*entry["action"]), further=further, verifier_of=verifier_of, **values)


class Tuned:
    """A selector under one sampling setting; decides where that is worth its time.

    Attributes:
        latency: the profile that root features are based on; None where none are needed.
        decides: whether there is any decision to make; if not, `select` has one answer to everything.
        on_trunk: whether `decide` is to be asked, at the root and after trunk tokens, from the `first` one on.
        verifiers: of every action, in the order of `selector.actions`. They may differ: a decision sees drafted tokens,
            but bottom-up verifiers enter a trunk alike, whatever stands below it.
    """

    def __init__(self, selector: Selector, mode: Mode, allowed: list[int] | None = None) -> None:
        self.selector, self.mode = selector, mode
        self.latency = selector.latency if mode.at_root else None
        self.on_trunk, self.first = mode.on_trunk, mode.first
        self.decides = mode.at_root or mode.on_trunk
        self.verifiers = selector.verifiers_of(mode)
        self._space = ActionSpace.default()
        if self.decides:
            lengths_L, seconds_LA = selector.latency.table(
                selector.actions, self.verifiers, mode.at_root, mode.first if mode.on_trunk else None, mode.top_p < 1
            )
            self._lengths: list[float] = lengths_L.tolist()
            self.cost_LA = mode.gain * seconds_LA
            if allowed is not None:  # a plan that is allowed stays so while it is carried out: one always remains
                barred = torch.ones(len(selector.actions), dtype=torch.bool)
                barred[allowed] = False
                self.cost_LA = self.cost_LA + BARRED * barred
            self.body = selector.body_of(mode) if mode.at_root else ()
            self.head = selector.head_of(mode) if mode.on_trunk else ()
            self.cost_LTA = further_cost(self.cost_LA, self._space)[..., list(mode.further)].contiguous()
            self._length = -1.0
            self._costs: list[Tensor] = []
            self._whole = further_actions(self._space)[:, list(mode.further)].tolist()

    @torch.inference_mode()
    def select(self, features: dict[str, Tensor] | None) -> Action:
        """The decision at a root. Without features, or any decision to make there: the static action; where the trunk
        is decided, the longest chain, to be cut by `decide`.
        """
        if self.on_trunk:
            return LONGEST
        if features is None or not self.mode.at_root:
            return self.mode.action
        cost_A = self._at(self.cost_LA, float(features[SCALARS_KEY][LENGTH_AT]))
        return self.selector.actions[int((self.selector.efficiency(features, self.body) - cost_A).argmax())]

    def decide(self, hidden_D: Tensor, scalars_F: Tensor, drafted: int, length: float) -> Action:
        """The decision along the trunk: the action from here on, whose trunk holds at least what is drafted.

        Args:
            hidden_D: `TRUNK_STATE`, float32 on the CPU.
            scalars_F: `TRUNK_SCALARS`, float32 on the CPU.
            drafted: trunk tokens so far, 0 at the root. Before the `first` of them there is nothing to decide.
            length: committed tokens. Both are among the scalars.
        """
        if drafted < self.first:
            return LONGEST
        if drafted > self._space.decisions:
            return self._space.chain(drafted)
        cost_A = self.costs_at(length)[drafted]
        return self.whole(drafted, self.selector.further(hidden_D, scalars_F, self.head, cost_A))

    def costs_at(self, length: float) -> list[Tensor]:
        """What further actions cost after each number of trunk tokens, in tokens; kept for a whole step."""
        if length != self._length:
            self._length, self._costs = length, list(self._at(self.cost_LTA, length))
        return self._costs

    def whole(self, drafted: int, further: int) -> Action:
        """What is drafted in all once a further action, by its position in `mode.further`, has been added."""
        return self.selector.actions[self._whole[drafted][further]]

    def _at(self, table: Tensor, length: float) -> Tensor:
        """A table by context length, linear in between and constant beyond."""
        lengths = self._lengths
        length = min(max(length, lengths[0]), lengths[-1])
        upper = next(i for i in range(1, len(lengths)) if length <= lengths[i])
        share = (length - lengths[upper - 1]) / (lengths[upper] - lengths[upper - 1])
        return torch.lerp(table[upper - 1], table[upper], share)
