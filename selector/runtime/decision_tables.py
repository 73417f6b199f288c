"""The tables that the exported file decides with: times, prices and allowed actions of each mode, as tensors.

Legend: S modes, A actions, L context lengths.
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
    """One row for each mode."""

    settings_S3: Tensor  # `Mode.key`
    lengths_L: Tensor  # measured context lengths
    early_SLA: Tensor  # seconds of a step that is decided before the draft has passed the root
    late_SLA: Tensor  # seconds of a step that is decided after it
    speed_S: Tensor
    rho_S: Tensor
    allowed_SA: Tensor  # actions that may be chosen where the lookup rule does not apply
    late_S: Tensor  # 1 where the mode uses the draft's rows, or the drafter's hits for a log's selector; else 0
    least_S: Tensor  # the shortest match for which the lookup rule applies
    copied_SA: Tensor  # the lookup of the rule
    level_S: Tensor  # position of the mode's level in `LOG.levels`, or `ANY_LEVEL`


def decision_tables(
    profile: LatencyProfile, modes: Sequence[Mode], verifier: str, space: ActionSpace
) -> DecisionTables:
    """The tables of some modes on one machine; InputError where the profile has no times for them."""
    at_batch = {mode.batch: profile.at_batch(mode.batch) for mode in modes}

    def times(levels: tuple[str, ...]) -> tuple[Tensor, Tensor]:
        """Lengths and step times, where a decision uses those of the mode's feature levels that are in `levels`."""
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
