"""Lines of a log (`data_gen.texts.logs`) from what other programs write: an importer for each kind of line.

The keys are those of vLLM 0.33.0, SGLang 0.5.23 and llama.cpp 0c1e570. Only vLLM says how many tokens a step drafted
and accepted, and only of steps that drafted something. A text whose steps are not known has its token ids, which are
enough for lookups; its `note` says what is missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import BaseModel, Field

DRAFTED = "draft"  # the drafter's name: a response does not say which one it was
SIMULATOR = "acc_"  # prefix of drafters' names in logs of SpecDecode-Bench's simulator
LEFT_OUT = "vLLM left out steps that draft nothing, so it is not known where the others began"
NO_STEPS = "vLLM gave sums over steps alone (--per-request-spec-decode-metrics detailed gives each step)"


class Simulated(BaseModel):
    acc_len: list[Annotated[int, Field(ge=1, strict=True)]]


class Metrics(BaseModel):
    """What vLLM says of the steps of a response."""

    num_spec_steps: int = 0
    per_step_drafted: list[int] | None = None
    per_step_accepted: list[int] | None = None


def record_of(line: Any) -> Any:
    """The line of a log; a line that no importer knows is taken as it is.

    Raises:
        ValueError: a response holds no token ids or fewer than it had, several answers, or steps of which lists of
            different lengths tell.
    """
    found = (importer(line) for importer in IMPORTERS if isinstance(line, dict))
    return next((record for record in found if record is not None), line)


def _of_openai(answer: dict[str, Any]) -> dict[str, Any] | None:
    """Of vLLM and SGLang, /v1/completions and /v1/chat/completions."""
    choices = answer.get("choices")
    if not isinstance(choices, list):
        return None
    if len(choices) != 1 or not isinstance(choices[0], dict):
        raise ValueError("choices: one answer to one prompt is needed (n = 1)")
    return _record(answer, "token_ids", {**answer, **choices[0]})


def _of_sglang(answer: dict[str, Any]) -> dict[str, Any] | None:
    """Of /generate."""
    return _record(answer, "output_ids", answer) if isinstance(answer.get("meta_info"), dict) else None


def _of_sglangs_request_log(line: dict[str, Any]) -> dict[str, Any] | None:
    if line.get("event") != "request.finished" or not isinstance(line.get("out"), dict):
        return None
    prompt = _within(line, "obj").get("input_ids")
    return _record(line["out"], "output_ids", {"prompt_token_ids": prompt, **line["out"]})


def _of_llama_server(answer: dict[str, Any]) -> dict[str, Any] | None:
    """Of /completion."""
    return _record(answer, "tokens", answer) if isinstance(answer.get("timings"), dict) else None


def _of_simulator(line: dict[str, Any]) -> dict[str, Any] | None:
    """Its `acc_len` counts the tokens that a step commits, the additional one included."""
    counts = {
        key.removeprefix(SIMULATOR): Simulated.model_validate(own).acc_len
        for key, own in line.items()
        if key.startswith(SIMULATOR)
    }
    drafters = {name: {"accepted": [count - 1 for count in own]} for name, own in counts.items()}
    return line | {"drafters": drafters} if drafters else None


Importer = Callable[[dict[str, Any]], dict[str, Any] | None]
IMPORTERS: list[Importer] = [_of_sglangs_request_log, _of_openai, _of_sglang, _of_llama_server, _of_simulator]


def _record(answer: dict[str, Any], ids: str, fields: dict[str, Any]) -> dict[str, Any]:
    for key in ("prompt_token_ids", ids):
        if not isinstance(fields.get(key), list):
            raise ValueError(f"{key} is missing in the engine's response; docs/logs.md says how to ask for token ids")
    record = {"prompt_token_ids": fields["prompt_token_ids"], "generated_token_ids": fields[ids]}
    record |= {key: answer[key] for key in ("source", "kind") if key in answer}
    if name := answer.get("id") or _within(answer, "meta_info").get("id"):
        record["id"] = name
    count = _within(answer, "usage").get("completion_tokens", _within(answer, "meta_info").get("completion_tokens"))
    if isinstance(count, int) and count > len(fields[ids]):
        raise ValueError(f"{ids}: {len(fields[ids])} token ids of an answer of {count} tokens")
    found = _within(_within(answer, "metrics"), "speculative_decoding")
    if not found:
        return record | {"drafters": {}}
    steps = _steps(Metrics.model_validate(found), len(fields[ids]))
    if isinstance(steps, str):
        return record | {"drafters": {}, "note": steps}
    return record | {"drafters": {DRAFTED: {"steps": steps}}}


def _within(values: dict[str, Any], key: str) -> dict[str, Any]:
    """The object at a key; an empty one where there is none."""
    found = values.get(key)
    return found if isinstance(found, dict) else {}


def _steps(metrics: Metrics, tokens: int) -> list[list[int]] | str:
    """Position, drafted and accepted tokens of each step; or why they are not known. The prompt's pass gives the first
    token, so steps begin at position 1; steps may go beyond the text's end, where the engine cut it."""
    accepted, drafted = metrics.per_step_accepted or [], metrics.per_step_drafted or []
    if metrics.num_spec_steps and not accepted:
        return NO_STEPS
    if len(accepted) != len(drafted):
        raise ValueError("per_step_accepted and per_step_drafted differ in length")
    position, steps = 1, list[list[int]]()
    for more, kept in zip(drafted, accepted, strict=True):
        if position < tokens:
            steps.append([position, more, kept])
        position += kept + 1
    return steps if position >= tokens else LEFT_OUT
