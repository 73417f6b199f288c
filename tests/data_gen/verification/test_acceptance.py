"""Closed-form acceptance against enumeration, and the optimum against a linear program over all drafted sets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from data_gen.verification import STYLES, TopDown, acceptance, get_verifier, optimal_acceptance
from data_gen.verification.acceptance import CLOSED_FORMS, _all_inside
from data_gen.verification.profile import Rows
from tests.data_gen.worlds import KINDS, World


def worlds() -> list[World]:
    return [World(2 + seed % 4, 0, KINDS[seed % len(KINDS)], seed) for seed in range(20)]


def transport_optimum(world: World, k: int, style: str) -> float:
    """The largest mass that can flow from drafted sets to tokens of the target."""
    sets: dict[frozenset[int], float] = {}
    for probability, tokens in world.children((), k, style):
        sets[frozenset(tokens)] = sets.get(frozenset(tokens), 0.0) + probability
    flows = [(row, token) for row, drafted in enumerate(sets) for token in drafted]
    limits = np.zeros((len(sets) + world.vocabulary, len(flows)))
    for column, (row, token) in enumerate(flows):
        limits[row, column] = limits[len(sets) + token, column] = 1
    bounds = np.concatenate([list(sets.values()), world.target[()].numpy()])
    return -float(linprog(-np.ones(len(flows)), A_ub=limits, b_ub=bounds, method="highs").fun)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_the_optimum_is_that_of_the_linear_program(k: int, style: str) -> None:
    for world in worlds():
        optimum = optimal_acceptance(world.target[()], world.draft[()], k, style)
        assert optimum == pytest.approx(transport_optimum(world, k, style), abs=1e-9)


@pytest.mark.parametrize("name", CLOSED_FORMS)
@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_closed_forms_are_the_mean_over_all_drafts(name: str, k: int) -> None:
    for world in worlds():
        p_V, q_V = world.target[()], world.draft[()]
        rule = get_verifier("naive_tree" if name == "naive" else name)
        assert isinstance(rule, TopDown)
        drafts = list(world.children((), k, "iid"))
        entries_Mk = torch.tensor([tokens[:1] if name == "naive" else tokens for _, tokens in drafts])
        nodes_M = torch.zeros(len(drafts), dtype=torch.int64)
        pull_Mk = rule.pull(Rows(p_V.unsqueeze(0), q_V.unsqueeze(0)).profile(nodes_M), entries_Mk)
        mean = sum(probability * float(pull) for (probability, _), pull in zip(drafts, pull_Mk.sum(-1), strict=True))
        closed = acceptance(name, p_V, q_V, k)
        if name == "khisti":
            assert closed <= mean + 1e-12
        else:
            assert closed == pytest.approx(mean, abs=1e-12)
        assert mean <= optimal_acceptance(p_V, q_V, k) + 1e-12


def test_draws_without_replacement_in_a_set_by_quadrature() -> None:
    q_V = torch.rand(12, generator=torch.Generator().manual_seed(3), dtype=torch.float64) ** 4
    q = (q_V / q_V.sum()).numpy()
    for k in (3, 4):
        inside = _all_inside(q, k)
        for size in (4, 7, 12):
            assert inside[size] == pytest.approx(_sequences(q, size, k), abs=1e-11)


def _sequences(q: np.ndarray, size: int, k: int, drawn: tuple[int, ...] = ()) -> float:
    if len(drawn) == k:
        return 1.0
    left = 1 - q[list(drawn)].sum()
    return sum(q[x] / left * _sequences(q, size, k, (*drawn, x)) for x in range(size) if x not in drawn and q[x] > 0)


def test_bad_arguments_are_named() -> None:
    p = torch.tensor([0.5, 0.5])
    with pytest.raises(ValueError, match="no closed-form acceptance of 'traversal'"):
        acceptance("traversal", p, p, 2)
    with pytest.raises(ValueError, match="style 'sorted'; styles are iid, without_replacement, greedy"):
        optimal_acceptance(p, p, 2, "sorted")
