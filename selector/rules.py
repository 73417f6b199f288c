"""A rule of thumb to compare with: chains as long as recent acceptance says.

Leviathan et al. 2023: if every drafted token is accepted with probability a, independently, a chain of L tokens yields
`1 + a + .. + a^L` tokens a step. The rule takes for a the running mean of `min(1, q/p)` over the text so far.

Legend: B roots, F scalars, A actions.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from selector.actions import Action, ActionSpace
from selector.data import Timed
from selector.decision import RHOS, Mode, choices
from selector.latency import interpolated
from selector.replay import Replayed
from selector.runtime import LENGTH_AT, Features
from selector.schema import DECAYS, LIGHT, SCALAR_NAMES, SCALARS_KEY
from selector.tuning import replay_actions

SPACE = ActionSpace.default()
CHAINS = tuple(SPACE.index(SPACE.chain(length)) for length in range(SPACE.depth + 1))
MOST = 0.999  # a


def chain_efficiencies(scalars_BF: Tensor, decay: float) -> Tensor:
    """Block efficiencies by the rule, [B, A]; 1 for trees with branches."""
    a_B1 = scalars_BF[:, SCALAR_NAMES.index(f"accepted_mean_{decay:g}"), None].clamp(0, MOST)
    result_BA = torch.ones(len(scalars_BF), len(SPACE))
    length_L = torch.arange(SPACE.depth + 1)
    result_BA[:, list(CHAINS)] = (1 - a_B1 ** (length_L + 1)) / (1 - a_B1)
    return result_BA


@dataclass
class AcceptanceRule:
    """The rule under one sampling setting, as a chooser of the decoder.

    Attributes:
        mode: its price of time; chains alone are allowed.
        decay: of the running mean, one of `schema.DECAYS`.
        table: context lengths and step times, as from `LatencyProfile.table`.
    """

    mode: Mode
    decay: float
    table: tuple[Tensor, Tensor]
    sees: str | None = LIGHT

    def select(self, features: Features | None) -> Action:
        if features is None:
            return self.mode.action
        scalars_1F = features[SCALARS_KEY].unsqueeze(0)
        lengths_L, seconds_LA = self.table
        seconds_1A = interpolated(seconds_LA, lengths_L, scalars_1F[:, LENGTH_AT])
        chosen = choices(chain_efficiencies(scalars_1F, self.decay), seconds_1A, self.mode, SPACE)
        return SPACE.actions[int(chosen)]

    def replay(self, timed: Timed) -> Replayed:
        """The rule on labelled texts."""
        return _replay(timed, self.mode, self.decay)

    @classmethod
    def tuned(cls, timed: Timed, static: Mode) -> AcceptanceRule:
        """The running mean and the price of time that are the fastest on some texts."""
        tried = [
            (replace(static, decides=True, rho=rho, allowed=CHAINS), decay) for rho in RHOS[::2] for decay in DECAYS
        ]
        mode, decay = max(tried, key=lambda each: _replay(timed, *each).speed)
        table = timed.profile.table(SPACE.actions, timed.verifier, LIGHT, timed.setting[1] < 1)
        return cls(mode, decay, table)


def _replay(timed: Timed, mode: Mode, decay: float) -> Replayed:
    seconds_RA = timed.seconds(LIGHT)
    chosen_R = choices(chain_efficiencies(timed.texts.scalars_RF, decay), seconds_RA, mode, SPACE)
    static = SPACE.index(mode.action)
    return replay_actions(timed, torch.where(timed.texts.first_R, static, chosen_R), seconds_RA)
