"""Engine logs: every format that is read, and one clear line for what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_gen.texts.logs import distinct, drafter_of, read_logs
from selector.schema import InputError
from tests.pipelines.small_logs import record, write


def one(tmp_path: Path, **changed: Any) -> Any:
    """A text of three positions, read from a file."""
    entry = {"prompt_token_ids": [1, 2], "generated_token_ids": [3, 4, 5], **changed}
    return read_logs([write(tmp_path / "log.jsonl", [entry])])[0]


def test_accepted_lengths_become_survivals(tmp_path: Path) -> None:
    text = one(tmp_path, drafters={"head": {"accepted": [2, 0, 1]}})
    assert text.survivals["head"].tolist() == [[1, 1], [0, 0], [1, 0]]
    assert (text.tokens, text.start, text.roots, text.kind) == ([1, 2, 3, 4, 5], 2, 3, "log")
    assert not np.isnan(text.of("head")).any()


def test_the_simulator_counts_the_additional_token(tmp_path: Path) -> None:
    text = one(tmp_path, acc_eagle={"acc_len": [3, 1, 2]}, acc_ngram={"acc_len": [1, 1]})
    assert text.survivals["eagle"].tolist() == [[1, 1], [0, 0], [1, 0]]
    assert text.roots == 2, "a text ends with the last position that every drafter has"
    assert drafter_of([text], None) == "eagle", "lookups are computed from the ids"


def test_survivals_are_read_as_they_are(tmp_path: Path) -> None:
    text = one(tmp_path, drafters={"head": {"survivals": [[0.5, 0.25], [], [1.0]]}})
    assert text.survivals["head"].tolist() == [[0.5, 0.25], [0, 0], [1, 0]]


def test_of_steps_only_what_was_drafted_is_known(tmp_path: Path) -> None:
    text = one(tmp_path, drafters={"head": {"steps": [[0, 2, 2], [2, 3, 1]]}})
    nan = np.nan
    expected = [[1, 1, nan], [nan, nan, nan], [1, 0, 0]]
    assert np.array_equal(text.survivals["head"], expected, equal_nan=True)
    assert np.isnan(text.of("head")).any()


def test_hits_of_steps_are_what_was_accepted(tmp_path: Path) -> None:
    ids = {"generated_token_ids": list(range(8))}
    dense = one(tmp_path, **ids, drafters={"head": {"accepted": [2, 0, 0, 1, 3, 0, 0, 0]}})
    assert dense.hits("head") == [1, 0, 0, 1, 1, 0, 0, 0]
    steps = [[0, 3, 2], [3, 1, 1], [5, 2, 0], [6, 2, 1]]
    text = one(tmp_path, **ids, drafters={"head": {"steps": steps}})
    assert text.hits("head") == [1, 1, 0, 1, 1, 0, 1, 0], "after 2 of 3, 1 of 1, none of 2, 1 of 2"


BAD = {
    "no ids": ('{"drafters": {}, "generated_token_ids": [1]}', "prompt_token_ids: Field required"),
    "huge id": ({"generated_token_ids": [1, 2**40, 3]}, "generated_token_ids.1: Input should be less than"),
    "bool id": ({"generated_token_ids": [1, True, 3]}, "generated_token_ids.1: Input should be a valid integer"),
    "empty text": ({"generated_token_ids": []}, "generated_token_ids: List should have at least 1 item"),
    "no positions": ({"drafters": {"head": {"accepted": []}}}, "drafters.head: no positions"),
    "two arrays": ({"drafters": {"head": {"accepted": [1], "steps": []}}}, "drafters.head: one of accepted, survivals"),
    "negative length": ({"drafters": {"head": {"accepted": [1, -1]}}}, "drafters.head.accepted.1: Input should be"),
    "nothing committed": ({"acc_eagle": {"acc_len": [1, 0, 1]}}, "acc_len.1: Input should be greater than or equal"),
    "rising": ({"drafters": {"head": {"survivals": [[0.2, 0.3]]}}}, "drafters.head.survivals: they never rise"),
    "more than drafted": ({"drafters": {"head": {"steps": [[0, 1, 2]]}}}, "drafters.head.steps: step [0, 1, 2]"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_named_with_its_file_and_number(name: str, tmp_path: Path) -> None:
    bad, message = BAD[name]
    good = {"prompt_token_ids": [1], "generated_token_ids": [2, 3, 4], "drafters": {"head": {"accepted": [0, 1, 0]}}}
    line = bad if isinstance(bad, str) else json.dumps({**good, **bad})
    path = tmp_path / "log.jsonl"
    path.write_text(f"{json.dumps(good)}\n\n{line}\n")
    with pytest.raises(InputError) as error:
        read_logs([path])
    assert str(error.value).startswith(f"{path}:3: ")
    assert message in str(error.value) and "\n" not in str(error.value)


def test_which_drafter_is_asked_for_where_there_are_several(tmp_path: Path) -> None:
    text = one(tmp_path, drafters={name: {"accepted": [1, 0, 0]} for name in ("head", "small", "ngram")})
    assert drafter_of([text], "small") == "small"
    for wanted, message in ((None, "name one of the log's drafters"), ("other", "is not in the log")):
        with pytest.raises(InputError, match=message):
            drafter_of([text], wanted)
    with pytest.raises(InputError, match=r"log\.jsonl:1: no entry of head"):
        drafter_of([text, one(tmp_path, drafters={"small": {"accepted": [0]}})], "head")


def test_equal_texts_count_once(tmp_path: Path) -> None:
    texts = read_logs([write(tmp_path / "log.jsonl", [record(1), record(2), {**record(1), "id": "again"}])])
    assert [text.name for text in distinct(texts)] == ["prose 1", "prose 2"]
