"""Means over training roots by keys: what is kept, and what a text does not say of itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from selector.runtime.tokens import FILE, LEAST, WEIGHT, TokenStatistics
from selector.schema import MOST_COUNTED

GENERATOR = np.random.default_rng(0)
KEYS_RJ = GENERATOR.integers(0, 6, (300, 2)) + np.array([[0, 100]])
VALUES_RK = GENERATOR.random((300, 2)) * 8
TEXT_R = np.repeat(np.arange(10), 30)
FITTED, WITHOUT_RF = TokenStatistics.fit(KEYS_RJ, VALUES_RK, TEXT_R)


def plain(roots: np.ndarray, key: int) -> list[float]:
    """The scalars of one key by its definition."""
    own = VALUES_RK[roots & (key == KEYS_RJ).any(1)]
    means = (own.sum(0) + WEIGHT * VALUES_RK.mean(0)) / (len(own) + WEIGHT)
    return [*means, min(len(own), MOST_COUNTED)]


def test_means_are_drawn_to_those_of_all_roots() -> None:
    """Which an unknown key has."""
    for keys in ([0], [3], [105], [4, 102], [77]):
        expected = [number for key in keys for number in plain(np.ones(300, bool), key)]
        assert FITTED.of(np.array([keys]))[0] == pytest.approx(expected)
    assert expected == pytest.approx([*VALUES_RK.mean(0), 0])
    assert TokenStatistics.empty().of(np.array([[77], [3]])).tolist() == [[0, 0, 0]] * 2


def test_a_text_does_not_say_what_is_learned_of_it() -> None:
    for root in (0, 31, 299):
        others = TEXT_R[root] != TEXT_R
        expected = [number for key in KEYS_RJ[root] for number in plain(others, key)]
        assert WITHOUT_RF[root] == pytest.approx(expected)


def test_seldom_seen_keys_are_not_kept() -> None:
    keys_RJ = np.array([[1], [2], [2], [3]])
    statistics, _ = TokenStatistics.fit(keys_RJ, np.ones((4, 2)), np.arange(4))
    assert LEAST == 2 and statistics.keys_N.tolist() == [2]


def test_files_hold_what_was_fitted(tmp_path: Path) -> None:
    safetensors.numpy.save_file(FITTED.to_tensors(), tmp_path / FILE)
    again = TokenStatistics.load(tmp_path)
    keys_RJ = np.array([[3, 105]])
    assert again.of(keys_RJ) == pytest.approx(FITTED.of(keys_RJ), rel=1e-6)
    assert len(TokenStatistics.load(tmp_path / "none").keys_N) == 0
