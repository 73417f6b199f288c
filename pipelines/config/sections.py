"""The sections of the config that say what is decoded: the pair, the prompts and the sampling settings."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from data_gen.models.sampling import Sampling
from data_gen.texts.prompt_sets import SETS
from data_gen.texts.prompts import Form


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class EmbeddedModel(Section):
    """A Llama-shaped model that the `pair` stage trains."""

    layers: int = Field(ge=1, description="transformer blocks")
    hidden: int = Field(ge=8, description="width of the residual stream")
    intermediate: int = Field(ge=8, description="width of the feed-forward layers")
    heads: int = Field(ge=1, description="attention heads")
    steps: int = Field(ge=1, description="optimiser steps")
    batch: int = Field(16, ge=1, description="sequences per step")
    learning_rate: float = Field(3e-3, gt=0, description="peak of the schedule")

    @model_validator(mode="after")
    def _heads_divide(self) -> EmbeddedModel:
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden {self.hidden} is not an even multiple of heads {self.heads}")
        return self


class EmbeddedDraft(EmbeddedModel):
    """The draft of the embedded pair, distilled from the target."""

    from_target: bool = Field(False, description="start from the target's embedding, first layers and last norm")


class Embedded(Section):
    """The embedded pair, trained on the standard library of the running Python."""

    vocabulary: int = Field(2048, ge=300, description="tokens of the byte-level BPE")
    context: int = Field(128, ge=16, description="tokens per training sequence")
    held_out: float = Field(0.12, gt=0, lt=1, description="share of the files kept for prompts")
    max_files: int | None = Field(None, ge=8, description="train on the first files only (for tests)")
    documents: int = Field(
        0, ge=0, description="task documents per workload and file, to train on and as prompts; 0: pieces of the files"
    )
    induction: bool = Field(False, description="initialise the target with an induction head, which copies")
    target: EmbeddedModel = EmbeddedModel(layers=16, hidden=128, intermediate=352, heads=4, steps=600)
    draft: EmbeddedDraft = EmbeddedDraft(layers=1, hidden=128, intermediate=352, heads=4, steps=350, learning_rate=4e-3)

    @field_validator("target", "draft", mode="before")
    @classmethod
    def _over_the_default(cls, value: Any, info: ValidationInfo) -> Any:
        """A shape may name only the keys that it changes."""
        default = cls.model_fields[str(info.field_name)].default
        return {**default.model_dump(), **value} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _shapes_fit(self) -> Embedded:
        target = self.target
        if self.induction and (target.layers < 2 or target.heads % 2 or target.hidden % (4 * target.heads)):
            raise ValueError(
                "induction takes a target of two or more layers, an even number of heads, and hidden a multiple of "
                f"4 x heads; this one has {target.layers} layers, {target.heads} heads, hidden {target.hidden}"
            )
        same = all(getattr(self.draft, key) == getattr(target, key) for key in ("hidden", "intermediate", "heads"))
        if self.draft.from_target and not (same and self.draft.layers <= target.layers):
            raise ValueError("draft.from_target: the draft needs the target's hidden, intermediate and heads")
        return self


class Pair(Section):
    """The two models. `embedded` trains a small pair; any other name is a Hugging Face directory or hub id."""

    target: str = Field("embedded", description="a directory or hub id; to measure times, a config.json is enough")
    draft: str = Field("embedded", description="a directory or hub id, with the target's vocabulary")
    device: str = Field("auto", description="cpu, cuda, cuda:1, ..; auto takes a GPU where there is one")
    device_map: str | None = Field(None, description="auto spreads a large target over all devices (accelerate)")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of weights and passes")
    threads: int | None = Field(None, ge=1, description="CPU threads for all passes; null leaves torch's choice")
    decoder: Literal["auto", "eager", "graph"] = Field(
        "auto",
        description="graph: no host synchronisation inside a step, compiled passes, where verifier and features allow "
        "it; auto: the faster one on this machine, by the latency stage",
    )
    embedded: Embedded = Embedded()

    @model_validator(mode="after")
    def _consistent(self) -> Pair:
        if self.device_map is not None and self.device != "auto":
            raise ValueError("device_map places the pair: leave device at auto")
        if (self.target == "embedded") != (self.draft == "embedded"):
            raise ValueError("target and draft are either both 'embedded' or both names of models")
        return self


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
    tokens: int = Field(48, ge=2, description="the longest prompt")
    longer: Literal["start", "end", "drop"] = Field("start", description="what is kept of a longer prompt")
    chat: bool = Field(False, description="prompts are a user's turn in the target's chat template")
    system: str | None = Field(None, description="with chat: the system turn; null: the template decides")
    per_source: int = Field(3, ge=1, description="most prompts that are taken from one file of the standard library")
    validation: float = Field(0.2, gt=0, lt=1, description="share of the sources")
    test: float = Field(0.25, gt=0, lt=1, description="share of the sources, for `evaluate`")

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
