from __future__ import annotations

import copy
import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from data_gen.models.pair import ModelPair
from data_gen.texts.prompts import (
    LONG,
    Form,
    Prompt,
    Turns,
    joined,
    read_prompts,
    take_evenly,
    write_prompts,
)
from selector.schema import InputError
from tests.checks import one_line
from tests.tiny import END, TEMPLATE, tokenizer_of


def prompts(count: int) -> list[Prompt]:
    return [
        Prompt(f"p{i}", f"text {i}", ("code", "prose")[i % 2], f"file{i // 3}")
        for i in range(count)
    ]


def test_prompts_survive_the_file(tmp_path: Path) -> None:
    write_prompts(tmp_path / "p.jsonl", prompts(4))
    assert read_prompts(tmp_path / "p.jsonl") == prompts(4)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\n\n", "p.jsonl: no lines there"),
        (b"not json", "p.jsonl:1: not JSON: "),
        (b"[" * 100_000, "p.jsonl:1: not JSON: recursion limit exceeded"),
        (b'{"text": "a"}\n{"txet": "b"}', "p.jsonl:2: text: Field required"),
        (b'{"text": "  "}', "p.jsonl:1: text: String should match pattern"),
        (b"[1]", "p.jsonl:1: the line: Input should be a valid dictionary"),
        (
            b'{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}',
            "p.jsonl:1: the line: Value error, messages: a part of the last user's turn is no text "
            "but 'image_url'",
        ),
        (b'{"text": "a", "id": 1}\n{"text": "b", "id": 1}', "p.jsonl: two lines have the same id"),
    ],
)
def test_a_bad_prompt_file_is_one_line_that_names_it(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "p.jsonl"
    path.write_bytes(content)
    with one_line("", message):
        read_prompts(path)


def test_a_conversations_last_user_turn_is_its_text(tmp_path: Path) -> None:
    roles = ("system", "user", "assistant", "user")
    turns = [{"role": role, "content": f"{role} {n}"} for n, role in enumerate(roles)]
    path = tmp_path / "p.jsonl"
    path.write_text(json.dumps({"messages": turns}))
    assert [prompt.text for prompt in read_prompts(path)] == ["user 3"]
    assert (
        "1 are last turns of conversations"
        in Form(64).fit(tokenizer_of(300), read_prompts(path))[1]
    )
    parts = [{"type": "text", "text": "Count "}, {"type": "text", "text": "the vowels."}]
    path.write_text(json.dumps({"messages": [{"role": "user", "content": parts}]}))
    assert read_prompts(path) == [Prompt("line-1", "Count the vowels.", "text", "line-1")]
    path.write_text(json.dumps({"messages": turns[:1]}))
    with pytest.raises(InputError, match="messages: no user's turn"):
        read_prompts(path)


def test_sources_are_joined_along_chains_of_equal_texts_in_any_order() -> None:
    held = [("d", 1), ("c", 1), ("c", 2), ("b", 2), ("a", 3), ("e", 4), ("b", 3)]
    for order in (held, held[::-1], sorted(held, key=lambda pair: pair[1])):
        assert joined(order) == {"a": "a", "b": "a", "c": "a", "d": "a", "e": "e"}


def test_kinds_take_turns_and_the_order_does_not_depend_on_the_file() -> None:
    taken = take_evenly(prompts(20), 6)
    assert [prompt.kind for prompt in taken] == ["code", "prose"] * 3
    assert take_evenly(prompts(20)[::-1], 6) == taken


@pytest.fixture
def tokenizer(pair: ModelPair) -> Any:
    """A tokenizer of our own, to be given a template; `<0>`, `<1>`, .. are tokens of it."""
    return copy.deepcopy(pair.tokenizer)


def test_of_a_long_prompt_the_start_or_the_end_is_kept_or_nothing(tokenizer: Any) -> None:
    prompt = Prompt("a", "the quick brown fox jumps over it", "text", "a")
    (ids,) = Form(5).whole(tokenizer, [prompt])
    assert len(ids) > 5
    assert Form(5).cut(tokenizer, ids) == ids[:5]
    assert Form(5, "end").cut(tokenizer, ids) == ids[-5:]
    for longer, kept in (("start", [prompt]), ("end", [prompt]), ("drop", [])):
        assert Form(5, longer).fit(tokenizer, [prompt])[0] == kept
        assert Form(len(ids), longer).fit(tokenizer, [prompt])[0] == [prompt]
        assert Form(len(ids), longer).cut(tokenizer, ids) == ids


def test_a_cut_at_the_start_leaves_the_token_that_every_text_begins_with(tokenizer: Any) -> None:
    tokenizer.add_special_tokens({"bos_token": "<7>"})
    first = tokenizer.bos_token_id
    ids = [first, *range(100, 120)]
    assert Form(5, "end").cut(tokenizer, ids) == [first, 116, 117, 118, 119]
    assert Form(1, "end").cut(tokenizer, ids) == [first]


def test_a_chat_is_the_users_turn_in_the_template_and_the_models_begins(tokenizer: Any) -> None:
    tokenizer.chat_template = TEMPLATE
    for system, before in ((None, ""), ("quick", f"<system>quick{END}")):
        encoded = Form(100, "drop", chat=True, system=system).whole(tokenizer, prompts(2))
        expected = [f"{before}<user>text {n}{END}<assistant>" for n in range(2)]
        assert encoded == tokenizer(expected, add_special_tokens=False)["input_ids"]
    assert Form(100, "drop", chat=True).whole(tokenizer, []) == []


THINKING = TEMPLATE.replace("<assistant>", "<assistant><think>\n")
ONE_TURN = "{% if messages | length > 1 %}{{ raise_exception('no') }}{% endif %}" + TEMPLATE
BY_DAY = "{{ strftime_now('%d %b %Y') }}" + TEMPLATE


@pytest.mark.parametrize(
    ("template", "form", "expected"),
    [
        ("", Form(100), ("<bos>", "", "")),
        (TEMPLATE, Form(100), ("<bos>", "", "")),  # of a chat's model, but no chat
        (TEMPLATE, Form(100, "drop", True), ("<user>", f"{END}<assistant>", f"{END}<user>")),
        (
            TEMPLATE,
            Form(100, "drop", True, "Be brief."),
            (f"<system>Be brief.{END}<user>", f"{END}<assistant>", f"{END}<user>"),
        ),
        (
            THINKING,
            Form(100, "drop", True),
            ("<user>", f"{END}<assistant><think>\n", f"{END}<user>"),
        ),
        (ONE_TURN, Form(100, "drop", True), ("<user>", f"{END}<assistant>", "")),
        (
            BY_DAY,
            Form(100, "drop", True, day=date(2026, 5, 1)),
            ("01 May 2026<user>", f"{END}<assistant>", f"{END}<user>"),
        ),
    ],
)
def test_what_stands_around_the_turns_of_texts(
    tokenizer: Any, template: str, form: Form, expected: tuple[str, str, str]
) -> None:
    """Also around those of a prompt."""
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", tokenizer.bos_token_id)]
    )
    tokenizer.chat_template = template or None
    turns = form.turns(tokenizer)
    assert turns == Turns(*tokenizer(list(expected), add_special_tokens=False)["input_ids"])
    text = tokenizer("hello", add_special_tokens=False)["input_ids"]
    prompt = form.encode(tokenizer, Prompt("a", "hello", "text", "a"))
    assert prompt == [*turns.opening, *text, *turns.to_answer]


def test_a_tokenizer_without_a_template_or_system_turn_is_refused(tokenizer: Any) -> None:
    one = prompts(1)
    with pytest.raises(
        InputError, match=r"^prompts.chat: the tokenizer of .* has no chat template"
    ):
        Form(100, "drop", chat=True).whole(tokenizer, one)
    tokenizer.chat_template = (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}hi"
    )
    assert Form(100, "drop", chat=True).whole(tokenizer, one)
    with pytest.raises(
        InputError, match=r"^prompts.system: the chat template of .* refuses: no system"
    ):
        Form(100, "drop", chat=True, system="be brief").whole(tokenizer, one)


def test_a_very_long_prompt_is_not_read_to_its_end(tokenizer: Any) -> None:
    prompt = Prompt("a", "the quick brown fox jumps over it " * 1000, "text", "a")
    for longer in ("start", "end", "drop"):
        form = Form(5, longer)
        assert len(form.whole(tokenizer, [prompt])[0]) < 5 * LONG
        whole = tokenizer(prompt.text)["input_ids"]
        assert form.encode(tokenizer, prompt) == (whole[-5:] if longer == "end" else whole[:5])


def test_a_text_that_holds_the_first_token_gets_no_second_one(tokenizer: Any) -> None:
    """As a template's text does where the tokenizer adds one."""
    tokenizer.add_special_tokens({"bos_token": "<bos>"})
    prompts = [Prompt("a", text, "text", "a") for text in ("<bos><bos>the", "<bos>the", "the")]
    first, second, third = Form(9).whole(tokenizer, prompts)
    assert first == second == [tokenizer.bos_token_id, *third]
