"""Pieces of a page of results."""

from __future__ import annotations

import html
from typing import Any

STYLE = """<style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
table { border-collapse: collapse; font-size: 13px } th, td { padding: .2rem .7rem; text-align: right }
th { border-bottom: 2px solid #888 } tr:nth-child(even) { background: #f4f4f4 }
td:first-child, th:first-child { text-align: left }
img { max-width: 100% } pre { font-size: 12px; background: #f4f4f4; padding: 1rem; overflow: auto }
</style>"""


def image(png: str) -> str:
    return f"<p><img alt='' src='data:image/png;base64,{png}'></p>"


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of equal keys as an HTML table."""
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(str(key))}</th>" for key in rows[0])
    body = "".join(
        "<tr>" + "".join(f"<td>{html.escape(_cell(value))}</td>" for value in row.values()) + "</tr>" for row in rows
    )
    return f"<table><tr>{head}</tr>{body}</table>"


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, list):
        return "[" + ", ".join(_cell(item) for item in value) + "]"
    return str(value)
