"""Engines' responses as lines of a log. The samples in `responses/` have the engines' own keys."""

from __future__ import annotations

import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data_gen.texts.logs import NO_DRAFTER, drafter_of, read_logs
from data_gen.texts.responses import record_of
from selector.schema import InputError

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
    assert all(text.roots == len(TEXT) and len(text.hits(NO_DRAFTER)) == len(TEXT) for text in texts)


def test_vllm_says_what_each_step_accepted() -> None:
    """The prompt's pass gives the first token; 3 of 3, none of 3 and 3 of 3 follow, and one more token each time."""
    (text, chat), unknown = read_logs([SAMPLES / "vllm.jsonl"]), np.nan
    steps = {1: [1, 1, 1], 5: [0, 0, 0], 6: [1, 1, 1]}
    expected = [steps.get(position, [unknown] * 3) for position in range(len(TEXT))]
    np.testing.assert_array_equal(text.of("draft"), np.array(expected, np.float32))
    np.testing.assert_array_equal(chat.of("draft"), text.of("draft"))
    assert (text.name, chat.name) == ("cmpl-8f0c", "chatcmpl-51aa")


def test_steps_beyond_the_end_of_a_text_are_cut() -> None:
    answer = samples("vllm")[0]
    answer["choices"][0]["token_ids"] = TEXT[:6]  # a stop string inside of the last step
    record = record_of(answer)
    assert record["drafters"]["draft"]["steps"] == [[1, 3, 3], [5, 3, 0]]


def test_what_the_recorder_adds_is_kept() -> None:
    record = record_of({**samples("llama-server")[0], "source": "user 17", "kind": "chat"})
    assert (record["source"], record["kind"]) == ("user 17", "chat")
    own = {"prompt_token_ids": [1], "generated_token_ids": [2]}
    assert record_of(own) is own


def without(answer: dict[str, Any], *path: Any) -> dict[str, Any]:
    copy = deepcopy(answer)
    within: Any = copy
    for key in path[:-1]:
        within = within[key]
    del within[path[-1]]
    return copy


VLLM, LLAMA = samples("vllm")[0], samples("llama-server")[0]
METRICS = VLLM["metrics"]["speculative_decoding"]


def measured(**changed: Any) -> dict[str, Any]:
    return {**VLLM, "metrics": {"speculative_decoding": {**METRICS, **changed}}}


BAD = {
    "no ids": (without(VLLM, "choices", 0, "token_ids"), "token_ids is missing in the engine's response"),
    "llama-server's prompt": (without(LLAMA, "prompt_token_ids"), "prompt_token_ids is missing"),
    "two answers": ({**VLLM, "choices": VLLM["choices"] * 2}, "choices: one answer"),
    "a summary": (without(VLLM, "metrics", "speculative_decoding", "per_step_accepted"), "detailed"),
    "steps are missing": (measured(per_step_accepted=[3], per_step_drafted=[3]), "yield 5 of 10 tokens"),
    "other lengths": (measured(per_step_accepted=[3, 0]), "differ in length"),
    "no numbers": (measured(per_step_accepted=["a", 0, 3]), "per_step_accepted.0: Input should be a valid integer"),
    "more than drafted": (measured(per_step_accepted=[4, 0, 3]), "draft.steps: step [1, 3, 4]"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_response_is_one_clear_line(name: str, tmp_path: Path) -> None:
    answer, message = BAD[name]
    path = tmp_path / "log.jsonl"
    path.write_text(json.dumps(answer) + "\n")
    with pytest.raises(InputError) as error:
        read_logs([path])
    assert str(error.value).startswith(f"{path}:1: ") and message in str(error.value)
    assert "\n" not in str(error.value)
