"""Replay against the walk along a text that its formula describes; quotients of replayed speeds, and their errors over
sources."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from selector.actions import ActionSpace
from selector.train.replay import Ratio, jackknifed, outcomes, replay
from tests.selector.synthetic import some_survivals


def walked(
    survivals_RS: Tensor, action_R: Tensor, seconds_R: Tensor, sizes: list[int], space: ActionSpace
) -> list[tuple[float, float, float]]:
    """Tokens, seconds and steps of each text, as the formula of `selector.train.replay` says it."""
    law_RJ, found, begin = outcomes(survivals_RS, action_R, space), [], 0
    for size in sizes:
        begins_N, tokens, seconds, steps = torch.zeros(size + law_RJ.shape[1] + 1, dtype=torch.float64), 0.0, 0.0, 0.0
        begins_N[0] = 1
        for n in range(size):
            here = float(begins_N[n])
            for more, probability in enumerate(law_RJ[begin + n].tolist(), 1):
                begins_N[n + more] += here * probability
                tokens += here * probability * min(more, size - n)
            seconds, steps = seconds + here * float(seconds_R[begin + n]), steps + here
        found.append((tokens, seconds, steps))
        begin += size
    return found


def test_replay_is_the_walk_along_every_text() -> None:
    """Texts of different lengths, one of them without a root; a lookup may reach further than any tree."""
    sizes, space = [7, 1, 0, 12], ActionSpace(3, 2, 2, (2, 6))
    size_X, survivals_RS = torch.tensor(sizes), some_survivals(sizes, space, seed=6)
    generator = torch.Generator().manual_seed(7)
    seconds_R = torch.rand(sum(sizes), generator=generator) + 0.5
    mixed_R = torch.randint(len(space), (sum(sizes),), generator=generator)
    for action_R in (mixed_R, *(torch.full_like(mixed_R, a) for a in range(len(space)))):
        mine = replay(survivals_RS, action_R, seconds_R, size_X, space)
        expected = torch.tensor(walked(survivals_RS, action_R, seconds_R, sizes, space), dtype=torch.float64)
        found = torch.stack([mine.tokens_X, mine.seconds_X, mine.steps_X], dim=-1)
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-12)
        assert mine.tokens_X.tolist() == pytest.approx(sizes, rel=1e-6)
        assert float(mine.visits_R.sum()) == pytest.approx(float(mine.steps_X.sum()))


THREE = torch.tensor([[10.0, 10.0, 10.0, 10.0], [20.0, 10.0, 10.0, 10.0], [30.0, 10.0, 10.0, 10.0]])


def test_a_ratio_and_its_error_worked_by_hand() -> None:
    """(60 / 30) / (30 / 30) = 2; without one source 2.5, 2 and 1.5: the error is sqrt(2/3 x (0.25 + 0 + 0.25)). One
    source tells none."""
    ratio, of_one = (jackknifed(THREE, torch.tensor(source_X)) for source_X in ([7, 3, 5], [0, 0, 0]))
    assert (ratio.value, ratio.error) == pytest.approx((2, (1 / 3) ** 0.5))
    assert str(ratio) == "2.000 ±0.577"
    assert of_one.value == pytest.approx(2) and of_one.error == math.inf


def test_a_method_against_itself_is_one_for_certain() -> None:
    own_X2 = torch.rand(9, 2, generator=torch.Generator().manual_seed(12), dtype=torch.float64) + 0.1
    for source_X in (torch.arange(9), torch.arange(9) % 2, torch.zeros(9, dtype=torch.int64)):
        assert jackknifed(own_X2.repeat(1, 2), source_X) == Ratio(1.0, 0.0)
