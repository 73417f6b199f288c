"""Intervals of ratios over sources."""

from __future__ import annotations

import math

import pytest
import torch

from pipelines.evaluate.table import paired, with_interval

TRIALS = 1500  # one standard error of a coverage of 95% is then 0.6 points


def decoded(sources: int, own: float, sizes: float, generator: torch.Generator) -> torch.Tensor:
    """Tokens and seconds of two methods equally fast on average, [sources, 4]: sources differ in their size and, alike
    for both methods, in their difficulty; `own` is the scatter of a method by itself."""
    size, difficulty, *noise = (torch.randn(4, sources, generator=generator)).unbind()
    tokens = (sizes * size).exp()
    mine, other = ((0.4 * difficulty + own * each).exp() * tokens for each in noise)
    return torch.stack([tokens, mine, tokens, other], dim=-1)


@pytest.mark.parametrize(("sources", "own", "sizes"), [(6, 0.4, 0.3), (12, 0.3, 0.8), (30, 0.1, 0.3)])
def test_intervals_cover_the_true_ratio_as_often_as_they_say(sources: int, own: float, sizes: float) -> None:
    generator = torch.Generator().manual_seed(sources)
    of = torch.arange(sources)
    covered = 0
    for _ in range(TRIALS):
        low, high = with_interval(decoded(sources, own, sizes, generator), of)[1]
        covered += low <= 1 <= high
    assert covered / TRIALS == pytest.approx(0.95, abs=0.03)


def test_prompts_of_one_source_are_one_observation() -> None:
    """In any order. A prompt that stands there four times says no more; its source's share is larger."""
    sums_XC = decoded(6, 0.3, 0.3, torch.Generator().manual_seed(1))
    once = with_interval(sums_XC, torch.arange(6))
    parts, of = (sums_XC / 4).repeat_interleave(4, dim=0), torch.arange(6).repeat_interleave(4)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(2))
    value, bounds = with_interval(parts[order], of[order])
    assert value == pytest.approx(once[0]) and bounds == pytest.approx(once[1])


def test_what_is_certain_has_no_width_and_a_single_source_no_bounds() -> None:
    sums_XC = decoded(6, 0.3, 0.3, torch.Generator().manual_seed(1))
    twice = torch.cat([sums_XC[:, :2], sums_XC[:, :2] * torch.tensor([1, 2])], dim=-1)
    assert with_interval(twice, torch.arange(6)) == (pytest.approx(2), pytest.approx([2, 2]))
    assert with_interval(sums_XC, torch.zeros(6))[1] == [0, math.inf]
    assert with_interval(sums_XC[:, [0, 1, 0, 1]], torch.zeros(6)) == (1, [1, 1])


def test_paired_ratios_by_hand() -> None:
    """Two prompts of one source and one of another, in two rounds: the sources' means are log 2 and log 8. With one
    degree of freedom the bounds are 12.706 standard errors away, each error half the distance."""
    logs_XR = torch.tensor([[2.0, 0.5], [1.0, 16.0], [8.0, 8.0]]).log()
    value, (low, high) = paired(logs_XR, torch.tensor([4, 4, 7]))
    assert value == pytest.approx(4)
    assert (low, high) == pytest.approx((4 / 2**12.7062, 4 * 2**12.7062), rel=1e-4)
    assert paired(logs_XR, torch.tensor([4, 4, 4])) == (pytest.approx(2 ** (5 / 3)), [0, math.inf])
    assert paired(0 * logs_XR, torch.tensor([4, 4, 4])) == (1, [1, 1])
    assert paired(0 * logs_XR + math.log(2), torch.tensor([4, 4, 7]))[1] == pytest.approx([2, 2])


def test_paired_intervals_cover_the_true_ratio_as_often_as_they_say() -> None:
    """Prompts of one source share a part of their ratio, rounds of one prompt another, and each round has noise."""
    sources = 4
    generator = torch.Generator().manual_seed(sources)
    of, covered = torch.arange(sources).repeat_interleave(3), 0
    for _ in range(TRIALS):
        parts = (torch.randn(size, generator=generator) for size in ((sources, 1), (3 * sources, 1), (3 * sources, 2)))
        source, prompt, noise = parts
        value, (low, high) = paired(math.log(1.2) + 0.2 * source[of] + 0.1 * prompt + 0.3 * noise, of)
        assert low < value < high
        covered += low <= 1.2 <= high
    assert covered / TRIALS == pytest.approx(0.95, abs=0.02)
