"""A rival that never copies: the length of chains follows from recent acceptance.

If every drafted token is accepted independently with probability a, a chain of L tokens yields `1 + a + .. + a^L`
tokens a step (Leviathan et al. 2023). For a, it takes the running mean of `min(1, q/p)` over the text so far.

Legend: B roots, F scalars, A actions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, product

import numpy as np
import torch
from torch import Tensor

from selector.actions import ActionSpace, Tree
from selector.decision import RHOS, Costs, Mode, best_action
from selector.runtime.artefact import Features
from selector.schema import DECAYS, LIGHT, PAIR, SCALARS_KEY
from selector.train.data import Timed
from selector.train.replay import Replayed
from selector.train.tuning import replay_mode

MOST = 0.999  # the largest a
LENGTH = PAIR.index("context_length")
ACCEPTED = {decay: PAIR.index(f"accepted_mean_{decay:g}") for decay in DECAYS}


def chain_efficiencies(scalars_BF: Tensor, decay: float, space: ActionSpace) -> Tensor:
    """Block efficiencies by recent acceptance, [B, A]; 1 for actions that are not chains."""
    a_B1 = scalars_BF[:, ACCEPTED[decay], None].clamp(0, MOST)
    result_BA = torch.ones(len(scalars_BF), len(space))
    result_BA[:, list(space.chain_positions)] = (1 - a_B1 ** (torch.arange(space.depth + 1) + 1)) / (1 - a_B1)
    return result_BA


@dataclass
class RecentAcceptance:
    """Recent acceptance under one sampling setting, as a chooser of the decoder.

    Attributes:
        mode: its price of time; only chains are allowed.
        decay: of the running mean, one of `schema.DECAYS`.
        costs: of the chains.
    """

    mode: Mode
    decay: float
    costs: Costs
    space: ActionSpace
    feature_levels: tuple[str, ...] = (LIGHT,)

    def select(self, features: Features | None) -> Tree:
        if features is None:
            return self.mode.action
        scalars: list[float] = features[SCALARS_KEY].tolist()
        a = min(scalars[ACCEPTED[self.decay]], MOST)
        tokens = list(accumulate(range(self.space.depth), lambda shorter, _: 1 + a * shorter, initial=1.0))
        return self.space.chain(best_action(np.array(tokens), scalars[LENGTH], self.costs))

    def replay(self, timed: Timed) -> Replayed:
        """It on labelled texts."""
        return _replay(timed, self.mode, self.decay)

    @classmethod
    def tuned(cls, timed: Timed, static: Mode) -> RecentAcceptance:
        """The one whose running mean and price of time are the fastest on some texts."""
        chains = timed.space.chain_positions
        modes = [replace(static, feature_levels=(LIGHT,), rho=rho, allowed=chains) for rho in RHOS[::2]]
        mode, decay = max(product(modes, DECAYS), key=lambda each: _replay(timed, *each).speed)
        actions = tuple(timed.space.actions[at] for at in chains)
        lengths_L, seconds_LA = timed.profile.table(actions, timed.verifier, (LIGHT,), timed.setting)
        costs = Costs(lengths_L.double().numpy(), seconds_LA.double().numpy(), mode.speed, mode.rho)
        return cls(mode, decay, costs, timed.space)


def _replay(timed: Timed, mode: Mode, decay: float) -> Replayed:
    return replay_mode(timed, {LIGHT: chain_efficiencies(timed.texts.scalars_RF, decay, timed.space)}, mode)
