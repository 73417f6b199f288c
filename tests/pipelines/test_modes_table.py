"""What is said of decisions, and of their ceiling, over sampling settings."""

from __future__ import annotations

import pytest
from rich.console import Console

from pipelines.comparison import summary_table
from pipelines.export import as_exported
from pipelines.train import ceiling, modes_table


def mode(temperature: float, ratio: float, oracle: float, closed: float | None) -> dict:
    ways = [
        {"at_root": at_root, "on_trunk": False, "ratio": ratio, "error": 0.01, "decoded": None}
        for at_root in (True, False)
    ]
    return {
        "temperature": temperature,
        "top_p": 1.0,
        "action": (1, 4, 0),
        **ways[0],
        "ways": ways,
        "oracle": {"ratio": oracle, "error": 0.02, "gap_closed": closed},
    }


def shown(table: object) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(table)
    return captured.get()


def test_means_are_over_the_settings_where_there_is_a_ceiling() -> None:
    found = ceiling([mode(1.0, 1.02, 1.1, 0.2), mode(0.2, 1.03, 1.05, 0.6), mode(0.6, 1.0, 0.9, None)])
    assert found == {"oracle_ratio": pytest.approx((1.1 + 1.05 + 0.9) / 3), "gap_closed": pytest.approx(0.4)}
    assert ceiling([mode(0.6, 1.0, 0.9, None)])["gap_closed"] is None


def test_tables_say_where_it_is_undefined() -> None:
    text = shown(modes_table([mode(1.0, 1.02, 1.1, 0.2), mode(0.6, 1.0, 0.9, None)], "traversal"))
    assert "1.100 ±0.020" in text and "20%" in text and "undefined" in text
    summary = {"selector_time_share": 0.01, **ceiling([mode(0.6, 1.0, 0.9, None)])}
    assert "undefined" in shown(summary_table(summary)) and "0.900" in shown(summary_table(summary))


def test_the_artefact_says_what_a_dropped_decision_was_worth() -> None:
    made = mode(0.2, 1.1, 1.2, 0.0)
    tried = {"ratio": 1.01, "error": 0.02, "prompts": 64}
    made["ways"] = [made["ways"][1], {**made["ways"][0], "decoded": tried, "verifier_of": [0] * 233}]
    exported = as_exported(made)
    static, dropped = exported["ways"]
    assert not static["at_root"] and static["decoded"] is None
    assert dropped == {"at_root": True, "on_trunk": False, "ratio": 1.1, "error": 0.01, "decoded": tried}
    assert "oracle" not in exported and "oracle" in made
