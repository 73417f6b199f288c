"""Choosers that decide again while the trunk is drafted: the exported selector, and rules of the field to compare with.

Each sees what `decoding.Revising` is given, the draft's own state at the newest token, and answers with a chain that
ends there, or goes on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from data_gen.decoding import Features
from data_gen.drafting import Drawn
from data_gen.features import TrunkFeatures
from data_gen.sampling import Sampling
from selector.actions import Action, ActionSpace
from selector.runtime import LatencyProfile, Tuned

SPACE = ActionSpace.default()


def chooser_of(tuned: Tuned, sampling: Sampling) -> RootChooser:
    """The exported selector as a chooser under one sampling setting."""
    return SelectorChooser(tuned, sampling) if tuned.on_trunk else RootChooser(tuned)


class RootChooser:
    """An exported selector that decides at the root, or nowhere."""

    def __init__(self, tuned: Tuned) -> None:
        self.tuned = tuned
        self.latency: LatencyProfile | None = tuned.latency

    def select(self, features: Features | None) -> Action:
        self._plan = self.tuned.select(features)
        return self._plan


class SelectorChooser(RootChooser):
    """An exported selector that decides along the trunk."""

    def __init__(self, tuned: Tuned, sampling: Sampling) -> None:
        super().__init__(tuned)
        self.sampling = sampling

    def revise(self, drawn: Drawn, length: int) -> Action:
        if drawn.depth == 0:
            self._trunk = TrunkFeatures(length, self.sampling)
        else:
            self._trunk.drawn(drawn.token, drawn.probs_V)
        if drawn.depth < self.tuned.first:  # too early for another answer
            return self._plan
        assert drawn.hidden_D is not None
        return self.tuned.decide(drawn.hidden_D.float().cpu(), self._trunk.scalars(), drawn.depth, length)


@dataclass
class EntropyStop:
    """Drafts a chain until the draft is unsure: SVIP (Zhang et al. 2024, arXiv 2411.18462).

    SVIP bounds the acceptance of a token by `1 - sqrt(c H)`, with `H` the entropy of the distribution it is drawn from,
    and stops where that bound falls below a threshold: where `H` passes one of its own.

    Attributes:
        entropy: the threshold on `H`, in nats.
        longest: tokens of a chain at most.
    """

    entropy: float
    longest: int
    latency: LatencyProfile | None = None

    def select(self, features: Features | None) -> Action:
        return SPACE.chain(self.longest)

    def revise(self, drawn: Drawn, length: int) -> Action:
        if drawn.depth == 0:
            return SPACE.chain(self.longest)
        if drawn.depth < self.longest and float(torch.special.entr(drawn.probs_V).sum()) <= self.entropy:
            return SPACE.chain(self.longest)
        return SPACE.chain(drawn.depth)


@dataclass
class StoppingHead:
    """Drafts a chain until a rejection is likely: SpecDec++ (Huang et al. 2024, arXiv 2405.19715).

    A trained head says how likely each drafted token is to be accepted; drafting stops where the probability that all
    of them are has fallen too low. It is lossless as every decision that uses drafted tokens alone.

    Attributes:
        accepts: P(accepted) of a drafted token, from `TRUNK_STATE` [D] and `TRUNK_SCALARS` [F], float32 on the CPU.
        rejected: the threshold on the probability that at least one drafted token is rejected.
        longest: tokens of a chain at most.
        sampling: the target's.
    """

    accepts: Callable[[Tensor, Tensor], float]
    rejected: float
    longest: int
    sampling: Sampling
    latency: LatencyProfile | None = None

    def select(self, features: Features | None) -> Action:
        return SPACE.chain(self.longest)

    def revise(self, drawn: Drawn, length: int) -> Action:
        if drawn.depth == 0:
            self._trunk, self._all_accepted = TrunkFeatures(length, self.sampling), 1.0
        elif drawn.depth < self.longest:
            assert drawn.hidden_D is not None
            self._trunk.drawn(drawn.token, drawn.probs_V)
            self._all_accepted *= self.accepts(drawn.hidden_D.float().cpu(), self._trunk.scalars())
            if 1 - self._all_accepted > self.rejected:
                return SPACE.chain(drawn.depth)
        return SPACE.chain(self.longest)
