"""The sentence that a reader of an evaluation sees first."""

from __future__ import annotations

from typing import Any

import pytest

from pipelines.evaluate.findings import decisions, gains, headline
from selector.actions import Action
from selector.decision import Mode


def evaluation(*decides: bool) -> dict[str, Any]:
    rows = [
        {"temperature": 0.0, "top_p": 1.0, "replay_ratio": 1.186, "replay_error": 0.02},
        {"temperature": 0.2, "top_p": 1.0, "replay_ratio": 1.06, "replay_error": 0.01},
        {"temperature": 1.0, "top_p": 0.9, "replay_ratio": 1.0, "replay_error": 0.0},
    ]
    same = {
        "wall_ratio": 1.127,
        "wall_interval_95": [1.07, 1.22],
        "replay_over_rule": {"value": 1.04, "error": 0.008},
        "wall_over_rule": 1.05,
        "wall_over_rule_interval_95": [0.99, 1.11],
    }
    settings = [{**row, **same} for row in rows]
    modes = [
        Mode(row["temperature"], row["top_p"], Action(1, 6, 0), ("early", "light") if does else ()).row()
        for row, does in zip(rows, decides, strict=True)
    ]
    return {"summary": {"by_setting": settings}, "decisions": modes}


@pytest.mark.parametrize(
    ("decides", "sentence"),
    [
        (
            (True, True, False),
            "On this machine the selector, replayed on held-out texts, decodes "
            "1.19 times as fast as the best fixed tree at T=0, 1.06 times at "
            "T=0.2; at T=1, top-p=0.9 it drafts the fixed tree.",
        ),
        (
            (False, True, True),
            "On this machine the selector, replayed on held-out texts, decodes "
            "1.06 times as fast as the best fixed tree at T=0.2, 1.00 times at "
            "T=1, top-p=0.9; at T=0 it drafts the fixed tree.",
        ),
        (
            (False, False, False),
            "On this machine decisions gain nothing: the selector drafts the best fixed tree everywhere.",
        ),
    ],
)
def test_what_was_found_in_words(decides: tuple[bool, ...], sentence: str) -> None:
    assert headline(evaluation(*decides)) == sentence


def test_both_measurements_of_a_gain_stand_side_by_side() -> None:
    assert gains(evaluation(True, True, False)["summary"])[0] == {
        "setting": "T=0",
        "over the best fixed tree, decoded": "1.127 [1.070, 1.220]",
        "over the best fixed tree, replayed": "1.186 ±0.020",
        "over the lookup rule, decoded": "1.050 [0.990, 1.110]",
        "over the lookup rule, replayed": "1.040 ±0.008",
    }


def test_who_decides_and_why_is_told_in_sentences() -> None:
    found = evaluation(True, False, False)
    found["decisions"][1] |= {"feature_levels": ["match"], "rule": [4, 8]}
    network, rule, neither = decisions(found)
    assert network.startswith("T=0: The network decides here: it is two standard errors ahead of the best fixed tree")
    assert network.endswith("It is asked with early and then light features.")
    assert rule.startswith("T=0.2: The lookup rule decides here: ")
    assert rule.endswith("It copies 8 tokens after a match of 4 or more, and drafts (1, 6, 0) elsewhere.")
    assert neither.startswith("T=1, top-p=0.9: Neither") and neither.endswith("so (1, 6, 0) is drafted everywhere.")
    assert "1.19 times as fast as the best fixed tree at T=0, 1.06 times at T=0.2" in headline(found)
