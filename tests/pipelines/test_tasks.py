"""Task documents: their outputs are right, and their prompts end where their outputs begin, in held-out files alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from data_gen.texts.prompts import read_prompts
from pipelines.config import Embedded, load_config
from pipelines.pair import language_model, tasks
from pipelines.pair import stage as pair_stage
from pipelines.pair.corpus import SourceFile, stdlib_files
from pipelines.pair.tasks import counter
from selector.schema import InputError
from tests.pipelines.runs import ROOT, SMALL_PAIR

TOKENS, NUMBER = 200, 4
ROLES = ("target", "draft")
NAMES = ("argparse.py", "dataclasses.py", "pathlib.py", "statistics.py")
DEMO = ROOT / "configs" / "demo.yaml"


@pytest.fixture(scope="module")
def files() -> dict[str, SourceFile]:
    return {file.path: file for file in stdlib_files() if file.path in NAMES}


@pytest.fixture(scope="module")
def count(files: dict[str, SourceFile]) -> tasks.Count:
    return counter(language_model.train_tokenizer([file.text for file in files.values()], 1000))


@pytest.fixture(scope="module")
def made(files: dict[str, SourceFile], count: tasks.Count) -> list[tuple[SourceFile, tasks.Document]]:
    return [(file, doc) for file in files.values() for doc in tasks.documents(file, NUMBER, count, TOKENS)]


def of(made: list[tuple[SourceFile, tasks.Document]], workload: str) -> list[tuple[SourceFile, tasks.Document]]:
    chosen = [(file, document) for file, document in made if document.workload == workload]
    assert len(chosen) >= 4
    return chosen


def asked(document: tasks.Document, pattern: str) -> list[str]:
    """The groups of a pattern that the whole instruction matches."""
    found = re.fullmatch(pattern, document.instruction)
    assert found is not None, document.instruction
    return list(found.groups())


def test_every_workload_has_documents_that_fit_and_are_the_same_every_time(
    made: list[tuple[SourceFile, tasks.Document]], files: dict[str, SourceFile], count: tasks.Count
) -> None:
    assert {document.workload for _, document in made} == set(tasks.WORKLOADS)
    assert len({document.text for _, document in made}) == len(made)
    for _, document in made:
        assert count(document.prompt) <= TOKENS
        assert TOKENS <= count(document.text) + 1 <= 2 * TOKENS
    first = files[NAMES[0]]
    assert list(tasks.documents(first, NUMBER, count, TOKENS)) == [doc for file, doc in made if file is first]


def test_the_prompts_tokens_are_the_first_of_the_documents(
    made: list[tuple[SourceFile, tasks.Document]], files: dict[str, SourceFile]
) -> None:
    tokenizer = language_model.train_tokenizer([file.text for file in files.values()], 1000)
    for _, document in made:
        prompt, text = tokenizer(document.prompt)["input_ids"], tokenizer(document.text)["input_ids"]
        assert text[: len(prompt)] == prompt and len(text) > len(prompt)


def test_a_renamed_function_is_the_function_with_one_name_replaced(
    made: list[tuple[SourceFile, tasks.Document]],
) -> None:
    for file, document in of(made, "edit"):
        old, new = asked(document, r"Rename (\w+) to (\w+) in this function\.")
        before, after = re.split(r"\b", document.material), re.split(r"\b", document.output)
        assert [new if word == old else word for word in before] == after
        assert before.count(old) > 1 and new not in before
        assert document.material.split("\n")[0] in file.text  # the function, dedented


def test_a_reordered_table_has_the_same_cells(made: list[tuple[SourceFile, tasks.Document]]) -> None:
    directions = set()
    for _, document in of(made, "table"):
        columns, direction = asked(
            document, r"Write this table with the columns ([\w, ]+), rows from the (first|last to the first)\."
        )
        head, *rows = (line.split(" | ") for line in document.material.split("\n"))
        order = [head.index(column) for column in columns.split(", ")]
        assert sorted(order) == [0, 1, 2, 3]
        out = [line.split(" | ") for line in document.output.split("\n")]
        assert out == [[row[c] for c in order] for row in (rows if direction == "first" else rows[::-1])]
        directions.add(direction)
    assert len(directions) == 2


def test_boilerplate_is_the_template_once_for_every_name(made: list[tuple[SourceFile, tasks.Document]]) -> None:
    for _, document in of(made, "boilerplate"):
        (names,) = asked(document, rf"Write this with {tasks.BLANK} as ([\w, ]+)\.")
        assert len(names.split(", ")) > 1 and tasks.BLANK in document.material
        filled = [re.sub(rf"\b{tasks.BLANK}\b", name, document.material) for name in names.split(", ")]
        assert document.output == "\n\n".join(filled)


def test_continuations_are_what_follows_in_the_file(made: list[tuple[SourceFile, tasks.Document]]) -> None:
    for file, document in of(made, "code"):
        after = file.text[file.text.index(document.material) + len(document.material) :]
        assert after.lstrip("\n ").startswith(document.output.lstrip("\n "))
    of(made, "prose")


def test_quotations_are_in_the_text_and_in_the_order_asked_for(made: list[tuple[SourceFile, tasks.Document]]) -> None:
    shuffled = 0
    for _, document in of(made, "quote"):
        (names,) = asked(document, r"How do ([\w, ]+) begin\? Quote\.")
        begins = dict(line.split(": ", 1) for line in document.material.split("\n"))
        assert document.output.split("\n") == [f'{name}: "{begins[name]}"' for name in names.split(", ")]
        shuffled += list(begins) != names.split(", ")
    assert shuffled


def test_a_mix_alternates_between_the_others(made: list[tuple[SourceFile, tasks.Document]]) -> None:
    kinds = set()
    for _, document in of(made, "mix"):
        instructions = re.findall(r"^# (\d)\. (\w+)", document.material, flags=re.MULTILINE)
        assert [n for n, _ in instructions] == re.findall(r"^# (\d)\.$", document.output, flags=re.MULTILINE)
        assert len(instructions) >= 2
        kinds |= {kind for _, kind in instructions}
    assert len(kinds) >= 4


def test_a_file_that_is_no_python_gives_only_continuations(count: tasks.Count) -> None:
    text = "no python here, only words in a line\n" * 300
    made = tasks.documents(SourceFile("broken.py", "tests", text, "", False), 2, count, TOKENS)
    assert {document.workload for document in made} == {"code"}


def own_pair() -> Embedded:
    embedded = load_config(DEMO, SMALL_PAIR).pair.embedded
    assert embedded is not None
    return embedded


def test_a_draft_begins_with_the_targets_first_layer() -> None:
    embedded = own_pair()
    target = language_model.build_model(embedded, 2, 50, 0, 1)
    draft = language_model.build_model(embedded, 1, 50, 0, 2)
    language_model.begin_with(draft, target)
    given = target.state_dict()
    assert len(given) > len(draft.state_dict())
    assert all(torch.equal(value, given[name]) for name, value in draft.state_dict().items())


def test_the_config_gives_code_prose_and_tasks_of_all_kinds_from_held_out_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    small = [*SMALL_PAIR, "pair.embedded.context=400", "pair.embedded.documents=1", "pair.embedded.steps=1"]
    small += ["prompts.tokens=200", "prompts.per_source=1", "prompts.tasks=1", "pair.embedded.draft_steps=1"]
    assert "2 layers x 32" in pair_stage.plan(load_config(DEMO, small))[0]
    pair_stage.run(load_config(DEMO, small))
    assert re.search(
        r"loss of the target on random tokens \d\.\d\d, when they come again \d\.\d\d", capsys.readouterr().out
    )
    prompts = read_prompts(tmp_path / "runs" / "demo" / "pair" / "prompts.jsonl")
    assert {prompt.kind for prompt in prompts} == set(tasks.WORKLOADS)
    held_out = {file.path for file in stdlib_files() if file.held_out}
    assert {prompt.source for prompt in prompts} <= held_out
    continued = {prompt.kind for prompt in prompts if not prompt.text.endswith(tasks.MARK)}
    assert continued == {"code", "prose"}
    assert len({(prompt.kind, prompt.source) for prompt in prompts}) == len(prompts)


def test_a_training_that_diverges_is_one_line(tmp_path: Path) -> None:
    embedded = own_pair()
    model = language_model.build_model(embedded, 1, 50, 0, 1)
    schedule, stream = language_model.Schedule(3, 2, 1e30), torch.arange(500) % 50
    said = r"^pair\.embedded: the loss is nan at step 2: choose other sizes$"
    with pytest.raises(InputError, match=said):
        language_model.train(
            model, language_model.next_token_loss, stream, schedule, 32, 1, tmp_path / "kept", lambda *_: None
        )
