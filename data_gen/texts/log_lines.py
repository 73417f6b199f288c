"""The lines of a log: how many of a drafter's tokens are accepted at each position of a text.

A line is a JSON object:

    prompt_token_ids, generated_token_ids   lists of token ids
    drafters      {name: {"accepted": [..]}}: for each position of the generated text, how many
                  drafted tokens of a step that begins there are accepted; or
                  {name: {"survivals": [[..], ..]}}: for each position, P(accepted >= t) for
                  t = 1, 2, ..; of decoded steps alone, null at the other positions; or
                  {name: {"steps": [[position, drafted, accepted], ..]}}: the steps that were
                  decoded
    id, source, kind   optional: a name; texts of one source are not independent; the kind of work
    arrived, temperature   optional: when the request came, in seconds; of its sampling

A step commits the accepted tokens, the first one at the step's position, and one more token.

Lines of other programs become such ones: of the simulator of SpecDecode-Bench, and responses of
vLLM 0.33.0, SGLang 0.5.23 and llama.cpp 0c1e570. Of the engines, vLLM says how many tokens a step
drafted and accepted, of steps that drafted something, and SGLang will (pull request 34814, commit
622d048d). A text whose steps are not known is enough for lookups; its `note` says what is missing.

Legend: R positions, D depths.
"""

from __future__ import annotations

from datetime import datetime
from itertools import pairwise
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import AliasChoices, AliasPath, BaseModel, Field, field_validator

from data_gen.texts.prompts import Name, Record
from selector.actions import LARGEST

# the drafter's name in traces and in responses, which do not say which one it was
DRAFTER = "draft"
NO_DRAFTER = "none"  # a drafter's name: lookups alone
SIMULATOR = "acc_"  # prefix of drafters' names in logs of SpecDecode-Bench's simulator
LEFT_OUT = "the engine left out steps that draft nothing, so it is not known where the others began"
NO_STEPS = "the engine gave sums over steps alone (the level `detailed` gives each step)"
OTHER_STEPS = "steps of tokens that the text does not have, as after a preemption or a retraction"
ABORTED = "abort"  # as a reason to finish

TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31 - 1)]], Field(min_length=1)]
Count = Annotated[int, Field(ge=0, lt=LARGEST)]
Probabilities = Annotated[list[Annotated[float, Field(ge=0, le=1)]], Field(max_length=LARGEST - 1)]
Step = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=3, max_length=3)]


class Drafted(BaseModel):
    """What a line says of one drafter, in one of three ways."""

    accepted: list[Count] | None = None
    survivals: list[Probabilities | None] | None = None
    steps: list[Step] | None = None
    other_length: bool = False  # whether there may be more or fewer entries than positions

    def survivals_RD(self, name: str, positions: int) -> NDArray[np.float32]:
        """P(accepted >= t) at each position; NaN where it is not known. ValueError for what cannot
        be."""
        if sum(entries is not None for entries in (self.accepted, self.survivals, self.steps)) != 1:
            raise ValueError(f"drafters.{name}: one of accepted, survivals and steps")
        if self.steps is not None:
            return _of_steps(name, self.steps, positions)
        rows: list[list[float] | None] = self.survivals or []
        if self.accepted is not None:
            rows = [[1.0] * count for count in self.accepted]
        if not rows or (len(rows) != positions and not self.other_length):
            raise ValueError(
                f"drafters.{name}: {len(rows)} entries for {positions} generated tokens"
            )
        depth = max((len(row) for row in rows if row is not None), default=0)
        # where all positions have an entry, nothing beyond it is accepted
        beyond = np.nan if None in rows else 0.0
        survivals_RD = np.full((len(rows), depth), beyond, np.float32)
        for survivals_D, row in zip(survivals_RD, rows, strict=True):
            if row is not None:
                survivals_D[: len(row)] = row
        if (np.diff(survivals_RD, axis=1) > 0).any():
            raise ValueError(f"drafters.{name}.survivals: they never rise with the depth")
        return survivals_RD


def _of_steps(name: str, steps: list[list[int]], positions: int) -> NDArray[np.float32]:
    depth = max((drafted for _, drafted, _ in steps), default=0)
    survivals_RD = np.full((positions, depth), np.nan, np.float32)
    for position, drafted, accepted in steps:
        if position >= positions or not accepted <= drafted < LARGEST:
            raise ValueError(
                f"drafters.{name}.steps: step {[position, drafted, accepted]} has a position "
                "outside of the text, or more accepted than drafted"
            )
        survivals_RD[position, :accepted] = 1
        survivals_RD[position, accepted:drafted] = 0
    for step, following in pairwise(sorted(steps)):
        if following[0] <= step[0] + step[2]:
            raise ValueError(f"drafters.{name}.steps: step {following} begins within step {step}")
    return survivals_RD


class AbortedRequest(ValueError):
    """The line of a request that was not finished."""


class LoggedRecord(Record):
    prompt_token_ids: TokenIds
    generated_token_ids: TokenIds
    drafters: dict[str, Drafted] = Field({})
    arrived: float | None = None
    temperature: float | None = None
    note: str = ""

    @field_validator("drafters")
    @classmethod
    def _named(cls, drafters: dict[str, Drafted]) -> dict[str, Drafted]:
        if NO_DRAFTER in drafters:
            raise ValueError(f"a drafter is not called {NO_DRAFTER}, which asks for lookups alone")
        return drafters


class Simulated(BaseModel):
    """The tokens that a step at each position commits, the additional one included."""

    acc_len: list[Annotated[int, Field(ge=1, strict=True)]]


class Metrics(BaseModel):
    """Of vLLM, and of SGLang, whose lengths count the root or the additional token."""

    num_spec_steps: int | None = None
    per_step_drafted: list[int] | None = None
    per_step_accepted: list[int] | None = None
    num_verified_draft_tokens: int = 0
    verify_lengths: list[Annotated[int, Field(ge=1)]] | None = None
    accept_lengths: list[Annotated[int, Field(ge=1)]] | None = None


def _at(*dotted: str) -> Any:
    """A field that stands at the first of some places, dotted, of a response that it has."""
    paths = []
    for path in dotted:
        first, *keys = path.split(".")
        paths.append(AliasPath(first, *(int(key) if key.isdigit() else key for key in keys)))
    return Field(None, validation_alias=AliasChoices(*paths))


class Response(BaseModel):
    """What an engine answered, by the places where vLLM and SGLang (`choices`), SGLang's
    `/generate` and request log (`out`), and llama.cpp (`tokens`) put it."""

    choices: list[Any] = Field([], max_length=1)  # one answer to one prompt
    prompt: list[Any] | None = _at(
        "choices.0.prompt_token_ids", "out.prompt_token_ids", "obj.input_ids", "prompt_token_ids"
    )
    generated: list[Any] | None = _at(
        "choices.0.token_ids", "out.output_ids", "output_ids", "tokens"
    )
    prompt_count: int | None = _at(
        "usage.prompt_tokens",
        "out.meta_info.prompt_tokens",
        "meta_info.prompt_tokens",
    )
    count: int | None = _at(
        "usage.completion_tokens",
        "out.meta_info.completion_tokens",
        "meta_info.completion_tokens",
        "tokens_predicted",
    )
    metrics: Metrics | None = _at(
        "metrics.speculative_decoding",
        "sglext.speculative_decoding_stats",
        "out.meta_info.speculative_decoding_stats",
        "meta_info.speculative_decoding_stats",
    )
    retractions: int | None = _at("out.meta_info.total_retractions", "meta_info.total_retractions")
    finish_reason: Any = _at(
        "choices.0.finish_reason",
        "out.meta_info.finish_reason.type",
        "meta_info.finish_reason.type",
    )
    arrived: float | None = _at("arrived", "created")
    finished: datetime | None = _at("timestamp")
    latency: float | None = _at("out.meta_info.e2e_latency")
    temperature: float | None = _at("temperature", "obj.sampling_params.temperature")
    id: Name = _at("id", "out.meta_info.id", "meta_info.id")
    source: Name = None
    kind: Name = None

    def record(self) -> dict[str, Any]:
        """The line of a log; AbortedRequest where the request was not finished, ValueError where
        token ids are missing, or numbers contradict one another."""
        if self.finish_reason == ABORTED or self.count == -1:
            raise AbortedRequest
        if self.generated is not None and (not self.generated or -1 in self.generated):
            raise AbortedRequest
        if self.prompt is None or self.generated is None:
            raise ValueError("no token ids: docs/logs.md says how to ask an engine for them")
        tokens = len(self.generated)
        if self.count is not None and self.count > tokens:
            raise ValueError(f"{tokens} token ids of an answer of {self.count} tokens")
        if self.prompt_count is not None and self.prompt_count != len(self.prompt):
            raise ValueError(
                f"{len(self.prompt)} token ids of a prompt of {self.prompt_count} tokens"
            )
        record: dict[str, Any] = {
            "prompt_token_ids": self.prompt,
            "generated_token_ids": self.generated,
            **self.model_dump(include={"id", "source", "kind", "arrived", "temperature"}),
        }
        if self.finished is not None and self.latency is not None:
            record["arrived"] = self.finished.timestamp() - self.latency
        if self.metrics is not None:
            steps_or_reason = OTHER_STEPS if self.retractions else _steps(self.metrics, tokens)
            if isinstance(steps_or_reason, str):
                record["note"] = steps_or_reason
            else:
                record["drafters"] = {DRAFTER: {"steps": steps_or_reason}}
        return record


def _steps(metrics: Metrics, tokens: int) -> list[list[int]] | str:
    """Position, drafted and accepted tokens of each step; or why they are not known. The forward
    pass over the prompt gives the first token, so steps begin at position 1. The last one may go
    beyond the text's end, where the engine cut it."""
    accepted = metrics.per_step_accepted or []
    if not accepted and metrics.accept_lengths is not None:
        accepted = [length - 1 for length in metrics.accept_lengths]
    drafted = metrics.per_step_drafted or []
    if not drafted and metrics.verify_lengths is not None:
        drafted = [length - 1 for length in metrics.verify_lengths]
    if not accepted and (metrics.num_spec_steps or metrics.num_verified_draft_tokens):
        return NO_STEPS
    if len(accepted) != len(drafted):
        raise ValueError("the steps' drafted and accepted tokens differ in length")
    if accepted and metrics.num_spec_steps not in (None, len(accepted)):
        raise ValueError(
            f"{len(accepted)} steps are listed, num_spec_steps={metrics.num_spec_steps}"
        )
    position = 1
    steps: list[list[int]] = []
    for more, kept in zip(drafted, accepted, strict=True):
        if position >= tokens:
            return OTHER_STEPS
        steps.append([position, more, kept])
        position += kept + 1
    if position < tokens:
        return LEFT_OUT
    return steps


def record_of(line: dict[str, Any]) -> dict[str, Any]:
    """The line of a log, of this format, of the simulator or of an engine; ValueError where it is
    none of them."""
    if "generated_token_ids" not in line:
        return Response.model_validate(line).record()
    if line["generated_token_ids"] == []:
        raise AbortedRequest
    drafters = {}
    for key in line:
        if key.startswith(SIMULATOR):
            name = key.removeprefix(SIMULATOR)
            if name in (line.get("drafters") or {}):
                raise ValueError(f"{name} stands in drafters.{name} and in {key}")
            counts = [count - 1 for count in Simulated.model_validate(line[key]).acc_len]
            drafters[name] = {"accepted": counts, "other_length": True}
    if drafters:
        return {**line, "drafters": {**(line.get("drafters") or {}), **drafters}}
    return line
