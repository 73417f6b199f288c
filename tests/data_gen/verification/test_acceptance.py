"""The optimal acceptance against a linear program over all drafted sets, and verifiers against the optimum."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from scipy.optimize import linprog

from data_gen.verification import STYLED, VERIFIERS, get_verifier, optimal_acceptance
from selector.actions import STYLES
from tests.data_gen.worlds import KINDS, World

LESS = ("nss",)  # of a single draft these accept less than the optimum
SERVED = [(name, style) for name, cls in (VERIFIERS | STYLED).items() for style in cls.styles]


@cache
def worlds() -> list[World]:
    return [World(2 + seed % 4, 1, KINDS[seed % len(KINDS)], seed) for seed in range(20)]


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


def mean_acceptance(world: World, name: str, k: int, style: str) -> float:
    """P(a node's token is one of its k children), from the law on a tree of one level, over all drafts."""
    law_CV = world.appended_law(get_verifier(name, style), world.delayed_trees(k, 0, 1, style))
    return 1 - float(law_CV[world.number[()]].sum())


@pytest.mark.parametrize(("name", "style"), SERVED)
@pytest.mark.parametrize("k", [1, 2, 3])
def test_no_verifier_accepts_more_than_the_optimum(name: str, style: str, k: int) -> None:
    for world in worlds():
        optimum = optimal_acceptance(world.target[()], world.draft[()], k, style)
        assert (accepted := mean_acceptance(world, name, k, style)) <= optimum + 1e-12
        if name == "greedy" or (k == 1 and name not in LESS):
            assert accepted == pytest.approx(optimum, abs=1e-12)


@pytest.mark.parametrize("k", [2, 3])
def test_verifiers_with_a_short_formula_have_its_acceptance(k: int) -> None:
    for world in worlds():
        p_V, q_V = world.target[()], world.draft[()]
        overlap = p_V.minimum(q_V).sum()
        expected = {
            "nss": (p_V * (1 - (1 - q_V) ** k)).sum(),
            "naive": overlap,
            "naive_tree": overlap + ((p_V - q_V).clamp(min=0) * (1 - (1 - q_V) ** (k - 1))).sum(),
        }
        for name, value in expected.items():
            assert mean_acceptance(world, name, k, "iid") == pytest.approx(float(value), abs=1e-12), name


def test_bad_arguments_are_named() -> None:
    p = torch.tensor([0.5, 0.5])
    with pytest.raises(ValueError, match="style 'sorted'; styles are iid, without_replacement, greedy"):
        optimal_acceptance(p, p, 2, "sorted")
