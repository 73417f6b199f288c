"""Responses of engines as lines of a log: what vLLM, SGLang and llama-server answer, with the engines' own keys.

The keys are those of vLLM 0.33.0, SGLang 0.5.23 and llama.cpp 0c1e570. Only vLLM says how many tokens each step drafted
and accepted. A text without steps has its token ids, which suffice for lookups.
"""

from __future__ import annotations

from typing import Any

DRAFTED = "draft"  # the drafter's name: a response does not say which one it was


def record_of_response(answer: dict[str, Any]) -> dict[str, Any] | None:
    """The line of a log (`data_gen.texts.logs`); None where it is no engine's response.

    Raises:
        ValueError: the response holds no token ids, several answers, or steps that do not fit to its tokens.
    """
    if answer.get("event") == "request.finished" and isinstance(answer.get("out"), dict):  # SGLang's request log
        given = answer["obj"] if isinstance(answer.get("obj"), dict) else {}
        return _record(answer["out"], "output_ids", {"prompt_token_ids": given.get("input_ids"), **answer["out"]})
    if isinstance(answer.get("choices"), list):  # vLLM and SGLang, /v1/completions and /v1/chat/completions
        if len(answer["choices"]) != 1 or not isinstance(answer["choices"][0], dict):
            raise ValueError("choices: one answer to one prompt is needed (n = 1)")
        (choice,) = answer["choices"]
        return _record(answer, "token_ids", {**answer, **choice})
    if isinstance(answer.get("meta_info"), dict):  # SGLang, /generate
        return _record(answer, "output_ids", answer)
    if isinstance(answer.get("timings"), dict):  # llama-server, /completion
        return _record(answer, "tokens", answer)
    return None


def _record(answer: dict[str, Any], ids: str, fields: dict[str, Any]) -> dict[str, Any]:
    for key in ("prompt_token_ids", ids):
        if not isinstance(fields.get(key), list):
            raise ValueError(f"{key} is missing in the engine's response; docs/logs.md says how to ask for token ids")
    record = {"prompt_token_ids": fields["prompt_token_ids"], "generated_token_ids": fields[ids]}
    record |= {key: answer[key] for key in ("source", "kind") if key in answer}
    if name := answer.get("id") or _within(answer, "meta_info").get("id"):
        record["id"] = name
    metrics = _within(_within(answer, "metrics"), "speculative_decoding")
    return record | {"drafters": {DRAFTED: {"steps": _steps(metrics, len(fields[ids]))}} if metrics else {}}


def _within(values: dict[str, Any], key: str) -> dict[str, Any]:
    """The object at a key; an empty one where there is none."""
    found = values.get(key)
    return found if isinstance(found, dict) else {}


def _steps(metrics: dict[str, Any], tokens: int) -> list[list[int]]:
    """Position, drafted and accepted tokens of each step. The prompt's pass gives the first token, so steps begin at
    position 1; steps may go beyond the text's end, where the engine cut it."""
    accepted, drafted = (metrics.get(key) or [] for key in ("per_step_accepted", "per_step_drafted"))
    if metrics.get("num_spec_steps") and not accepted:
        raise ValueError("no per_step_accepted: start vLLM with --per-request-spec-decode-metrics detailed")
    if len(accepted) != len(drafted):
        raise ValueError("per_step_accepted and per_step_drafted differ in length")
    if not all(type(count) is int for count in (*accepted, *drafted)):
        raise ValueError("per_step_accepted and per_step_drafted: whole numbers")
    position, steps = 1, list[list[int]]()
    for more, kept in zip(drafted, accepted, strict=True):
        if position < tokens:
            steps.append([position, more, kept])
        position += kept + 1
    if position < tokens:
        raise ValueError(
            f"its steps yield {position} of {tokens} tokens: vLLM leaves out steps that draft nothing, so record with "
            "one number of drafted tokens for all batch sizes"
        )
    return steps
