"""What the exported file decides with, by sampling setting: times, prices and allowed actions as tensors.

Legend: S sampling settings, A actions, L context lengths.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from selector.actions import ActionSpace
from selector.decision import LookupRule, Mode
from selector.latency import LatencyProfile
from selector.schema import EARLY, FULL, LIGHT, LOG, TEXT

NO_MATCH = 1 << 20  # longer than any match
ANY_LEVEL = -1.0


class DecisionTables(NamedTuple):
    """One row for each mode.

    Attributes:
        settings_S3: `Mode.key`.
        lengths_L: measured context lengths.
        early_SLA, late_SLA: step times before and after the draft has passed the root, in seconds.
        speed_S, rho_S: of the price of time.
        allowed_SA: actions that may be chosen where the rule does not copy.
        late_S: 1 where the draft's rows (of a log's selector, the drafter's hits) are looked at, else 0.
        least_S, copied_SA: the match from which on the rule copies, and its lookup.
        level_S: position of the mode's level among `LOG.levels`, or `ANY_LEVEL`.
    """

    settings_S3: Tensor
    lengths_L: Tensor
    early_SLA: Tensor
    late_SLA: Tensor
    speed_S: Tensor
    rho_S: Tensor
    allowed_SA: Tensor
    late_S: Tensor
    least_S: Tensor
    copied_SA: Tensor
    level_S: Tensor


def decision_tables(
    profile: LatencyProfile, modes: Sequence[Mode], verifier: str, space: ActionSpace
) -> DecisionTables:
    """The tables of some modes on one machine; InputError where the profile has no times for them."""
    at_batch = {mode.batch: profile.at_batch(mode.batch) for mode in modes}

    def times(levels: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Lengths and step times, where of a mode's feature levels those among the given ones were looked at."""
        tables = []
        for mode in modes:
            asked = [level for level in mode.feature_levels if not levels or level in levels]
            tables.append(at_batch[mode.batch].table(space.actions, verifier, asked, mode.top_p < 1))
        return tables[0][0], torch.stack([seconds_LA for _, seconds_LA in tables])

    lengths_L, early_SLA = times((TEXT, EARLY))
    rules = [mode.rule or LookupRule(NO_MATCH, 0) for mode in modes]
    late = (LIGHT,), (FULL,), LOG.levels[1:]
    return DecisionTables(
        settings_S3=torch.tensor([mode.key for mode in modes]),
        lengths_L=lengths_L,
        early_SLA=early_SLA,
        late_SLA=times(())[1],
        speed_S=torch.tensor([mode.speed for mode in modes]),
        rho_S=torch.tensor([mode.rho for mode in modes]),
        allowed_SA=torch.stack([mode.mask(space) for mode in modes]),
        late_S=torch.tensor([float(mode.feature_levels[-1:] in late) for mode in modes]),
        least_S=torch.tensor([float(rule.least) for rule in rules]),
        copied_SA=torch.tensor([[action == rule.lookup for action in space] for rule in rules]),
        level_S=torch.tensor([float(LOG.levels.index(mode.level)) if mode.level else ANY_LEVEL for mode in modes]),
    )
