"""Roots whose best action follows from a feature, for tests of training and export."""

from __future__ import annotations

import torch

from selector.actions import ActionSpace
from selector.data import Roots
from selector.latency import LatencyProfile, Table, interpolated
from selector.module import SelectorModule
from selector.schema import SCALAR_NAMES

WIDTHS = [6, 4, 4]
SPACE = ActionSpace.default()


def profile(draft: float = 1e-3, target: float = 5e-3) -> LatencyProfile:
    lengths = [10, 100]
    return LatencyProfile(
        device="test machine",
        pair="0123456789abcdef",
        draft=Table(lengths, [1, 4], [[draft, 2 * draft], [1.5 * draft, 3 * draft]]),
        target=Table(lengths, [1, 33], [[target, 2 * target], [1.5 * target, 3 * target]]),
        verify={"traversal": Table([1, 16], [1, 4], [[1e-4, 2e-4], [5e-4, 8e-4]])},
        select=1e-4,
        step=1e-4,
    )


def roots(count: int = 64, seed: int = 0) -> Roots:
    """Long trees pay where the first hidden state's first entry is positive, short ones elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    hidden = [torch.randn(count, width, generator=generator) for width in WIDTHS]
    scalars = torch.rand(count, len(SCALAR_NAMES), generator=generator)
    length_B = torch.randint(20, 200, (count,), generator=generator)
    scalars[:, SCALAR_NAMES.index("context_length")] = length_B.float()
    depth_A = torch.tensor([float(action.L1 + action.L2) for action in SPACE])
    reach_B1 = torch.where(hidden[0][:, :1] > 0, 0.95, 0.3)
    mean_BA = (1 - reach_B1 ** (depth_A + 1)) / (1 - reach_B1)
    times = [profile().table(SPACE.actions, "traversal", with_selector) for with_selector in (True, False)]
    tables = [interpolated(seconds_LA, lengths_L, length_B) for lengths_L, seconds_LA in times]
    return Roots(
        *hidden,
        scalars=scalars,
        mean_BA=mean_BA,
        half_BA=mean_BA + 0.01 * torch.randn(mean_BA.shape, generator=generator),
        realised_BA=mean_BA.round(),
        seconds_BA=tables[0],
        static_seconds_BA=tables[1],
        setting_B=torch.zeros(count, dtype=torch.int64),
        base_B=torch.full((count,), SPACE.index((1, 3, 0))),
    )


def module(objective: str, seed: int = 0) -> SelectorModule:
    torch.manual_seed(seed)
    made = SelectorModule(
        objective,
        WIDTHS,
        len(SPACE),
        network={"width": 16, "hidden": [32, 16], "dropout": 0.1},
        learning_rate=3e-3,
        weight_decay=0.0,
        epochs=60,
        worst_weight=1.0,
        worst_share=0.05,
    )
    made.fit_standardisation(roots())
    return made.eval()
