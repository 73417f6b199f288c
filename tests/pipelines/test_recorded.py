"""Decoded steps beside the labels of their roots."""

from __future__ import annotations

import pytest
import torch

from pipelines.data.recorded import against_labels, z_of
from selector.actions import Action, ActionSpace
from selector.train.replay import lawful, outcomes


def test_z_of_steps_that_follow_their_labels_is_normal() -> None:
    """With 25 steps, which begin wherever the last one ended; an alarm at 3 is false once in 370 cases."""
    rng, space, trials = torch.Generator().manual_seed(2), ActionSpace.recorded(), 2000
    survivals_RS = lawful(torch.rand(40, len(space.sums_SA), generator=rng), space)
    action_N = torch.randint(len(space), (25,), generator=rng)
    found = []
    for _ in range(trials):
        roots, tokens = [0], []
        for action in action_N:
            law_J = outcomes(survivals_RS[roots[-1:]], action[None], space)[0].clamp(min=0)
            tokens.append(int(torch.multinomial(law_J, 1, generator=rng)) + 1)
            roots.append((roots[-1] + tokens[-1]) % 40)
        found.append(z_of(against_labels(survivals_RS[roots[:-1]], action_N, torch.tensor(tokens), space)))
    z = torch.tensor(found)
    assert abs(float(z.mean())) < 0.1 and float(z.std()) == pytest.approx(1, abs=0.06)
    assert float((z.abs() > 3).double().mean()) < 3 / 370


def test_a_mean_beyond_what_a_tree_yields_is_not_taken_for_certain() -> None:
    """One draw of siblings may give a tree of six levels a mean of 13 tokens. Within its bounds a mean without variance
    is certain: a step that yields another number is an alarm."""
    space = ActionSpace.recorded()
    action = space.index(Action(1, 6, 0))
    chain = space.sums_SA[:, action] > 0
    for survival, quiet in ((2.0, True), (1.0, False)):
        survivals_1S = torch.where(chain, survival, 0.0)[None]
        steps_13 = against_labels(survivals_1S, torch.tensor([action]), torch.tensor([4]), space)
        assert float(steps_13[0, 1]) == pytest.approx(1 + 6 * survival)
        assert (abs(z_of(steps_13)) < 4) == quiet
