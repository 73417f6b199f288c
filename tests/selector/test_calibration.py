from __future__ import annotations

import pytest
import torch

from selector.calibration import calibration, expected_error


def test_groups_hold_equally_many_roots_in_order_of_prediction() -> None:
    predicted = torch.tensor([4.0, 1.0, 3.0, 2.0])
    groups = calibration(predicted, predicted + torch.tensor([0.0, 0.5, 0.0, 0.5]), torch.arange(4), groups=2)
    assert [(g.roots, g.predicted, g.labelled) for g in groups] == [(2, 1.5, 2.0), (2, 3.5, 3.5)]
    assert expected_error(groups) == 0.25


def test_the_error_is_that_of_the_mean_over_prompts() -> None:
    """Against the spread of the means over many draws; roots of a prompt share most of their noise."""
    generator = torch.Generator().manual_seed(3)
    prompts = torch.arange(30).repeat_interleave(5)
    means, errors = [], []
    for _ in range(300):
        labels = torch.randn(30, generator=generator).repeat_interleave(5) + 0.1 * torch.randn(150, generator=generator)
        (group,) = calibration(torch.zeros(150), labels, prompts, groups=1)
        means.append(group.labelled)
        errors.append(group.error)
    assert torch.tensor(errors).mean() == pytest.approx(float(torch.tensor(means).std()), rel=0.1)


def test_few_roots_make_few_groups_and_one_prompt_no_error() -> None:
    groups = calibration(torch.tensor([2.0, 1.0]), torch.tensor([2.5, 1.5]), torch.tensor([7, 7]))
    assert [g.error for g in groups] == [None, None]
    assert expected_error(groups) == 0.5
