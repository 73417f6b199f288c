"""Tables as HTML: what stands where, and what a narrow screen folds."""

from __future__ import annotations

import re

from pipelines.report.page import table
from pipelines.run import is_numeric

ROWS = [
    {"method": "selector", "decoded": "2.50 [2.10, 2.90]", "replayed": "2.45 ±0.04", "drafts": "", "seconds": 1.5},
    {"method": "plain", "decoded": "1.00 *", "replayed": "", "drafts": "(1, 0, 0)", "seconds": -3.0},
]


def cells(page: str, kind: str) -> set[str]:
    """The columns whose cells have a class."""
    return {name for classes, name in re.findall(r"<td class='([^']*)' data-label='([^']*)'", page) if kind in classes}


def test_words_are_aligned_at_the_left_and_numbers_at_the_right() -> None:
    assert cells(table(ROWS), "words") == {"method", "drafts"}
    assert is_numeric(["0.5", "12% ", "-3", "1,024", "", "0.97 ±0.01 *"])
    assert not is_numeric(["1", "6 texts"]) and not is_numeric(["(1, 0, 0)"])


def test_a_narrow_screen_shows_three_cells_of_a_card_and_unfolds_the_others() -> None:
    page = table(ROWS, matter=["selector"])
    assert cells(page, "more") == {"seconds"}
    assert re.findall(r"<tr( class='more')?><td[^>]*>(\w+)", page) == [("", "selector"), (" class='more'", "plain")]
    assert page.count("type='checkbox'") == 1
    assert "checkbox" not in table([{"a": "1", "b": "2"}])  # nothing is folded


def test_what_a_table_holds_is_text() -> None:
    assert "<b>" not in table([{"<b>": "<b>"}]) and table([]) == ""
