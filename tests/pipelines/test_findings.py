"""The sentence that a reader of an evaluation sees first."""

from __future__ import annotations

from typing import Any

import pytest

from pipelines.evaluate.findings import details, headline


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
        "paced_ratio": {"value": 1.15, "error": 0.03},
        "paced_over_rule": None,
    }
    settings = [{**row, **same} for row in rows]
    decisions = [
        {
            "temperature": row["temperature"],
            "top_p": row["top_p"],
            "feature_levels": ["early", "light"] if does else [],
            "rule": None,
            "action": [1, 6, 0],
        }
        for row, does in zip(rows, decides, strict=True)
    ]
    return {"summary": {"by_setting": settings}, "decisions": decisions}


@pytest.mark.parametrize(
    ("decides", "sentence"),
    [
        (
            (True, True, False),
            "On this machine the selector, replayed on held-out texts, decodes "
            "1.19 times as fast as the best fixed tree at T=0, 1.06 times at "
            "T=0.2; at T=1, top-p=0.9 it keeps the fixed tree.",
        ),
        (
            (False, True, True),
            "On this machine the selector, replayed on held-out texts, decodes "
            "1.06 times as fast as the best fixed tree at T=0.2, 1.00 times at "
            "T=1, top-p=0.9; at T=0 it keeps the fixed tree.",
        ),
        (
            (False, False, False),
            "On this machine nothing is gained by deciding: the selector keeps the best fixed tree everywhere.",
        ),
    ],
)
def test_what_was_found_in_words(decides: tuple[bool, ...], sentence: str) -> None:
    assert headline(evaluation(*decides)) == sentence


def test_both_measurements_of_a_gain_stand_side_by_side() -> None:
    first, _, last = details(evaluation(True, True, False))
    assert first == {
        "setting": "T=0",
        "decides": "yes, early then light",
        "replayed ± error": "1.186 ±0.020",
        "decoded [95%]": "1.127 [1.070, 1.220]",
        "replayed at decoded times": "1.150 ±0.030",
        "over the rule, replayed": "1.040 ±0.008",
        "at decoded times": "",
    }
    assert last["decides"] == "no, drafts (1, 6, 0)"


def test_a_rule_is_said_in_words() -> None:
    found = evaluation(False, False, False)
    found["decisions"][1] |= {"feature_levels": ["match"], "rule": [4, 8]}
    assert details(found)[1]["decides"] == "by rule: lookup 8 from a match of 4 on, else (1, 6, 0)"
    assert "1.06 times as fast as the best fixed tree at T=0.2" in headline(found)
