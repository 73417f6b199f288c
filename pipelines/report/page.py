"""Parts of a page of results, as HTML."""

from __future__ import annotations

import html
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from pipelines.run import is_numeric

CARD = 3  # cells of a card below its title
STYLE = """<meta name="viewport" content="width=device-width, initial-scale=1"><style>
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; color: #222 }
.lead { font-size: 18px } .note { color: #555; font-size: 13px }
table { border-collapse: collapse; font-size: 13px; margin: .5rem 0 }
th, td { padding: .2rem .6rem; text-align: right; vertical-align: top } td { white-space: pre }
th { border-bottom: 2px solid #888 }
tr:nth-child(even) { background: #f4f4f4 } td:first-child, th:first-child, .words { text-align: left }
td:first-child { white-space: normal }
.unfold { display: none } .verdict { font-size: 18px } .verdict li { margin: .3rem 0 } h3 { margin-bottom: 0 }
img { max-width: 100% } figure { display: flex; flex-wrap: wrap; gap: 1rem; margin: 1rem 0 }
figure img { flex: 0 1 34rem; min-width: 0; object-fit: contain } figure img:only-child { flex-basis: auto }
pre { font-size: 12px; background: #f4f4f4; padding: 1rem; overflow: auto }
.strip { white-space: pre-wrap; line-height: 1.7 } .strip i { color: #777; font-style: normal }
.drafted { background: #c3d9f3 } .copied { background: #bfe3c0 } .target { background: #f8d9a8 }
@media (max-width: 500px) {
  thead { display: none } table, tbody, tr { display: block } tr { padding: .4rem 0; border-bottom: 1px solid #ccc }
  td, td:first-child, td.words { display: flex; justify-content: space-between; text-align: right }
  td:first-child { font-weight: 600 } td:empty { display: none } figure img { flex-basis: 100% }
  td::before { content: attr(data-label); color: #555; margin-right: 1rem; text-align: left }
  td { white-space: pre-line } .unfold { display: block; color: #555 }
  .folds:not(:has(:checked)) .more { display: none }
  td.words:first-child::before { content: none } body { margin: 1rem auto } pre { font-size: 11px }
}
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
    return f"<figure>{''.join(tags)}</figure>" if pictures else ""


def note(words: str) -> str:
    """An explanation of a table or a picture."""
    return f"<p class='note'>{html.escape(words)}</p>"


def folded(title: str, text: str) -> str:
    """A long text that opens at a click on its title."""
    return f"<details><summary>{html.escape(title)}</summary><pre>{html.escape(text)}</pre></details>"


def paragraphs(lines: Iterable[str]) -> str:
    """Lines of text, each a paragraph."""
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines)


def listed(lines: Iterable[str], kind: str = "") -> str:
    """Lines of text as a list; `kind` is its class."""
    return f"<ul class='{kind}'>{''.join(f'<li>{html.escape(line)}</li>' for line in lines)}</ul>"


def program(text: str) -> str:
    """A program, as it is."""
    return f"<pre>{html.escape(text)}</pre>" if text else ""


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


def table(rows: list[dict[str, Any]], matter: Collection[str] = ()) -> str:
    """Rows of equal keys as an HTML table; columns of words are aligned at the left.

    On a narrow screen each row becomes a card: its first cell as a title and the next `CARD` cells. The others unfold
    at a click.

    Args:
        matter: the first cells of the rows that are not folded on a narrow screen; all rows if empty.
    """
    if not rows:
        return ""
    words = {key for key in rows[0] if not is_numeric(text_of(row[key]) for row in rows)}
    classes = {key: " ".join(["words"] * (key in words) + ["more"] * (n > CARD)) for n, key in enumerate(rows[0])}
    head = "".join(f"<th class='{classes[key]}'>{html.escape(key)}</th>" for key in rows[0])
    body = ""
    for row in rows:
        folded = " class='more'" if matter and next(iter(row.values())) not in matter else ""
        body += f"<tr{folded}>{''.join(_cell(key, value, classes[key]) for key, value in row.items())}</tr>"
    found = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
    if "more" not in body:
        return found
    return (
        f"<div class='folds'><label class='unfold'><input type='checkbox'> all that was measured</label>{found}</div>"
    )


def _cell(key: str, value: Any, kind: str) -> str:
    return f"<td class='{kind}' data-label='{html.escape(key)}'>{html.escape(text_of(value))}</td>"


def text_of(value: Any) -> str:
    """A cell's text: floats have three decimals, and none from 100 on."""
    if isinstance(value, float):
        return f"{value:z.3f}" if abs(value) < 100 else f"{value:.0f}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(text_of(item) for item in value) + "]"
    return "" if value is None else str(value)
