"""Labelled texts for the tests of other projects' rules, and their clock.

Legend: X texts, R roots, D depths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from selector.actions import ActionSpace
from selector.latency import LatencyProfile
from selector.schema import LEVELS, LOG
from selector.tables import FREE, Table
from selector.train.data import Texts, Timed

DEPTH, LONGEST = 5, 8
CLOCK = LatencyProfile(
    device="test machine",
    pair="log:drafter",
    draft=Table([1], [1], [[0.9e-3]]),
    target=Table([1], [1, 33], [[6e-3, 9e-3]]),
    verify={"naive": FREE},
    decide=dict.fromkeys(LEVELS, 0.0),
    step=1e-3,
)


def timed(seed: int = 0, certain: bool = True, depth: int = DEPTH, texts: int = 6, roots: int = 80) -> Timed:
    """Texts that repeat themselves where the match is long, some of which are easier for the drafter than others."""
    generator = torch.Generator().manual_seed(seed)
    size_X = torch.tensor([roots - 9 * x for x in range(texts)])
    R = int(size_X.sum())

    def drawn(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    match_R = (13 * drawn(R) ** 2).floor()
    foretold_R = (match_R * 2 * drawn(R)).floor().clamp(max=LONGEST)
    easy_R = (0.3 + 0.6 * drawn(texts)).repeat_interleave(size_X)
    rate_RD = easy_R.unsqueeze(-1).expand(R, depth)
    survivals_RD = ((drawn(R, depth) < rate_RD).float() if certain else rate_RD).cumprod(-1)
    scalars_RF = drawn(R, len(LOG.scalars))
    known = {
        "match": match_R,
        "second_match": (match_R + 1 - (4 * drawn(R)).floor()).clamp(min=0),
        "hit_mean_0.8": (easy_R + 0.4 * (drawn(R) - 0.5)).clamp(0, 1),
    }
    for name, values_R in known.items():
        scalars_RF[:, LOG.index(name)] = values_R
    data = Texts(
        settings=[(0.0, 1.0)],
        size_X=size_X,
        setting_X=torch.zeros(texts, dtype=torch.int64),
        kind_X=["prose"] * texts,
        source_X=[f"source {x}" for x in range(texts)],
        prompt_X=[f"prompt {x}" for x in range(texts)],
        scalars_RF=scalars_RF,
        length_R=20 + torch.cat([torch.arange(size) for size in size_X.tolist()]),
        survivals={"naive": survivals_RD.half()},
        foretold_R=foretold_R.to(torch.uint8),
        hidden_R=torch.full((R,), -1),
        from_the_start=True,
        schema=LOG,
    )
    return Timed(data, "naive", CLOCK, ActionSpace.chains(depth, LONGEST))
