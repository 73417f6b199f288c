"""What the text says of the place that a lookup would copy from, by hand; test_features searches whole texts."""

from __future__ import annotations

import pytest

from data_gen.features.rows import TargetHistory
from data_gen.features.text import TextHistory
from data_gen.models.sampling import Sampling
from selector.schema import EARLY_SCALARS

A, B, C, D, STOP = range(5)


def known(prompt: list[int], generated: list[int], entropies: list[float]) -> dict[str, float]:
    history = TextHistory(prompt)
    of_target = TargetHistory(history)
    for token, entropy in zip(generated, entropies, strict=True):
        history.add([token])
        of_target.add([entropy])
    return dict(zip([scalar.name for scalar in EARLY_SCALARS], of_target.scalars(Sampling())[0], strict=True))


def test_half_of_the_precedents_speak_for_what_would_be_copied() -> None:
    """`a b c . a b d . a b`: `. a b` stood there once, and `d` followed; `a b` twice, and `d` followed once."""
    found = known([A, B, C, STOP], [A, B, D, STOP, A, B], [0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    expected = {
        **{
            "seen_1": 2,
            "agree_1": 0.5,
            "seen_2": 2,
            "agree_2": 0.5,
            "seen_3": 1,
            "agree_3": 1,
            "seen_4": 0,
            "agree_4": 0,
        },
        **{"source_steady": 2, "source_in_prompt": 0},
        "source_entropy_1": 0.3,  # before `d`
        "source_entropy_2": 0.35,
        "source_entropy_4": 0.45,
        "source_entropy_16": 0.45,  # a lookup of 16 would copy `d . a b` four times
        "source_known": 1,
        "source_foretold": 0,  # `c` was foretold where `d` came
        "source_copied_2": 0,  # and after `d`, which was new, nothing
        "source_copied_4": 0.5,  # but `a b` was after `.`
        "source_copied_16": 0.5,  # no more is there
        "second_match": 2,  # `a b` at the beginning
        "second_agrees": 0,  # where `c` followed
    }
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_of_the_prompt_no_entropies_are_known() -> None:
    """`a b c d a b`, the last two generated: what is copied stands in the prompt, and runs on into them. What lookups
    foretold is known of the prompt, too."""
    found = known([A, B, C, D], [A, B], [1.0, 3.0])
    usual = found["target_entropy_mean_0.8"]
    assert usual == pytest.approx((0.8 * 1.0 + 3.0) / 1.8)
    assert [found[f"source_entropy_{count}"] for count in (1, 2, 4)] == pytest.approx([usual, usual, 2.0])
    assert found["source_known"] == 0.5
    assert (found["source_in_prompt"], found["source_foretold"], found["source_copied_4"]) == (1, 0, 0.25)


def test_where_the_last_token_is_new_there_is_no_source() -> None:
    found = known([A, B], [A, D], [1.0, 1.0])
    of_place = (
        *("source_known", "source_foretold", "source_steady", "source_in_prompt", "source_copied_"),
        *("second_", "third_", "seen_", "agree_"),
    )
    names = [name for name in found if name.startswith(of_place)]
    assert [found[name] for name in names] == [0.0] * 20
    assert found["source_entropy_8"] == found["target_entropy_mean_0.8"]
