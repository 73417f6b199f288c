"""The ceiling that labels can support."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from selector.data import Roots
from selector.oracle import Oracle, cross_fitted, oracles
from tests.selector.synthetic import Traces, roots


def noisy(data: Roots, noise: float, seed: int) -> Roots:
    """The same roots with labels of two samples, each with its own error in tokens."""
    generator = torch.Generator().manual_seed(seed)
    first_BA, second_BA = (
        data.mean_BA + noise * torch.randn(data.mean_BA.shape, generator=generator) for _ in range(2)
    )
    return replace(data, mean_BA=(first_BA + second_BA) / 2, half_BA=first_BA)


def by_hand(train: Roots, validation: Roots) -> float:
    """Root by root and half by half, without tensors."""

    def speed(data: Roots, choose: Callable[[Tensor, Tensor], int]) -> float:
        per_token = []
        for prompt in data.prompt_B.unique():
            tokens = seconds = 0.0
            for b in (data.prompt_B == prompt).nonzero().flatten().tolist():
                first, second = data.half_BA[b], 2 * data.mean_BA[b] - data.half_BA[b]
                for fitted, scored in ((first, second), (second, first)):
                    action = choose(fitted, data.static_seconds_BA[b])
                    tokens += float(data.weight_B[b] * scored[action])
                    seconds += float(data.weight_B[b] * data.static_seconds_BA[b, action])
            per_token.append(seconds / tokens)
        return len(per_token) / sum(per_token)

    actions = range(train.mean_BA.shape[1])
    static = max(actions, key=lambda a: speed(train, lambda e, t: a))
    base = speed(train, lambda e, t: static)

    def chosen(data: Roots, gain: float) -> float:
        return speed(data, lambda e, t: max(actions, key=lambda a: float(e[a]) - gain * float(t[a])))

    gain = base
    for _ in range(6):
        gain = chosen(train, gain)
    best = chosen(validation, gain)
    return best / speed(validation, lambda e, t: static)


def test_it_is_what_a_loop_over_the_roots_gives() -> None:
    train, validation = (
        replace(noisy(roots(count, seed=seed), 0.5, seed), prompt_B=torch.arange(count) // 3)
        for count, seed in ((12, 0), (8, 5))
    )
    oracle = cross_fitted(train, validation)
    assert oracle.ratio == pytest.approx(by_hand(train, validation), rel=1e-5)
    assert oracle.error > 0


def test_it_finds_what_there_is_to_gain() -> None:
    """Roots of two kinds, labels almost exact: as fast as the best action of each kind."""
    (oracle,) = oracles(Traces(128))
    assert oracle.ratio - oracle.error > 1.05
    assert oracle.gap_closed(oracle.ratio) == pytest.approx(1.0)
    assert oracle.gap_closed(1.0) == 0.0


@pytest.mark.parametrize("noise", [0.3, 3.0])
def test_it_does_not_reward_noise(noise: float) -> None:
    """All roots alike: there is nothing to choose, and the best of many noisy labels is no better than the others."""
    train, validation = roots(200), roots(200, seed=5)
    alike = [replace(data, mean_BA=train.mean_BA.mean(0).expand_as(data.mean_BA)) for data in (train, validation)]
    prompt_B = torch.arange(200) // 20  # a prompt's tokens are its labels' sum: with so much noise, of many roots
    alike = [replace(noisy(data, noise, seed), prompt_B=prompt_B) for seed, data in enumerate(alike)]
    oracle = cross_fitted(*alike)
    assert oracle.ratio < 1 + 2 * oracle.error
    assert oracle.gap_closed(1.02) is None
    peeking = cross_fitted(*(replace(data, half_BA=data.mean_BA) for data in alike))  # both halves are the same labels
    assert peeking.ratio > 1.02


def test_a_ceiling_within_its_error_is_none() -> None:
    assert Oracle(1.02, 0.03).gap_closed(1.01) is None
    assert Oracle(1.04, 0.03).gap_closed(1.01) == pytest.approx(0.25)
