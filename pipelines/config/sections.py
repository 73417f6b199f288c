"""The sections of the config that say what is decoded: the pair, the prompts and the sampling settings."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from data_gen.models.sampling import Sampling
from data_gen.texts.prompt_sets import SETS
from data_gen.texts.prompts import Form

SHIPPED = Path(__file__).parents[1] / "pair" / "shipped"  # the embedded pair, and a head for its target
GIVEN_TOKENS = 1024  # `prompts.tokens` of a pair that is not embedded


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Embedded(Section):
    """An embedded pair of your own: two Llamas, trained on `pair.device` on the standard library of the running Python.
    The pair stage trains one if the config has any of these keys."""

    hidden: int = Field(128, ge=16, multiple_of=16, description="width of both models")
    layers: int = Field(16, ge=2, description="layers of the target; the draft has one")
    steps: int = Field(600, ge=1, description="optimiser steps of the target's training")
    loop_steps: int = Field(
        0,
        ge=0,
        exclude_if=operator.not_,  # without any, what other stages depend on stays as it was
        description="further steps of the target's training, against the loops of its own greedy text",
    )
    draft_steps: int = Field(350, ge=1, description="optimiser steps of the draft's distillation from the target")
    context: int = Field(128, ge=16, description="tokens of a training sequence")
    documents: int = Field(
        0,
        ge=0,
        description="documents of each kind of task that are made from one file, to train on beside the files",
    )
    max_files: int | None = Field(None, ge=8, description="train on the first files only; for tests")


class Pair(Section):
    """The two models. `embedded` is the small pair that comes with Espalier; any other name is a Hugging Face directory
    or hub id."""

    target: str = Field("embedded", description="a directory or hub id; to measure times, a config.json is enough")
    draft: str = Field("embedded", description="a directory or hub id, with the target's vocabulary")
    head: str | None = Field(
        None,
        exclude_if=operator.not_,  # without one, what other stages depend on stays as it was
        description="instead of a draft: an EAGLE-3 head for the target in the format of the speculators library, a "
        "directory or hub id; `embedded` is for the embedded target, and comes with Espalier unless `pair.embedded` "
        "says how to train one; needs the extra `heads`",
    )
    device: str = Field("auto", description="cpu, cuda, cuda:1, ..; auto takes a GPU where there is one")
    device_map: str | None = Field(None, description="auto spreads a large target over all devices, with accelerate")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="number format of weights and passes")
    threads: int | None = Field(None, ge=1, description="CPU threads for all passes; null leaves torch's choice")
    decoder: Literal["auto", "eager", "graph"] = Field(
        "auto",
        description="graph: no host synchronisation inside a step, compiled passes, where verifier and features allow "
        "it; auto: the faster one on this machine, by the latency stage",
    )
    embedded: Embedded | None = Field(None, description="a pair that the run trains itself; null: the shipped one")

    @model_validator(mode="after")
    def _consistent(self) -> Pair:
        if self.device_map is not None and self.device != "auto":
            raise ValueError("device_map places the pair: leave device at auto")
        if self.head is not None:
            if self.draft != "embedded":
                raise ValueError("draft: a head takes its place: leave one of them out")
            if self.head == "embedded" and self.target != "embedded":
                raise ValueError(f"head: 'embedded' is for the embedded target: name a head for {self.target}")
            if self.embedded is not None and (given := {"hidden", "layers", "steps"} & self.embedded.model_fields_set):
                raise ValueError(f"embedded.{min(given)}: a head is trained for the target as it is: leave it out")
        elif (self.target == "embedded") != (self.draft == "embedded"):
            raise ValueError("target and draft are either both 'embedded' or both names of models")
        return self

    @property
    def trained(self) -> Embedded | None:
        """How the run trains a pair of its own, or a head for the embedded target; None where it takes what is
        there."""
        return self.embedded if self.target == "embedded" and self.head in (None, "embedded") else None

    @property
    def names(self) -> tuple[str, str]:
        """Directories or hub ids of the target and of its draft or head, unless the run trains them."""
        role = "draft" if self.head is None else "head"
        return _place("target", self.target), _place(role, self.drafting)

    @property
    def drafting(self) -> str:
        """The draft or the head."""
        return self.head or self.draft


def _place(role: str, name: str) -> str:
    return str(SHIPPED / role) if name == "embedded" else name


class SetOfPrompts(Section):
    """A data set of prompts, from the hub or from a local file of its schema."""

    name: str = Field(description=f"one of {', '.join(SETS)}")
    file: Path | None = Field(None, description="read instead of the hub: JSON lines, Parquet or plain text")
    prompts: int | None = Field(None, ge=1, description="how many are taken, its tasks in turn; null: all")

    @model_validator(mode="after")
    def _known(self) -> SetOfPrompts:
        if self.name not in SETS:
            raise ValueError(f"name: {self.name!r} is none of {', '.join(SETS)}")
        if self.file is None and not SETS[self.name].hub:
            raise ValueError(f"file: {self.name} is on no hub: name a file")
        return self


class Prompts(Section):
    """Where prompts come from, and how they are cut and split. Prompts of one source are in one split."""

    file: Path | None = Field(None, description="JSON lines with `text`, and optionally `kind` and `source`")
    sets: tuple[SetOfPrompts, ...] = Field((), description="data sets that the pair stage reads, instead of a file")
    tokens: int = Field(
        48,
        ge=2,
        description=f"tokens of the longest prompt; {GIVEN_TOKENS} unless given, where the pair is not embedded",
    )
    longer: Literal["start", "end", "drop"] = Field(
        "start", description="the part of a longer prompt that is kept; drop: the prompt is left out"
    )
    chat: bool = Field(False, description="whether prompts are a user's turn in the target's chat template")
    system: str | None = Field(None, description="with chat: the system turn; null: the template decides")
    per_source: int = Field(3, ge=1, description="most prompts that are taken from one file of the standard library")
    tasks: int = Field(
        0,
        ge=0,
        description="tasks of each kind that are made from one file of the standard library, such as renaming a "
        "variable; with them, other prompts are code and prose alone",
    )
    validation: float = Field(0.2, gt=0, lt=1, description="share of the sources that tune decisions")
    test: float = Field(0.25, gt=0, lt=1, description="share of the sources that are held out for `evaluate`")

    @model_validator(mode="after")
    def _consistent(self) -> Prompts:
        if self.file is not None and self.sets:
            raise ValueError("sets: prompts come from a file or from sets: leave one of them out")
        if self.chat and self.longer != "drop":
            raise ValueError("longer: a prompt in a chat template cannot be cut: drop")
        if self.system is not None and not self.chat:
            raise ValueError("system: without chat there is no system turn")
        return self

    @property
    def form(self) -> Form:
        return Form(self.tokens, self.longer, self.chat, self.system)


class SamplingSetting(Section):
    """One way to sample the target. A run trains one selector for all of its settings."""

    temperature: float = Field(1.0, ge=0, description="0 is greedy decoding")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus threshold; 1 keeps everything")
    top_k: int = Field(0, ge=0, description="how many most probable tokens are kept, before top_p; 0: all")
    min_p: float = Field(0.0, ge=0, le=1, description="least share of the largest probability, after top_p; 0: all")
    draft_temperature: float | None = Field(None, ge=0, description="the draft's own; null: the target's")

    def build(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.draft_temperature, self.top_k, self.min_p)
