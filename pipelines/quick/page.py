"""The page that `quick` leaves behind."""

from __future__ import annotations

import html

from pipelines.quick.in_time import Found
from pipelines.report.page import document, listed, note, table

TREES = "A tree (K, L1, L2) has K branches of L2 tokens after a trunk of L1."
READING = (
    "Speed over plain decoding, replayed along texts that the target wrote, with times measured on this machine; ± one "
    "standard error over the sources of the prompts. Trees and copies were chosen on every other source, and judged on "
    f"those between. {TREES}"
)
SELECTOR = (
    "The gain of a quick linear model over the best tree or the lookup rule, whichever is faster, on sources that it "
    "has not seen; the time of decisions is included. A trained selector may gain more."
)


def page(name: str, found: Found) -> str:
    """One self-contained page with the answers for all sampling settings."""
    lead = "".join(f"<p class='lead'>{html.escape(answer.verdict())}</p>" for answer in found.answers)
    if found.disturbed:
        lead += f"<p class='lead'><b>Warning:</b> {html.escape(found.disturbed)}</p>"
    sections = [(str(answer.sampling), table(answer.rows())) for answer in found.answers]
    sections.append(("How to read the tables", note(READING)))
    gains = [{"setting": str(answer.sampling), **answer.selector()} for answer in found.answers]
    sections.append(("Does a selector pay?", table(gains) + note(SELECTOR)))
    sections.append(("Left out, to stay within the time", listed(found.left_out) if found.left_out else ""))
    return document(f"{name} on {found.profile.device}: does speculation pay?", lead, sections)
