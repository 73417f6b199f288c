"""Decoded text as a strip: every token coloured by where it came from."""

from __future__ import annotations

import html
from typing import Any

from data_gen.models.sampling import Sampling
from pipelines.report.page import note

LEGEND = (
    "One held-out prompt's continuation, as the selector decoded it. On green: copied by a lookup and accepted. On "
    "blue: drafted by the draft model and accepted. Bold: the target's own token, which ends each step. Point at a "
    "step to see what was drafted there."
)


def strip_section(strips: list[dict[str, Any]]) -> tuple[str, str]:
    """Title and content: a strip for each sampling setting."""
    parts = [
        f"<h3>{html.escape(str(Sampling(each['temperature'], each['top_p'])))}</h3>{_strip(each)}" for each in strips
    ]
    return "Where the tokens come from", note(LEGEND) + "".join(parts)


def _strip(strip: dict[str, Any]) -> str:
    steps = "".join(
        f"<span title='{html.escape(step['drafted'], quote=True)}'><span class='{step['source']}'>"
        f"{html.escape(step['accepted'])}</span><b>{html.escape(step['extra'])}</b></span>"
        for step in strip["steps"]
    )
    return f"<pre class='strip'>{steps}</pre>"
