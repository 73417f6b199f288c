"""Engine logs: every format that is read, and one clear line for what does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_gen.texts.logs import distinct, drafter_of, foreign, read_logs
from selector.schema import InputError
from tests.pipelines.small_logs import as_steps, record, write


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


def test_a_log_of_steps_says_what_the_dense_one_says_where_it_was_drafted(tmp_path: Path) -> None:
    dense = record(1)
    texts = read_logs([write(tmp_path / "log.jsonl", [dense, as_steps(dense)])])
    all_RD, some_RD = (text.survivals["head"][:, :3] for text in texts)
    known = ~np.isnan(some_RD)
    assert 0 < known.sum() < known.size
    assert np.array_equal(all_RD[known], some_RD[known])


def test_hits_of_steps_are_what_was_accepted(tmp_path: Path) -> None:
    ids = {"generated_token_ids": list(range(8))}
    dense = one(tmp_path, **ids, drafters={"head": {"accepted": [2, 0, 0, 1, 3, 0, 0, 0]}})
    assert dense.hits("head") == [1, 0, 0, 1, 1, 0, 0, 0]
    steps = [[0, 3, 2], [3, 1, 1], [5, 2, 0], [6, 2, 1]]
    text = one(tmp_path, **ids, drafters={"head": {"steps": steps}})
    assert text.hits("head") == [1, 1, 0, 1, 1, 0, 1, 0], "after 2 of 3, 1 of 1, none of 2, 1 of 2"


BAD = {
    "not JSON": ("{", "not a JSON object"),
    "no ids": ('{"drafters": {"head": {"accepted": []}}, "generated_token_ids": [1]}', "prompt_token_ids is missing"),
    "huge id": ({"generated_token_ids": [1, 2**40, 3]}, "generated_token_ids: a token id is below 0 or too large"),
    "bool id": ({"generated_token_ids": [1, True, 3]}, "generated_token_ids: token ids are whole numbers"),
    "empty text": ({"generated_token_ids": []}, "hold at least one token"),
    "no drafter": ({"drafters": {}}, "no drafter"),
    "no positions": ({"drafters": {"head": {"accepted": []}}}, "a drafter has no positions"),
    "two arrays": ({"drafters": {"head": {"accepted": [1], "steps": []}}}, "head: needs one of"),
    "negative length": ({"drafters": {"head": {"accepted": [1, -1, 0]}}}, "head.accepted: whole numbers from 0"),
    "nothing committed": ({"acc_eagle": {"acc_len": [1, 0, 1]}}, "eagle.acc_len: whole numbers from 1"),
    "rising": ({"drafters": {"head": {"survivals": [[0.2, 0.3]]}}}, "head.survivals: probabilities"),
    "more than drafted": ({"drafters": {"head": {"steps": [[0, 1, 2]]}}}, "head.steps: step [0, 1, 2]"),
    "deep": ("[" * 100_000, "nested too deep"),
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


def test_every_bad_line_is_listed_up_to_a_limit(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("{}\n" * 25)
    with pytest.raises(InputError) as error:
        read_logs([path])
    lines = str(error.value).splitlines()
    assert lines[0].startswith(f"{path}:1: ") and lines[19].startswith(f"{path}:20: ")
    assert lines[20:] == ["and 5 more lines"]


@pytest.mark.parametrize(
    ("content", "message"), [(b"", "no texts"), (b"\n \n", "no texts"), (b"\xff\xfe", "not UTF-8")], ids=str
)
def test_a_file_without_texts_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        read_logs([path])


def test_a_missing_file_and_a_folder_are_refused(tmp_path: Path) -> None:
    for path in (tmp_path / "none.jsonl", tmp_path):
        with pytest.raises(InputError, match=str(path)):
            read_logs([path])


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


def test_a_file_of_another_tokenizer_is_noticed(tmp_path: Path) -> None:
    own, other = ([record(n, offset=offset) for n in range(4)] for offset in (0, 5000))
    files = [write(tmp_path / "own.jsonl", own), write(tmp_path / "like.jsonl", [record(9)])]
    assert foreign(read_logs(files)) == []
    files.append(write(tmp_path / "other.jsonl", other))
    assert foreign(read_logs(files)) == [str(files[-1])]
