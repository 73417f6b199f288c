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


def plain(roots: np.ndarray, key: int) -> list[float]:
    """The scalars of one key by its definition."""
    own = VALUES_RK[roots & (key == KEYS_RJ).any(1)]
    means = (own.sum(0) + WEIGHT * VALUES_RK.mean(0)) / (len(own) + WEIGHT)
    return [*means, min(len(own), MOST_COUNTED)]


def test_means_are_drawn_to_those_of_all_roots() -> None:
    found, _ = TokenStatistics.fit(KEYS_RJ, VALUES_RK, TEXT_R)
    for key in (0, 3, 105):
        assert found.of(np.array([key])) == pytest.approx(plain(np.ones(300, bool), key))
    assert found.of(np.array([4, 102])) == pytest.approx(
        [*plain(np.ones(300, bool), 4), *plain(np.ones(300, bool), 102)]
    )


def test_an_unknown_key_has_the_mean_of_all_roots() -> None:
    found, _ = TokenStatistics.fit(KEYS_RJ, VALUES_RK, TEXT_R)
    assert found.of(np.array([77])) == pytest.approx([*VALUES_RK.mean(0), 0])
    assert TokenStatistics.empty().of(np.array([77])).tolist() == [0, 0, 0]


def test_a_text_does_not_say_what_is_learned_of_it() -> None:
    _, without_RF = TokenStatistics.fit(KEYS_RJ, VALUES_RK, TEXT_R)
    for root in (0, 31, 299):
        others = TEXT_R[root] != TEXT_R
        expected = [number for key in KEYS_RJ[root] for number in plain(others, key)]
        assert without_RF[root] == pytest.approx(expected)


def test_seldom_seen_keys_are_not_kept() -> None:
    keys_RJ = np.array([[1], [2], [2], [3]])
    found, _ = TokenStatistics.fit(keys_RJ, np.ones((4, 2)), np.arange(4))
    assert LEAST == 2 and found.keys_N.tolist() == [2]


def test_files_hold_what_was_fitted(tmp_path: Path) -> None:
    found, _ = TokenStatistics.fit(KEYS_RJ, VALUES_RK, TEXT_R)
    safetensors.numpy.save_file(found.to_tensors(), tmp_path / FILE)
    again = TokenStatistics.load(tmp_path)
    assert again.of(np.array([3, 105])) == pytest.approx(found.of(np.array([3, 105])), rel=1e-6)
    assert len(TokenStatistics.load(tmp_path / "none").keys_N) == 0
