"""Parts of a page of results, as HTML."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping
from typing import Any

STYLE = """<meta name="viewport" content="width=device-width, initial-scale=1"><style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
.note { color: #555; font-size: 13px } h3 { margin-bottom: 0 }
.wide { overflow-x: auto } table { border-collapse: collapse; font-size: 13px; margin: .5rem 0 }
th, td { padding: .2rem .6rem; text-align: left; vertical-align: top; font-variant-numeric: tabular-nums }
th { border-bottom: 2px solid #888 } td { white-space: pre } tr:nth-child(odd) td { background: #f4f4f4 }
figure { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1rem 0 } img { max-width: 100% }
pre { font-size: 12px; background: #f4f4f4; padding: 1rem; overflow: auto }
.strip { white-space: pre-wrap; line-height: 1.7 } .strip i { color: #777; font-style: normal }
.drafted { background: #c3d9f3 } .copied { background: #bfe3c0 } .target { background: #f8d9a8 }
</style>"""


def document(title: str, lead: str, sections: Iterable[tuple[str, str]]) -> str:
    """A self-contained page; `title` and the sections' titles are plain text, `lead` and contents are HTML. Sections
    without content are left out."""
    body = "".join(f"<h2>{html.escape(name)}</h2>{content}" for name, content in sections if content)
    head = f"<!doctype html><html lang='en'><meta charset='utf-8'><title>Espalier: {html.escape(title)}</title>{STYLE}"
    return f"{head}<h1>{html.escape(title)}</h1>{lead}{body}</html>\n"


def images(pictures: Mapping[str, str]) -> str:
    """PNGs in base64, by their descriptions."""
    tags = (f"<img alt='{html.escape(words)}' src='data:image/png;base64,{png}'>" for words, png in pictures.items())
    return f"<figure>{''.join(tags)}</figure>"


def note(words: str) -> str:
    """An explanation of a table or a picture."""
    return f"<p class='note'>{html.escape(words)}</p>"


def folded(title: str, text: str) -> str:
    """A long text that opens at a click on its title."""
    return f"<details><summary>{html.escape(title)}</summary><pre>{html.escape(text)}</pre></details>"


def listed(lines: Iterable[str]) -> str:
    """Lines of text as a list."""
    return f"<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in lines)}</ul>"


def legend(words: Mapping[str, str]) -> str:
    """What the colours of `strip` mean, by origin."""
    said = (f"<span class='{origin}'>{origin}</span> {html.escape(what)}" for origin, what in words.items())
    return f"<p class='note'>{'; '.join(said)}. Point at a token to see what its step drafted.</p>"


def strip(title: str, answer: Mapping[str, Any]) -> str:
    """The end of a prompt and its continuation, coloured by where its tokens come from, as `origins.strips` returns
    them."""
    parts = (
        f"<span class='{origin}' title='{html.escape(action)}'>{html.escape(text)}</span>"
        for origin, text, action in answer["pieces"]
    )
    said = f"<i>{html.escape(answer['text'])}</i>{''.join(parts)}"
    return f"<h3>{html.escape(title)}</h3><pre class='strip'>{said}</pre>"


def table(rows: list[dict[str, Any]]) -> str:
    """Rows of equal keys as an HTML table."""
    if not rows:
        return ""
    head = "".join(f"<th>{html.escape(key)}</th>" for key in rows[0])
    body = ""
    for row in rows:
        body += f"<tr>{''.join(f'<td>{html.escape(text_of(value))}</td>' for value in row.values())}</tr>"
    return f"<div class='wide'><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"


def text_of(value: Any) -> str:
    """A cell's text: floats have three decimals, and none from 100 on."""
    if isinstance(value, float):
        return f"{value:z.3f}" if abs(value) < 100 else f"{value:.0f}"
    return "" if value is None else str(value)
