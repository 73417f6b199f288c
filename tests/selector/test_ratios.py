"""Quotients of replayed speeds, and their errors over sources."""

from __future__ import annotations

import math

import pytest
import torch

from selector.train.replay import Ratio, jackknifed

THREE = torch.tensor([[10.0, 10.0, 10.0, 10.0], [20.0, 10.0, 10.0, 10.0], [30.0, 10.0, 10.0, 10.0]])


def test_a_ratio_and_its_error_worked_by_hand() -> None:
    """(60 / 30) / (30 / 30) = 2; without one source 2.5, 2 and 1.5: the error is sqrt(2/3 x (0.25 + 0 + 0.25))."""
    ratio = jackknifed(THREE, torch.tensor([7, 3, 5]))
    assert ratio.value == pytest.approx(2)
    assert ratio.error == pytest.approx((1 / 3) ** 0.5)
    assert str(ratio) == "2.000 ±0.577"


def test_a_method_against_itself_is_one_for_certain() -> None:
    own_X2 = torch.rand(9, 2, generator=torch.Generator().manual_seed(12), dtype=torch.float64) + 0.1
    for source_X in (torch.arange(9), torch.arange(9) % 2, torch.zeros(9, dtype=torch.int64)):
        assert jackknifed(own_X2.repeat(1, 2), source_X) == Ratio(1.0, 0.0)


def test_one_source_tells_no_error() -> None:
    ratio = jackknifed(THREE, torch.zeros(3, dtype=torch.int64))
    assert ratio.value == pytest.approx(2)
    assert ratio.error == math.inf


def test_texts_of_one_source_move_together() -> None:
    """Sources in any number of texts, in any order, have the error of their sums; as sources of their own the texts
    would seem to tell more."""
    source_X = torch.tensor([0, 1, 2, 0, 1, 2])
    halves_X4 = torch.cat([THREE * 0.25, THREE * 0.75])
    expected = jackknifed(THREE, torch.arange(3))
    split = jackknifed(halves_X4, source_X)
    assert (split.value, split.error) == pytest.approx((expected.value, expected.error))
    shuffled_X = torch.tensor([5, 0, 3, 1, 4, 2])
    moved = jackknifed(halves_X4[shuffled_X], source_X[shuffled_X])
    assert (moved.value, moved.error) == pytest.approx((expected.value, expected.error))
    assert jackknifed(halves_X4, torch.arange(6)).error < 0.9 * expected.error
