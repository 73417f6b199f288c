"""Pieces of a page of results: tables that fold on a narrow screen, pictures that also say in words what they show."""

from __future__ import annotations

import html
from typing import Any

STYLE = """<meta name="viewport" content="width=device-width, initial-scale=1"><style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
.lead { font-size: 18px } .note { color: #555; font-size: 13px }
table { border-collapse: collapse; font-size: 13px; margin: .5rem 0 }
th, td { padding: .2rem .6rem; text-align: right } th { border-bottom: 2px solid #888 }
tr:nth-child(even) { background: #f4f4f4 } td:first-child, th:first-child { text-align: left }
img { max-width: 100% } pre { font-size: 12px; background: #f4f4f4; padding: 1rem; overflow: auto }
@media (max-width: 500px) {
  thead { display: none } tr { display: block; padding: .4rem 0; border-bottom: 1px solid #ccc }
  td, td:first-child { display: flex; justify-content: space-between; text-align: right }
  td:empty { display: none }
  td::before { content: attr(data-label); color: #555; margin-right: 1rem; text-align: left }
}
</style>"""


def image(png: str, words: str) -> str:
    """A picture, and what it shows in words."""
    return f"<p><img alt='{html.escape(words, quote=True)}' src='data:image/png;base64,{png}'></p>"


def note(words: str) -> str:
    """What a table's columns or a picture's marks mean."""
    return f"<p class='note'>{html.escape(words)}</p>"


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of equal keys as an HTML table; on a narrow screen each row becomes a list of its cells."""
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(str(key))}</th>" for key in rows[0])
    body = "".join(f"<tr>{''.join(_cell(key, value) for key, value in row.items())}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _cell(key: str, value: Any) -> str:
    return f"<td data-label='{html.escape(str(key), quote=True)}'>{html.escape(text_of(value))}</td>"


def text_of(value: Any) -> str:
    """A value as a cell shows it: floats with three digits behind the point, as far as they say anything."""
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(text_of(item) for item in value) + "]"
    return "" if value is None else str(value)
