from __future__ import annotations

from pipelines.pair.corpus import kind_of, prose_of, stdlib_files
from pipelines.pair.prompt_writing import PROMPT_CHARACTERS, held_out_prompts


def test_kinds_follow_from_folder_and_content() -> None:
    assert kind_of("test/test_ast.py", "x = 1") == "tests"
    assert kind_of("unittest/test/support.py", "x = 1") == "tests"
    assert kind_of("html/entities.py", "names = {\n" + "    'a': 1,\n" * 50 + "}\n") == "data"
    assert kind_of("abc.py", "import os\n\ndef f():\n    return 1\n") == "code"


def test_prose_is_docstrings_and_comments_in_order() -> None:
    text = '"""Module."""\n# first\ndef f():\n    """Function."""\n    return 1  # last\n'
    assert prose_of(text) == "Module.\nfirst\nFunction.\nlast"
    assert prose_of("def broken(:") == ""


def test_the_corpus_is_the_same_every_time_and_prompts_come_from_held_out_files() -> None:
    files = stdlib_files()
    assert files == stdlib_files()
    held_out = {file.path for file in files if file.held_out}
    assert 0.05 < len(held_out) / len(files) < 0.2
    prompts = held_out_prompts(files, per_source=2)
    assert {prompt.source for prompt in prompts} <= held_out
    assert {"code", "prose", "data"} <= {prompt.kind for prompt in prompts}
    assert all(len(prompt.text) == PROMPT_CHARACTERS for prompt in prompts)
    per_source: dict[tuple[str, str], int] = {}
    for prompt in prompts:
        key = prompt.source, prompt.kind
        per_source[key] = per_source.get(key, 0) + 1
    assert max(per_source.values()) <= 2
