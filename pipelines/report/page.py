"""HTML pages of results, from the folder `templates`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipelines.run import templates_beside
from selector.files import atomically


def text_of(value: Any) -> str:
    """A table cell: floats have three decimals, and none from 100 on; None is empty."""
    if isinstance(value, float):
        return f"{value:z.3f}" if abs(value) < 100 else f"{value:.0f}"
    return "" if value is None else str(value)


TEMPLATES = templates_beside(__file__, autoescape=True)
TEMPLATES.filters["cell"] = text_of


def write_page(path: Path, template: str, **values: Any) -> None:
    """Write a self-contained HTML page, whole or not at all. Every template takes a `title`, lines of `lead`, and
    the text of its `provenance`."""
    with atomically(path) as partial:
        partial.write_text(TEMPLATES.get_template(template).render(values), encoding="utf-8")
