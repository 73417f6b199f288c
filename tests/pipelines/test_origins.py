"""Where the tokens of a decoded text come from, told from the rows of the journal."""

from __future__ import annotations

from typing import Any

import pytest

from data_gen.texts.prompts import Prompt
from pipelines.evaluate.origins import SHOWN, STRIPS, pieces, runs, shares, strips
from pipelines.report.page import TEMPLATES

# a tree, a lookup of which nothing is accepted, plain decoding, and a tree that was cut at the limit
ROW: dict[str, Any] = {"prompt": "p", "kind": "code", "setting": "T=0", "tokens": 7}
ROW |= {"drafted": [(2, 1, 3), (1, 4, 0, "copy"), (1, 0, 0), (1, 4, 0)], "step_roots": [0, 3, 4, 5], "block_tokens": 9}
ROW |= {"text": [10, 11, 12, 13, 14, 15, 16]}
COPY = ROW | {"tokens": 5, "drafted": [(1, 4, 0, "copy")], "step_roots": [0], "block_tokens": 5}


class Words:
    """A token is a word."""

    def decode(self, tokens: list[int], **_: bool) -> str:
        return " ".join(map(str, tokens))


class Bytes:
    """A token is a byte."""

    def decode(self, tokens: list[int], **_: bool) -> str:
        return bytes(tokens).decode(errors="replace")


def test_runs_are_cut_at_the_limit() -> None:
    assert [tuple(run) for run in runs(ROW)] == [
        ("drafted", "(2, 1, 3)", 0, 2),
        ("target", "(2, 1, 3)", 2, 3),
        ("target", "lookup 4", 3, 4),
        ("target", "(1, 0, 0)", 4, 5),
        ("drafted", "(1, 4, 0)", 5, 7),
    ]


def test_shares_are_of_all_tokens() -> None:
    assert shares([ROW]) == {"drafted": 4 / 7, "copied": 0, "target": 3 / 7}
    assert shares([ROW, COPY]) == pytest.approx({"drafted": 4 / 12, "copied": 4 / 12, "target": 4 / 12})
    assert shares([ROW | {"drafted": [], "step_roots": []}]) is None  # transformers' own loop


def test_pieces_are_the_text_with_its_spaces() -> None:
    found = pieces(ROW, Words().decode)
    assert found[:2] == [("drafted", "10 11", "(2, 1, 3)"), ("target", " 12", "(2, 1, 3)")]
    assert "".join(text for _, text, _ in found) == Words().decode(ROW["text"])


def test_a_character_of_several_tokens_is_whole() -> None:
    """It begins in the drafted run, and ends with the target's token; what is no text at all stays."""
    row = ROW | {"text": list(b"a\xc3\xa9bc\xff\xff")}
    assert [text for _, text, _ in pieces(row, Bytes().decode)] == ["a", "é", "b", "c", "\ufffd\ufffd"]


def test_strips_show_one_prompt_of_each_kind() -> None:
    prompts = [Prompt(f"p{n}", "", f"kind {n // 2}", "s") for n in range(2 * STRIPS + 2)]
    rows = [ROW | {"prompt": prompt.id, "kind": prompt.kind} for prompt in prompts]
    found = strips(rows, prompts, lambda prompt: [int(prompt.id[1:])], Words())
    assert [(each["prompt"], each["kind"], each["text"]) for each in found] == [
        (f"p{2 * n}", f"kind {n}", str(2 * n)) for n in range(STRIPS)
    ]
    (cut,) = strips(rows, prompts[:1], lambda _: [7] * SHOWN, Words())
    assert cut["text"].startswith("… ") and len(cut["text"]) == SHOWN + 2


def test_a_strip_is_coloured_and_its_text_is_text() -> None:
    runs_of_text = [("drafted", "<b>", "(1, 4, 0)"), ("copied", " x", "lookup 4"), ("target", "&", "")]
    answer = {"setting": "T=0", "kind": "a <kind>", "text": "<p>", "pieces": runs_of_text}
    parts = TEMPLATES.get_template("parts.j2").module
    page = str(parts.strip(answer))
    assert "<i>&lt;p&gt;</i>" in page and "<h3>T=0, a &lt;kind&gt;</h3>" in page
    assert '<span class="drafted" title="(1, 4, 0)">&lt;b&gt;</span><span class="copied" title="lookup 4"> x<' in page
    assert "<b>" not in parts.table([{"<b>": "<b>"}]) and not parts.table([]).strip()
