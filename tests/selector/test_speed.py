"""Speed over whole texts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from selector.actions import Action
from selector.deciding import outcome
from selector.speed import by_text, over_texts
from tests.selector.synthetic import SPACE, roots


def test_sums_are_by_text_in_the_order_of_their_numbers() -> None:
    values_BX = torch.tensor([[1.0, 10.0], [2.0, 20.0], [4.0, 40.0]])
    assert by_text(values_BX, torch.tensor([7, 3, 7])).tolist() == [[2, 20], [5, 50]]


def test_it_is_that_of_decoding_the_texts() -> None:
    """Two texts of 240 tokens. A step yields 6 tokens in the easy one with a long tree and 3 with a short one; 1.5 and
    1.2 in the hard one. Traces were made with the short tree, so the hard text has 200 steps and the easy one 80."""
    tokens_BX = torch.tensor([[6.0, 3.0]] * 80 + [[1.5, 1.2]] * 200)
    prompt_B = torch.tensor([0] * 80 + [1] * 200)
    steps_P1 = by_text(torch.ones(280, 1), prompt_B)
    long, short = over_texts(by_text(tokens_BX, prompt_B), steps_P1).tolist()
    assert long == pytest.approx(480 / (240 / 6 + 240 / 1.5))
    assert short == pytest.approx(480 / 280)
    assert float(tokens_BX[:, 0].mean()) > 1.1 * long  # what the steps of another tree would promise


def test_roots_and_what_is_played_there_are_judged_alike() -> None:
    data = replace(roots(30), prompt_B=torch.arange(30) // 5, weight_B=torch.arange(1.0, 31.0))
    action = SPACE.index(Action(2, 3, 4))
    data = replace(data, trunk_BSA=data.mean_BA.unsqueeze(1).expand_as(data.trunk_BSA))
    played = outcome(data, torch.full((30, 2), action), data.seconds_BA)
    assert played.speed() == pytest.approx(float(data.speeds(data.mean_BA, data.seconds_BA)[action]))
    assert played.speed() == pytest.approx(1 / float(played.seconds_per_token().mean()))
    ones_BA = torch.ones_like(data.mean_BA)
    assert torch.allclose(data.efficiencies(data.mean_BA), data.speeds(data.mean_BA, ones_BA))
