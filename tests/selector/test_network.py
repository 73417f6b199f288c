"""The networks: scaling, and survivals as products of probabilities."""

from __future__ import annotations

import pytest
import torch

from selector.actions import ActionSpace
from selector.schema import Scalar, Schema
from selector.train.network import RootNetwork, SurvivalNetwork
from tests.selector.test_actions import SPACES, names_of

WIDTHS = [6, 4, 4]
SCALARS, EARLY = 3, 2
PASSED = torch.ones(20, 1)


def network(space: ActionSpace, widths: list[int] = WIDTHS) -> SurvivalNetwork:
    torch.manual_seed(0)
    schema = Schema(
        "own", ("first", "all"), tuple(Scalar(str(f), "1", "") for f in range(SCALARS)), EARLY
    )
    body = RootNetwork(schema, widths, len(space.survivals), width=8, hidden=(16, 8))
    return SurvivalNetwork(body, space).eval()


def inputs(widths: list[int] = WIDTHS) -> tuple[torch.Tensor, list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    states = [torch.randn(20, width, generator=generator) for width in widths]
    return torch.randn(20, SCALARS, generator=generator), states


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_a_survival_is_the_product_of_the_factors_above_it(space: ActionSpace) -> None:
    """Those of the part of an action that it is named by: a branch's after its trunk's. A lookup
    and a shape by rank have no trunk, for the draft's chance says nothing of them."""
    factors_SS = space.survival_factors()
    names_of_S = [names_of(part) for part in space.survivals]
    assert len(factors_SS) == len(names_of_S) == len({names[-1] for names in names_of_S})
    assert factors_SS.unique().tolist() in ([0, 1], [1])
    for names, factor_S in zip(names_of_S, factors_SS.T, strict=True):
        above = [names_of_S[s][-1] for s in factor_S.nonzero()[:, 0].tolist()]
        assert sorted(above, key=str) == sorted(names, key=str)


@pytest.mark.parametrize("space", SPACES, ids=str)
@pytest.mark.parametrize("widths", [[], WIDTHS], ids=["light", "full"])
def test_survivals_never_rise_along_a_path(space: ActionSpace, widths: list[int]) -> None:
    """For any weights, in every tree; they are probabilities, and the first of a branch is none
    above its trunk's."""
    made = network(space, widths)
    with torch.no_grad():
        made.body.mlp[-1].weight.mul_(10)
        survivals_BS = made(*inputs(widths), PASSED).exp()
    assert survivals_BS.shape == (20, len(space.survivals))
    assert bool(((survivals_BS > 0) & (survivals_BS <= 1)).all())
    for action, place_D in zip(space, space.survival_of_AD, strict=True):
        path_BD = survivals_BS[:, place_D[place_D < len(space.survivals)]]
        assert bool((path_BD.diff(dim=-1) <= 0).all()), action


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_training_begins_at_the_given_means(space: ActionSpace) -> None:
    """Exactly, but for what the last layer's weights, a tenth of what they were, make of the
    features."""
    factor_S = 0.7 + 0.29 * torch.rand(
        len(space.survivals), generator=torch.Generator().manual_seed(2)
    )
    mean_S = (factor_S.log() @ space.survival_factors()).exp()
    made = network(space)
    last = made.body.mlp[-1]
    before = last.weight.detach().clone()
    made.begin_at(mean_S)
    assert torch.allclose(last.weight, 0.1 * before)
    with torch.no_grad():
        near_BS = made(*inputs(), PASSED).exp()
        last.weight.zero_()
        exact_BS = made(*inputs(), PASSED).exp()
    assert torch.allclose(exact_BS, mean_S.expand_as(exact_BS), rtol=1e-4)
    assert float((near_BS - mean_S).abs().max()) < 0.1
    assert float((near_BS - exact_BS).abs().max()) > 1e-4


def test_scaling_is_part_of_the_network() -> None:
    """Features in other units, standardised anew, give the same."""
    body = network(ActionSpace(2, 1, 1)).body
    scalars_BF, states = inputs()
    body.standardise(scalars_BF)
    other_BF = 1000 + 25 * scalars_BF
    before = {passed: body(scalars_BF, states, passed * PASSED) for passed in (0, 1)}
    for passed, outputs in before.items():
        assert not torch.allclose(body(other_BF, states, passed * PASSED), outputs, atol=1e-2)
    body.standardise(other_BF)
    for passed, outputs in before.items():
        assert torch.allclose(body(other_BF, states, passed * PASSED), outputs, atol=1e-3)


@pytest.mark.parametrize("widths", [[], WIDTHS], ids=["light", "full"])
def test_before_the_draft_has_passed_the_root_the_early_scalars_alone_count(
    widths: list[int],
) -> None:
    """Each of them does; the others and the hidden states do, root by root, once it has. And which
    it is, counts."""
    made = network(ActionSpace(2, 1, 1, (2,)), widths)
    scalars_BF, states = inputs(widths)
    made.body.standardise(scalars_BF)
    late_BF, other_states = (
        scalars_BF.clone(),
        [state + torch.arange(state.shape[1]) for state in states],
    )
    late_BF[:, EARLY:] += 3.0
    before, after = made(scalars_BF, states, 0 * PASSED), made(scalars_BF, states, PASSED)
    assert not torch.isclose(before, after, atol=1e-4).all(-1).any()
    assert torch.equal(made(late_BF, other_states, 0 * PASSED), before)
    at_their_means_BF = torch.cat(
        [scalars_BF[:, :EARLY], made.body.mean_F[EARLY:].expand(20, -1)], dim=-1
    )
    assert torch.equal(made(at_their_means_BF, states, 0 * PASSED), before)
    for place in range(EARLY):
        early_BF = scalars_BF + torch.eye(SCALARS)[place]
        assert not torch.allclose(made(early_BF, states, 0 * PASSED), before, atol=1e-3), place
    assert not torch.allclose(made(late_BF, states, PASSED), after, atol=1e-3)
    mixed_B1 = (torch.arange(20) % 2).float().unsqueeze(-1)
    assert torch.allclose(
        made(scalars_BF, states, mixed_B1), torch.where(mixed_B1 > 0, after, before), atol=1e-6
    )
