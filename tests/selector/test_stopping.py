from __future__ import annotations

import pytest
import torch

from selector.schema import TRUNK_SCALARS
from selector.stopping import StoppingModule, TokenAcceptance
from tests.selector.synthetic import WIDTHS, roots


def head(rejection_weight: float = 1.0) -> StoppingModule:
    torch.manual_seed(0)
    made = StoppingModule(WIDTHS[-1], {"hidden": (16, 8), "dropout": 0.0}, rejection_weight, 1e-2, 0.0)
    made.fit_standardisation(roots())
    return made.eval()


def trained(rejection_weight: float) -> StoppingModule:
    module, data = head(rejection_weight), roots(128)
    optimiser = torch.optim.AdamW(module.parameters(), lr=1e-2)
    for _ in range(150):
        optimiser.zero_grad()
        module.loss(module.logits(data), data.trunk_accept_BST).backward()
        optimiser.step()
    return module


@pytest.mark.parametrize("weight", [1.0, 6.0])
def test_it_learns_an_acceptance_that_depends_on_the_state(weight: float) -> None:
    """0.95 or 0.3 by the state's sign, on fresh roots; with heavy rejections, as if there were so many more of them."""
    module, fresh = trained(weight), roots(128, seed=5)
    true_BST = fresh.trunk_accept_BST
    expected_BST = true_BST / (true_BST + weight * (1 - true_BST))
    with torch.no_grad():
        logits_BST = module.logits(fresh)
        assert (logits_BST.sigmoid() - expected_BST).abs().mean() < 0.05  # a step at 0 is learnt as a steep slope
        constant = module.loss(module.constant.expand_as(logits_BST), true_BST)
        assert module.loss(logits_BST, true_BST) < 0.9 * constant


def test_it_begins_at_the_best_constant() -> None:
    data, module = roots(), head(6.0)
    constants = [module.constant + shift for shift in (-0.1, 0.0, 0.1)]
    around = [float(module.loss(constant.expand(64, 2, 15), data.trunk_accept_BST)) for constant in constants]
    assert around[1] == min(around)
    assert torch.equal(module.network.head.bias.detach()[0], module.constant)


def test_rejections_add_up_along_the_trunk_and_token_by_token() -> None:
    module, data = trained(1.0), roots(4, seed=5)
    accepts = TokenAcceptance(module.network)
    rejected_BST = module.rejected(data)
    assert bool((rejected_BST.diff(dim=-1) >= 0).all())
    for b in range(4):
        kept = 1.0
        for t in range(15):
            scalars_F = data.trunk_scalars_BSTF[b, 1, t]
            assert scalars_F.shape == (len(TRUNK_SCALARS),)
            kept *= accepts(data.trunk_hidden_BSTD[b, 1, t].float(), scalars_F)
            assert 1 - kept == pytest.approx(float(rejected_BST[b, 1, t]), abs=1e-5)
