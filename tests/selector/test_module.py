from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from selector.metrics import SpeedRatio
from selector.module import LEAST_ERROR, SelectorModule
from selector.network import SelectorNetwork
from selector.runtime import best_gain
from selector.schema import LATENCY_SCALARS, SCALAR_NAMES
from tests.selector.synthetic import WIDTHS, module, roots


@pytest.mark.parametrize("objective", ["policy", "regressor"])
def test_training_finds_what_a_feature_tells(objective: str) -> None:
    """On roots whose best depth follows from a feature, the selector beats the static action on fresh roots."""
    torch.manual_seed(0)
    trained: SelectorModule = module(objective)
    trained.log = lambda *_, **__: None  # no trainer here
    data, fresh = roots(256), roots(256, seed=5)
    optimiser = torch.optim.AdamW(trained.parameters(), lr=3e-3)
    trained.train()
    for _ in range(200):
        optimiser.zero_grad()
        trained.training_step(data, 0).backward()
        optimiser.step()
    trained.eval()
    trained.fit_gain(data)
    chosen = trained.choices(fresh).unsqueeze(-1)
    ratio = SpeedRatio()
    ratio.update(
        fresh.mean_BA.gather(-1, chosen),
        fresh.seconds_BA.gather(-1, chosen),
        fresh.base_tokens_B(),
        fresh.base_seconds_B(),
    )
    best = best_gain(fresh.mean_BA, fresh.seconds_BA)
    ceiling = best / float(fresh.base_tokens_B().sum() / fresh.base_seconds_B().sum())
    assert float(ratio.compute()) > 1 + 0.5 * (ceiling - 1) > 1.05


def test_the_regressor_sees_no_latency_features() -> None:
    data = roots(8)
    outputs = module("regressor").outputs(data)
    for name in LATENCY_SCALARS:
        data.scalars[:, SCALAR_NAMES.index(name)] += 100
    assert torch.equal(module("regressor").outputs(data), outputs)
    assert not torch.equal(module("policy").outputs(data), module("policy").outputs(roots(8)))


def test_a_feature_that_never_varies_stays_at_zero() -> None:
    network = SelectorNetwork(WIDTHS, [0, 1], 3)
    scalars = torch.tensor([[2.0, 0.3], [2.0, 0.5]])
    network.standardise(scalars)
    assert network.scalar_scale_F.tolist()[0] == 1.0
    assert ((scalars - network.scalar_mean_F) / network.scalar_scale_F)[:, 0].tolist() == [0.0, 0.0]


def test_labels_known_exactly_do_not_outweigh_the_rest() -> None:
    data = roots()
    trunk_BSO = data.every_trunk_BSO + torch.randn(
        data.every_trunk_BSO.shape, generator=torch.Generator().manual_seed(1)
    )
    trunk_BSO[..., 7] = 2.0
    fresh = module("regressor")
    fresh.fit_standardisation(replace(data, every_trunk_BSO=trunk_BSO))
    assert float(fresh.trunk_weight_O[7]) == pytest.approx(LEAST_ERROR**-2)
    assert 0 < float(fresh.trunk_weight_O[8]) < 3
    assert bool(fresh.trunk_weight_O.isfinite().all())
