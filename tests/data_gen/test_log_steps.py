"""Labels from an engine's steps: hits at every token, and what follows for drafts that were not
made."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from data_gen.texts.log_lines import Drafted
from data_gen.texts.log_steps import Correction, predicted

NAN = np.nan
ALWAYS, AGAIN = 0.6, 0.3  # of the tokens; and of the others those that a fresh draft has right


def survivals(steps: list[list[int]], positions: int) -> NDArray[np.float32]:
    return Drafted(steps=steps).survivals_RD("head", positions)


def test_each_token_has_the_outcome_of_its_steps_draft() -> None:
    """Two of three, then two of two, and one of which the text's end cuts two."""
    hit_R, depth_R = predicted(survivals([[1, 3, 2], [4, 2, 2], [7, 3, 3]], 9))
    np.testing.assert_array_equal(hit_R, [NAN, 1, 1, 0, 1, 1, NAN, 1, 1])
    np.testing.assert_array_equal(depth_R, [4, 1, 2, 3, 1, 2, 3, 1, 2])


def test_survivals_become_the_outcomes_that_they_mean() -> None:
    drafted = Drafted(survivals=[[0.5, 0.25], None, [1.0, 0.5]])
    hit_R, _ = predicted(drafted.survivals_RD("head", 3))
    np.testing.assert_array_equal(hit_R, [0.5, 0.5, 1])


def test_labels_elsewhere_are_products_over_the_tokens() -> None:
    """The miss at 2 may be a hit of a draft from 2, the token 3 is a hit at any depth, and the
    token 4, which nothing predicted, is a hit of a longer draft with `further`."""
    steps_RD = survivals([[0, 3, 2], [3, 1, 1], [5, 3, 0]], 6)
    correction = Correction(0.4, 0.0, 0.8, 0.5, False, 0.0)
    near = 0.5 + 0.4 * 0.5
    expected = [
        [1, 1, 0],
        [1, 0.4, 0.4],
        [0.4, 0.4, 0.4 * 0.5],
        [1, 0.5, 0],
        [near, 0, 0],
        [0, 0, 0],
    ]
    imputed_RD = correction.imputed(steps_RD)
    np.testing.assert_allclose(imputed_RD, expected, rtol=1e-6)
    assert correction.imputed(imputed_RD) is imputed_RD


def served(lengths: list[int], positions: int, seed: int) -> NDArray[np.float32]:
    """Steps of random lengths, by a drafter that has a token right always, or only with its first
    token, or never."""
    generator = np.random.default_rng(seed)
    always_R = generator.random(positions) < ALWAYS
    fresh_R = always_R | (generator.random(positions) < AGAIN)
    steps = []
    position = 0
    while position < positions - 10:
        length = int(generator.choice(lengths))
        accepted = 0
        if fresh_R[position]:
            accepted = 1
            while accepted < length and always_R[position + accepted]:
                accepted += 1
        steps.append([position, length, accepted])
        position += accepted + 1
    return survivals(steps, positions)


def test_steps_of_several_lengths_tell_how_often_a_fresh_draft_hits_again() -> None:
    correction = Correction.of([served([1, 2, 3, 4, 5], 10_000, seed) for seed in range(4)])
    assert correction.is_told
    error = (correction.high - correction.again) / 2
    assert error < 0.05 and abs(correction.again - AGAIN) < 3 * error


@pytest.mark.parametrize("lengths", [[5], [1], [2, 3]])
def test_steps_of_one_length_bound_it(lengths: list[int]) -> None:
    correction = Correction.of([served(lengths, 10_000, seed=7)])
    fresh = ALWAYS + (1 - ALWAYS) * AGAIN
    assert not correction.is_told and correction.low == 0
    assert correction.high == pytest.approx(fresh, abs=0.05) and correction.high > AGAIN
