"""Logs of engines: every format that is read, engines' own responses, and one clear line for what
does not fit.

The responses in `responses/` have the engines' own keys.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from copy import deepcopy
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from data_gen.models.sampling import Sampling
from data_gen.texts.log_labels import VERIFIER, Labeller, with_features
from data_gen.texts.log_lines import record_of
from data_gen.texts.logs import NO_DRAFTER, distinct, drafter_of, read_all, read_logs
from data_gen.texts.prompts import PACKED
from data_gen.traces import HIT
from selector.actions import ActionSpace
from selector.schema import LOOKUP_COLUMN, InputError
from tests.checks import ROOT, environment, one_line
from tests.pipelines.small_logs import record, write


def one(tmp_path: Path, **changed: Any) -> Any:
    """A text of three positions, read from a file."""
    entry = {"prompt_token_ids": [1, 2], "generated_token_ids": [3, 4, 5], **changed}
    return read_logs([write(tmp_path / "log.jsonl", [entry])])[0]


NAN = np.nan


@pytest.mark.parametrize(
    ("drafter", "expected"),
    [
        ({"accepted": [2, 0, 1]}, [[1, 1], [0, 0], [1, 0]]),
        ({"survivals": [[0.5, 0.25], [], [1.0]]}, [[0.5, 0.25], [0, 0], [1, 0]]),
        ({"survivals": [[0.5, 0.25], None, [1.0]]}, [[0.5, 0.25], [NAN, NAN], [1, NAN]]),
        ({"steps": [[0, 1, 1], [2, 3, 1]]}, [[1, NAN, NAN], [NAN] * 3, [1, 0, 0]]),
    ],
    ids=["accepted lengths", "survivals", "survivals of steps", "steps"],
)
def test_what_is_known_becomes_survivals(
    drafter: dict[str, Any], expected: list[list[float]], tmp_path: Path
) -> None:
    text = one(tmp_path, drafters={"head": drafter})
    np.testing.assert_array_equal(text.of("head"), expected)
    assert (text.tokens, text.start, text.roots, text.kind) == ([1, 2, 3, 4, 5], 2, 3, "log")


def test_the_simulator_counts_the_additional_token(tmp_path: Path) -> None:
    text = one(tmp_path, acc_eagle={"acc_len": [3, 1, 2]}, acc_ngram={"acc_len": [1, 1]})
    assert text.survivals["eagle"].tolist() == [[1, 1], [0, 0], [1, 0]]
    assert text.roots == 2, "a text ends with the last position that every drafter has"
    assert drafter_of([text], None) == "eagle", "lookups are computed from the ids"


def test_hits_of_steps_are_what_was_accepted(tmp_path: Path) -> None:
    ids = {"generated_token_ids": list(range(8))}
    dense = one(tmp_path, **ids, drafters={"head": {"accepted": [2, 0, 0, 1, 3, 0, 0, 0]}})
    assert dense.hits("head") == [1, 0, 0, 1, 1, 0, 0, 0]
    steps = [[0, 3, 2], [3, 1, 1], [5, 2, 0], [6, 2, 1]]
    text = one(tmp_path, **ids, drafters={"head": {"steps": steps}})
    assert text.hits("head") == [1, 1, 0, 1, 1, 0, 1, 0], "after 2 of 3, 1 of 1, none of 2, 1 of 2"


def test_which_drafter_is_asked_for_where_there_are_several(tmp_path: Path) -> None:
    accepted = {"accepted": [1, 0, 0]}
    text = one(tmp_path, drafters=dict.fromkeys(("head", "small", "ngram"), accepted))
    assert drafter_of([text], "small") == "small"
    for wanted, message in ((None, "name one of"), ("other", "is not in the log")):
        with pytest.raises(InputError, match=f"logs.drafter: .*{message}"):
            drafter_of([text], wanted)
    with pytest.raises(InputError, match=r"log\.jsonl:1: no entry of head"):
        drafter_of([text, one(tmp_path, drafters={"small": {"accepted": [0, 0, 0]}})], "head")


def test_equal_texts_count_once(tmp_path: Path) -> None:
    texts = read_logs(
        [write(tmp_path / "log.jsonl", [record(1), record(2), {**record(1), "id": "again"}])]
    )
    assert [text.name for text in distinct(texts)] == ["prose 1", "prose 2"]


SAMPLES = Path(__file__).parent / "responses"
PROMPT = [128000, 9906, 11, 1917]
TEXT = [374, 264, 1296, 374, 264, 1296, 374, 264, 13, 128009]


def samples(engine: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (SAMPLES / f"{engine}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("engine", "count"), [("vllm", 2), ("sglang", 3), ("llama-server", 1)])
def test_every_response_has_its_token_ids(engine: str, count: int) -> None:
    texts = read_logs([SAMPLES / f"{engine}.jsonl"])
    assert len(texts) == count
    assert all(text.tokens == PROMPT + TEXT and text.start == len(PROMPT) for text in texts)
    assert drafter_of(texts, None) == ("draft" if engine == "vllm" else NO_DRAFTER)
    assert all(
        text.roots == len(TEXT) and len(text.hits(NO_DRAFTER)) == len(TEXT) for text in texts
    )


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_what_each_step_accepted_is_read(engine: str, tmp_path: Path) -> None:
    """The prompt's pass gives the first token; 3 of 3, none of 3 and 3 of 3 follow, and one more
    token each time. SGLang's fields are those of its pull request 34814, whose lengths hold the
    root or the additional token."""
    path = SAMPLES / "vllm.jsonl"
    if engine == "sglang":
        (text, generated, _), ids = samples("sglang"), ("cmpl-8f0c", "chatcmpl-51aa")
        stats = {"speculative_decoding_stats": STATS}
        generated["meta_info"] |= {"id": ids[1], **stats}
        path = write(tmp_path / "log.jsonl", [text | {"id": ids[0], "sglext": stats}, generated])
    text, chat = read_logs([path])
    steps = {1: [1, 1, 1], 5: [0, 0, 0], 6: [1, 1, 1]}
    expected = [steps.get(position, [NAN] * 3) for position in range(len(TEXT))]
    np.testing.assert_array_equal(text.of("draft"), np.array(expected, np.float32))
    np.testing.assert_array_equal(chat.of("draft"), text.of("draft"))
    assert (text.name, chat.name) == ("cmpl-8f0c", "chatcmpl-51aa")


def test_steps_beyond_the_end_of_a_text_are_cut() -> None:
    answer = samples("vllm")[0]
    answer["choices"][0]["token_ids"] = TEXT[:8]  # a stop string inside of the last step
    answer["usage"]["completion_tokens"] = 8
    record = record_of(answer)
    assert record["drafters"]["draft"]["steps"] == [[1, 3, 3], [5, 3, 0], [6, 3, 3]]


def test_what_the_recorder_adds_is_kept() -> None:
    record = record_of({**samples("llama-server")[0], "source": "user 17", "kind": "chat"})
    assert (record["source"], record["kind"]) == ("user 17", "chat")
    record = {"prompt_token_ids": [1], "generated_token_ids": [2]}
    assert record_of(record) is record


def without(answer: dict[str, Any], *path: Any) -> dict[str, Any]:
    copy = deepcopy(answer)
    within: Any = copy
    for key in path[:-1]:
        within = within[key]
    del within[path[-1]]
    return copy


VLLM, LLAMA, GENERATED = samples("vllm")[0], samples("llama-server")[0], samples("sglang")[1]
METRICS = VLLM["metrics"]["speculative_decoding"]


def measured(**changed: Any) -> dict[str, Any]:
    return {**VLLM, "metrics": {"speculative_decoding": {**METRICS, **changed}}}


SUMMARY = without(VLLM, "metrics", "speculative_decoding", "per_step_accepted")
LEFT_OUT = measured(num_spec_steps=1, per_step_accepted=[3], per_step_drafted=[3])
# vLLM 0.32 of an answer without
NOTHING = measured(num_spec_steps=0, per_step_accepted=None, per_step_drafted=None)
SURPLUS = measured(num_spec_steps=4, per_step_accepted=[3, 0, 3, 0], per_step_drafted=[3, 3, 3, 3])
# these add up to the text
STATS = {"verify_lengths": [4, 4, 4], "accept_lengths": [4, 1, 4]}
ADDED = {"total_retractions": 1, "speculative_decoding_stats": STATS}
RETRACTED = {**GENERATED, "meta_info": {**GENERATED["meta_info"], **ADDED}}


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (SUMMARY, "sums over steps"),
        (LEFT_OUT, "left out steps"),
        (NOTHING, "left out steps"),
        (SURPLUS, "steps of tokens that the text does not have"),
        (RETRACTED, "steps of tokens that the text does not have"),
    ],
)
def test_a_text_whose_steps_are_not_known_is_for_lookups_alone(
    answer: Any, why: str, tmp_path: Path
) -> None:
    """Where most texts are such ones, lookups are learned; where few are, the drafter's chains,
    from the others."""
    answers = []
    for number in range(7):
        copy = deepcopy(answer if number < 2 else VLLM)
        (copy.get("choices") or [copy])[0]["prompt_token_ids"] = [number] * 4
        answers.append({**copy, "id": str(number)})
    logs = read_all([write(tmp_path / "log.jsonl", answers[:2])], [], Sampling(0.0))
    assert drafter_of(logs.all, None) == NO_DRAFTER and logs.of(NO_DRAFTER) == logs
    assert logs.remarks[0].startswith("2 of 2 texts are for lookups alone: ")
    assert why in logs.remarks[0] and logs.remarks[0].endswith("log.jsonl:1")
    logs = read_all([write(tmp_path / "log.jsonl", answers)], [], Sampling(0.0))
    assert drafter_of(logs.all, None) == "draft"
    assert [text.name for text in logs.of("draft").texts] == ["2", "3", "4", "5", "6"]


def test_beyond_what_a_text_drafted_nothing_is_known(tmp_path: Path) -> None:
    """Neither of a third token after two that were accepted, nor of those after a rejected one:
    beyond a draft's end, rejections alone would be seen."""
    steps = {"short": [[0, 2, 2], [3, 2, 1]], "long": [[0, 4, 4], [5, 4, 0]]}
    ids = {"prompt_token_ids": [1], "generated_token_ids": list(range(9))}
    entries = [
        {**ids, "id": name, "drafters": {"head": {"steps": logged}}}
        for name, logged in steps.items()
    ]
    texts = read_logs([write(tmp_path / "log.jsonl", entries)])
    space = ActionSpace.chains(4, 20)
    rows = Labeller("head", space, Sampling(0.0)).table(texts[:1])
    short_RD = with_features(rows).observed(VERIFIER, slice(None), space)[:, :4]
    expected = [[1, 1, np.nan, np.nan], [np.nan] * 4, [1, 0, np.nan, np.nan]]
    np.testing.assert_array_equal(short_RD[[0, 1, 3]], expected)


GOOD = {
    "prompt_token_ids": [1],
    "generated_token_ids": [2, 3, 4],
    "drafters": {"head": {"accepted": [0, 1, 0]}},
}


def drafted(**entries: Any) -> dict[str, Any]:
    return {**GOOD, "drafters": {"head": entries}}


BAD = {
    "no prompt": ({"generated_token_ids": [1]}, "prompt_token_ids: "),
    "huge id": ({**GOOD, "generated_token_ids": [1, 2**40]}, "generated_token_ids.1: "),
    "bool": ({**GOOD, "generated_token_ids": [1, True]}, "generated_token_ids.1: "),
    "longer": (drafted(accepted=[1, 0, 0, 2]), "drafters.head: 4 entries for 3"),
    "shorter": (drafted(survivals=[[1], []]), "drafters.head: 2 entries for 3"),
    "twice": (drafted(steps=[[0, 3, 1], [1, 3, 0]]), "step [1, 3, 0] begins within"),
    "source": ({**GOOD, "source": ["a"]}, "source: "),
    "two": (drafted(accepted=[1], steps=[]), "drafters.head: one of accepted, "),
    "negative": (drafted(accepted=[1, -1]), "drafters.head.accepted.1: "),
    "nothing committed": ({**GOOD, "acc_eagle": {"acc_len": [1, 0]}}, "acc_len.1: "),
    "rising": (drafted(survivals=[[0.2, 0.3], [], []]), "drafters.head.survivals: "),
    "accepted": (drafted(steps=[[0, 1, 2]]), "drafters.head.steps: step [0, 1, 2]"),
    "no ids": (without(VLLM, "choices", 0, "token_ids"), "no token ids: docs/logs.md"),
    "two answers": ({**VLLM, "choices": VLLM["choices"] * 2}, "choices: "),
    "lost ids": ({**VLLM, "usage": {"completion_tokens": 11}}, "10 token ids of an answer of 11"),
    "SGLang's": ({**GENERATED, "output_ids": TEXT[:3]}, "3 token ids of an answer of 10"),
    "llama-server's": ({**LLAMA, "tokens": TEXT[:3]}, "3 token ids of an answer of 10"),
    "other lengths": (measured(per_step_accepted=[3, 0]), "differ in length"),
    "no numbers": (measured(per_step_accepted=["a", 0, 3]), "per_step_accepted.0: "),
    "other count": (measured(num_spec_steps=7), "3 steps are listed, num_spec_steps=7"),
    "lost prompt": ({**VLLM, "usage": {"prompt_tokens": 99}}, "4 token ids of a prompt of 99"),
    "two keys": ({**GOOD, "acc_head": {"acc_len": [1]}}, "head stands in drafters.head and in acc"),
    "called none": ({**GOOD, "drafters": {"none": {"accepted": [0, 1, 0]}}}, "not called none"),
    "more accepted": (measured(per_step_accepted=[4, 0, 3]), "draft.steps: step [1, 3, 4]"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_named_with_its_file_and_number(name: str, tmp_path: Path) -> None:
    line, message = BAD[name]
    path = tmp_path / "log.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{json.dumps(line)}\n")
    # a single one
    assert len(read_logs([path], remarks := [])) == 1 and f"{path}:3: " in remarks[0]
    path.write_text(f"{json.dumps(GOOD)}\n\n{json.dumps(line)}\n{json.dumps(line)}\n")
    with one_line(f"{path}:3: ", message):
        read_logs([path])


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_few_bad_lines_are_counted_and_left_out(suffix: str, tmp_path: Path) -> None:
    lines = [json.dumps({**GOOD, "prompt_token_ids": [n]}) for n in range(78)]
    lines[40:40] = [
        '{"error": {"code": 503}}',
        json.dumps({**GOOD, "prompt_token_ids": []}),
        '{"error": {"code": 500}}',
    ]
    path, content = tmp_path / f"log.jsonl{suffix}", "\n".join([*lines, lines[0][:30]]).encode()
    packed = pa.compress(content, PACKED[suffix], asbytes=True) if suffix else content
    path.write_bytes(packed)
    logs = read_all([path], [], Sampling(0.0))
    assert len(logs.texts) == 78 and logs.texts[0].kind == "log"
    (remark,) = logs.remarks
    assert remark.startswith(f"4 of 82 lines are left out, the first one is {path}:41: ")
    path.write_bytes(packed[:-20])
    if suffix:
        with pytest.raises(InputError, match=re.escape(str(path))):
            read_all([path], [], Sampling(0.0))


ABORTED = {
    "no ids": {**GOOD, "generated_token_ids": []},
    "vLLM's": {**VLLM, "choices": [{**VLLM["choices"][0], "finish_reason": "abort"}]},
    "SGLang's": {**GENERATED, "meta_info": {"finish_reason": {"type": "abort"}}},
    "no count": {**GENERATED, "output_ids": [-1]},
}


@pytest.mark.parametrize("name", ABORTED)
def test_aborted_requests_are_counted_and_never_a_reason_to_refuse(
    name: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "log.jsonl", [GOOD, *[ABORTED[name]] * 3])
    assert len(read_logs([path], remarks := [])) == 1
    assert remarks == ["3 aborted requests are left out"]
    with one_line(f"{path}: all 3 requests were aborted"):
        read_logs([write(path, [ABORTED[name]] * 3)])


def test_of_a_long_log_whole_sources_are_read(tmp_path: Path) -> None:
    """Which ones does not depend on the order of the lines; a text has its positions and an eighth
    of its prompt. The server's load is that of all requests."""
    request = {**GOOD, "prompt_token_ids": [1] * 8}
    lines = [
        {**request, "id": str(n), "source": f"user {n % 50}", "arrived": n} for n in range(200)
    ]
    path = write(tmp_path / "log.jsonl", lines)
    texts = read_logs([path], remarks := [], positions=410, arrived=(arrived := []))
    assert arrived == list(range(200))
    counts = Counter(text.source for text in texts)
    assert set(counts.values()) == {4} and len(counts) == 25, "of 16 positions each"
    assert [text.name for text in texts] == sorted((t.name for t in texts), key=int)
    assert "100 of 200 texts are read" in remarks[0]
    backwards = read_logs([write(path, lines[::-1])], positions=410)
    assert {text.name for text in backwards} == {text.name for text in texts}


STEPS = drafted(steps=[[0, 3, 1]])


@pytest.mark.parametrize("draft_temperature", [None, 0.0])
def test_texts_of_another_temperature_are_left_out(
    draft_temperature: float | None, tmp_path: Path
) -> None:
    """And steps of sampled drafts tell nothing of others."""
    told = [{**STEPS, "prompt_token_ids": [n], "temperature": n / 10} for n in (0, 7, 7)]
    told[2] |= {"prompt_token_ids": [8]}
    sampled = Sampling(0.7, draft_temperature=draft_temperature)
    path = write(tmp_path / "log.jsonl", told)
    if draft_temperature is None:
        with one_line(f"{path}:2: ", "greedy: set draft_temperature to 0"):
            read_all([path], [], sampled)
        return
    logs = read_all([path], [], sampled)
    assert len(logs.texts) == 2
    assert logs.remarks == ["1 texts of another temperature than 0.7 are left out"]
    with one_line(f"{path}: no texts of temperature 0.3 there"):
        read_all([path], [], Sampling(0.3))


def test_when_a_request_came_is_read_from_every_engine(tmp_path: Path) -> None:
    """SGLang's request log says when it ended, and how long it took."""
    (_, _, logged), begun = samples("sglang"), samples("vllm")[0]
    logged["out"]["meta_info"]["e2e_latency"] = 2.5
    path = write(tmp_path / "log.jsonl", [begun, logged, {**GOOD, "arrived": 7}])
    texts = read_logs([path])
    ended = datetime.fromisoformat("2026-11-23T10:00:00").timestamp()
    assert [text.arrived for text in texts] == [begun["created"], ended - 2.5, 7]
    assert [text.temperature for text in texts] == [None, 0.0, None]


def test_a_log_without_texts_has_the_same_lookups_and_steps(tmp_path: Path) -> None:
    """Token ids that are hashed with a key are equal where the tokens are."""
    key = tmp_path / "key"
    key.write_bytes(b"a secret")
    program = [sys.executable, str(ROOT / "docs/examples/logs/hashed.py"), str(key)]
    plain = (SAMPLES / "vllm.jsonl").read_bytes()
    output = subprocess.run(
        program, input=plain, stdout=subprocess.PIPE, env=environment(), check=True
    ).stdout
    assert str(VLLM["choices"][0]["text"]).encode() not in output and b"128009" not in output
    (tmp_path / "hashed.jsonl").write_bytes(output)
    space = ActionSpace.chains(3, 20)
    tables = [
        Labeller("draft", space, Sampling(0.0)).table(read_logs([path]))
        for path in (SAMPLES / "vllm.jsonl", tmp_path / "hashed.jsonl")
    ]
    for column in (LOOKUP_COLUMN, HIT, "start", "roots"):
        assert tables[0][column].to_pylist() == tables[1][column].to_pylist()


def test_missing_names_are_none_and_equal_numbers_one_source(tmp_path: Path) -> None:
    lines = [{**GOOD, "source": source} for source in (None, np.nan, 1, 1.0)]
    path = write(tmp_path / "log.jsonl", lines)
    texts = read_logs([path])
    assert [text.source for text in texts] == [f"log {path}:1", f"log {path}:2", "1", "1"]
    assert (texts[0].name, texts[0].kind) == (f"{path}:1", "log")


def test_a_source_that_is_held_out_is_not_learned_from(tmp_path: Path) -> None:
    lines = [{**GOOD, "prompt_token_ids": [n], "source": f"user {n % 3}"} for n in range(9)]
    train, test = write(tmp_path / "a.jsonl", lines[:6]), write(tmp_path / "b.jsonl", lines[8:])
    logs = read_all([train], [test], Sampling(0.0))
    assert {text.source for text in logs.texts} == {"user 0", "user 1"} and len(logs.held_out) == 1
    assert logs.remarks == ["2 texts are left out, because their sources are held out"]
