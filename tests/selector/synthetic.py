"""Roots and trunks whose best action follows from a feature, for tests of training and export."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from selector.actions import ActionSpace
from selector.data import Roots
from selector.latency import LatencyProfile, Table, interpolated
from selector.module import SelectorModule
from selector.schema import SCALAR_NAMES, TRUNK_SCALARS

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
        revise=1e-5,
        step=1e-4,
    )


def roots(count: int = 64, seed: int = 0, verifiers: int = 1, widths: Sequence[int] = WIDTHS) -> Roots:
    """Long trees pay where the first hidden state's first entry is positive, short ones elsewhere.

    A further verifier is like the first, and half a token better with several branches.

    On each of the two trunks drafted there, that is so where the draft's own hidden state begins with a positive entry.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = [torch.randn(count, width, generator=generator) for width in widths]
    scalars = torch.rand(count, len(SCALAR_NAMES), generator=generator)
    length_B = torch.randint(20, 200, (count,), generator=generator)
    scalars[:, SCALAR_NAMES.index("context_length")] = length_B.float()
    depth_A = torch.tensor([float(action.L1 + action.L2) for action in SPACE])
    mean_BA = efficiency(hidden[0][:, :1], depth_A)
    trunk_hidden = torch.randn(count, 2, SPACE.decisions, widths[-1], generator=generator)
    trunk_hidden[..., 0] = trunk_hidden[..., :1, 0]
    trunk_scalars = torch.rand(count, 2, SPACE.decisions, len(TRUNK_SCALARS), generator=generator)
    trunk_scalars[..., 0] = torch.arange(1.0, SPACE.decisions + 1)
    times = [profile().table(SPACE.actions, "traversal", with_selector) for with_selector in (True, False)]
    half_BA = mean_BA + 0.01 * torch.randn(mean_BA.shape, generator=generator)
    trunk_BSA = efficiency(trunk_hidden[..., 0, :1], depth_A)
    tables = [interpolated(seconds_LA, lengths_L, length_B) for lengths_L, seconds_LA in times]
    return Roots(
        *hidden,
        scalars=scalars,
        mean_BA=mean_BA,
        error_BA=torch.full_like(mean_BA, 0.1),
        half_BA=half_BA,
        realised_BA=mean_BA.round(),
        seconds_BA=tables[0],
        static_seconds_BA=tables[1],
        setting_B=torch.zeros(count, dtype=torch.int64),
        step_B=torch.arange(count) % 8 > 0,
        kind_B=torch.zeros(count, dtype=torch.int64),
        prompt_B=torch.arange(count) // 4,
        weight_B=torch.randint(1, 4, (count,), generator=generator).float(),
        base_B=torch.full((count,), SPACE.index((1, 3, 0))),
        trunk_hidden_BSTD=trunk_hidden.half(),
        trunk_scalars_BSTF=trunk_scalars,
        trunk_entropy_BST=torch.rand(count, 2, SPACE.decisions, generator=generator),
        trunk_accept_BST=acceptance(trunk_hidden[..., 0]),
        trunk_BSA=trunk_BSA,
        verifier_BA=torch.zeros(count, len(SPACE), dtype=torch.int64),
        every_mean_BO=with_each(mean_BA, verifiers),
        every_half_BO=with_each(half_BA, verifiers),
        every_error_BO=torch.full_like(with_each(mean_BA, verifiers), 0.1),
        every_trunk_BSO=with_each(trunk_BSA, verifiers),
    )


def with_each(values_A: torch.Tensor, verifiers: int) -> torch.Tensor:
    """Block efficiencies with every verifier, [.., O]."""
    branching_A = torch.tensor([float(action.K > 1) for action in SPACE])
    return torch.cat([values_A + 0.5 * v * branching_A for v in range(verifiers)], dim=-1)


def efficiency(sign: torch.Tensor, depth_A: torch.Tensor) -> torch.Tensor:
    """Block efficiency of trees of some depths where every token is accepted with 0.95, or with 0.3."""
    reach = acceptance(sign)
    return (1 - reach ** (depth_A + 1)) / (1 - reach)


def acceptance(sign: torch.Tensor) -> torch.Tensor:
    return torch.where(sign > 0, 0.95, 0.3)


class Traces:
    """Stands in for `TracesModule`, whose data come from files."""

    def __init__(self, count: int = 256, widths: Sequence[int] = WIDTHS) -> None:
        self.train, self.validation = roots(count, widths=widths), roots(count, seed=5, widths=widths)
        self.profile, self.verifiers = profile(), ["traversal"]
        self.verifier_of: dict = {}


def module(objective: str, seed: int = 0, verifiers: int = 1, widths: Sequence[int] = WIDTHS) -> SelectorModule:
    torch.manual_seed(seed)
    made = SelectorModule(
        objective,
        list(widths),
        len(SPACE),
        network={"width": 16, "hidden": [32, 16], "dropout": 0.1},
        learning_rate=3e-3,
        weight_decay=0.0,
        epochs=60,
        worst_weight=1.0,
        worst_share=0.05,
        verifiers=verifiers,
    )
    made.fit_standardisation(roots(verifiers=verifiers, widths=widths))
    return made.eval()
