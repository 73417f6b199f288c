"""Sections of the config that the stages read. The description of each key is what `--help` and the docs print."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from data_gen.models.sampling import Sampling
from data_gen.text_labels.labels import labelled_verifier
from data_gen.texts.prompt_sets import SETS
from data_gen.texts.prompts import Form
from data_gen.verification import VERIFIERS
from selector.actions import Action, ActionSpace


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
    """The draft of the embedded pair."""

    from_target: bool = Field(
        False, description="begin with the target's embedding, first layers and last norm, not with random weights"
    )


class Embedded(Section):
    """The embedded pair, trained on the standard library of the running Python."""

    vocabulary: int = Field(2048, ge=300, description="tokens of the byte-level BPE")
    context: int = Field(128, ge=16, description="tokens per training sequence")
    held_out: float = Field(0.12, gt=0, lt=1, description="share of the files kept for prompts")
    max_files: int | None = Field(None, ge=8, description="train on the first files only (for tests)")
    documents: int = Field(
        0,
        ge=0,
        description="task documents of each workload that are made from every file, for training and as prompts; "
        "0: prompts are pieces of the files",
    )
    induction: bool = Field(
        False, description="the target begins with an induction head, which copies, instead of random weights alone"
    )
    target: EmbeddedModel = Field(
        EmbeddedModel(layers=16, hidden=128, intermediate=352, heads=4, steps=600), description="trained on the text"
    )
    draft: EmbeddedDraft = Field(
        EmbeddedDraft(layers=1, hidden=128, intermediate=352, heads=4, steps=350, learning_rate=4e-3),
        description="distilled from the target",
    )

    @field_validator("target", "draft", mode="before")
    @classmethod
    def _over_the_default(cls, value: Any, info: ValidationInfo) -> Any:
        """A shape may name only the keys that it changes."""
        default = cls.model_fields[str(info.field_name)].default
        return {**default.model_dump(), **value} if isinstance(value, dict) else value

    @model_validator(mode="after")
    def _room_for_an_induction_head(self) -> Embedded:
        target = self.target
        if self.induction and (target.layers < 2 or target.heads % 2 or target.hidden % (4 * target.heads)):
            raise ValueError(
                "induction takes a target of two or more layers, an even number of heads, and hidden a multiple of "
                f"4 x heads; this one has {target.layers} layers, {target.heads} heads, hidden {target.hidden}"
            )
        return self

    @model_validator(mode="after")
    def _draft_from_target(self) -> Embedded:
        same = all(getattr(self.draft, key) == getattr(self.target, key) for key in ("hidden", "intermediate", "heads"))
        if self.draft.from_target and not (same and self.draft.layers <= self.target.layers):
            raise ValueError(
                "draft.from_target: the draft's layers must be the target's in hidden, intermediate and heads"
            )
        return self


class Pair(Section):
    """The two models. `embedded` trains a small pair; anything else is a Hugging Face directory or hub id."""

    target: str = Field("embedded", description="a directory or hub id; for times a config without weights will do")
    draft: str = Field("embedded", description="a directory or hub id, with the target's vocabulary")
    device: str = Field("auto", description="cpu, cuda, cuda:1, ..; auto takes a GPU where there is one")
    device_map: str | None = Field(None, description="auto spreads a large target over all devices (accelerate)")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="of weights and passes")
    threads: int | None = Field(None, ge=1, description="CPU threads for all passes; null leaves torch's choice")
    embedded: Embedded = Embedded()

    @model_validator(mode="after")
    def _spread_over_gpus(self) -> Pair:
        if self.device_map is not None and self.device != "auto":
            raise ValueError("device_map places the pair: leave device at auto")
        return self

    @model_validator(mode="after")
    def _both_or_none(self) -> Pair:
        if (self.target == "embedded") != (self.draft == "embedded"):
            raise ValueError("target and draft are either both 'embedded' or both names of models")
        return self


class SetOfPrompts(Section):
    """A data set of prompts, from the hub or from a local file of its schema."""

    name: str = Field(description=f"one of {', '.join(SETS)}")
    file: Path | None = Field(None, description="read instead of the hub: JSON lines, Parquet or plain text")
    prompts: int | None = Field(None, ge=1, description="so many are taken, its tasks in turn; null: all")

    @model_validator(mode="after")
    def _known(self) -> SetOfPrompts:
        if self.name not in SETS:
            raise ValueError(f"name: {self.name!r} is none of {', '.join(SETS)}")
        if self.file is None and not SETS[self.name].hub:
            raise ValueError(f"file: {self.name} is on no hub: name a file")
        return self


class Prompts(Section):
    """Where prompts come from, what tokens they are, how they are split. Prompts of one source fall into one split."""

    file: Path | None = Field(None, description="JSON lines with `text`, and optionally `kind` and `source`")
    sets: tuple[SetOfPrompts, ...] = Field((), description="data sets that the pair stage reads, instead of a file")
    tokens: int = Field(48, ge=2, description="the longest prompt")
    longer: Literal["start", "end", "drop"] = Field(
        "start", description="of a longer prompt the first or the last tokens are kept, or it is left out"
    )
    chat: bool = Field(
        False, description="prompts are a user's turn in the target's chat template, the model's is next"
    )
    system: str | None = Field(None, description="with chat: what the system turn says; null: the template decides")
    per_source: int = Field(3, ge=1, description="prompts taken from one file of the standard library at most")
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
    """One way to sample the target. A run has one selector for all of its settings, which decides in each by itself."""

    temperature: float = Field(1.0, ge=0, description="0 is greedy decoding")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus threshold; 1 keeps everything")
    top_k: int = Field(0, ge=0, description="so many most probable tokens are kept, before the nucleus; 0: all")
    min_p: float = Field(
        0.0, ge=0, le=1, description="least share of the most probable token's probability, after the nucleus; 0: all"
    )
    draft_temperature: float | None = Field(None, ge=0, description="the draft's own; null: the target's")

    def build(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.draft_temperature, self.top_k, self.min_p)


def _distinct(settings: tuple[SamplingSetting, ...]) -> tuple[SamplingSetting, ...]:
    if len({setting.build().law for setting in settings}) < len(settings):
        raise ValueError("a setting is listed twice")
    if len({(setting.temperature, setting.top_p) for setting in settings}) < len(settings):
        raise ValueError("settings that differ in top_k or min_p alone need runs of their own: no selector sees these")
    return settings


def in_space(value: tuple[int, int, int]) -> Action:
    """The canonical action of (K, L1, L2); ValueError where it is outside the default action space."""
    return ActionSpace.default().canonical(Action(*value))


def _ascending(values: tuple[int, ...]) -> tuple[int, ...]:
    if not values or values[0] < 1 or list(values) != sorted(set(values)):
        raise ValueError("must be ascending numbers from 1 on")
    return values


def _known(verifiers: tuple[str, ...]) -> tuple[str, ...]:
    for name in verifiers:
        if name not in VERIFIERS:
            raise ValueError(f"unknown verifier {name!r}; known are {', '.join(VERIFIERS)}")
        labelled_verifier(name)  # its ValueError says why a verifier has no labels
    return verifiers


Settings = Annotated[tuple[SamplingSetting, ...], Field(min_length=1), AfterValidator(_distinct)]
ActionField = Annotated[tuple[int, int, int], AfterValidator(in_space)]
Ascending = Annotated[tuple[int, ...], AfterValidator(_ascending)]
Verifiers = Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(_known)]


class RayEngine(Section):
    """Workers of `data.engine=ray`: one per device."""

    address: str | None = Field(None, description="of a running cluster, or auto; null starts Ray on this machine")
    workers: int | None = Field(None, ge=1, description="null: as many as the GPUs, or else the cores, allow")
    gpus_per_worker: int = Field(1, ge=1, description="more than 1 for a target spread by pair.device_map")
    retries: int = Field(3, ge=0, description="how often a shard may lose its worker")


class Data(Section):
    """Texts and the labels along them."""

    texts: int = Field(480, ge=8, description="texts for each sampling setting, over all splits")
    tokens: int = Field(
        128, ge=4, description="labelled tokens per text; it is written longer, so that the last one has its look-ahead"
    )
    stride: int = Field(2, ge=1, description="every so many-th position of a training text is learned from")
    decoded: float = Field(
        0.1,
        ge=0,
        le=1,
        description="share of the training texts that speculative decoding writes; the target alone "
        "writes the others, many at a time. What was accepted is compared with the labels",
    )
    log: Path | None = Field(None, description="an engine's texts instead: JSON lines with `prompt` and `completion`")
    siblings: int = Field(2, ge=1, description="draws of the siblings of the text's tokens that labels average")
    features: Literal["light", "full"] = Field(
        "light", description="full: hidden states, too, for selectors of both kinds"
    )
    texts_per_shard: int = Field(16, ge=1, description="also how many texts the target writes at once")
    engine: Literal["local", "ray"] = Field("local", description="ray: many workers, on one machine or many")
    ray: RayEngine = RayEngine()


class Train(Section):
    """The selector's training."""

    verifier: str = Field("lifted_uniform", description="the one whose labels are learned; one of `verifiers`")
    objectives: tuple[Literal["policy", "regressor"], ...] = Field(
        ("regressor", "policy"),
        min_length=1,
        description="regressor: predicts block efficiencies, and can be moved to another machine; policy: the paper's, "
        "learns the choice itself. All are trained, and the best by replay is kept",
    )
    width: int = Field(32, ge=4, description="each hidden state is projected to this width")
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field(
        (64, 32), min_length=1, description="widths of the hidden layers"
    )
    dropout: float = Field(0.0, ge=0, lt=1, description="while training")
    learning_rate: float = Field(3e-3, gt=0, description="peak of the schedule")
    weight_decay: float = Field(0.02, ge=0, description="of AdamW")
    batch: int = Field(256, ge=2, description="roots")
    epochs: int = Field(12, ge=1, description="all of them are run; the best one by replay is kept")
    worst_weight: float = Field(1.0, ge=0, description="lambda of DDTE eq. 12")
    worst_share: float = Field(0.05, gt=0, le=1, description="alpha of DDTE eq. 12")

    @property
    def network(self) -> dict[str, Any]:
        """Keyword arguments of `RootNetwork`."""
        return {"width": self.width, "hidden": list(self.hidden), "dropout": self.dropout}


class Latency(Section):
    """What is timed, and how often."""

    lengths: Ascending = Field((32, 96, 160), description="context lengths, in tokens; linear between them")
    widths: Ascending = Field((1, 2, 4), description="branches of a draft pass")
    nodes: Ascending = Field((1, 2, 5, 9, 17, 25, 41), description="nodes of a target pass, the root included")
    repeats: int = Field(40, ge=3, description="of every pass; the mean without the slowest tenth counts")
    prompts: int = Field(8, ge=1, description="training prompts on which real decoding steps are timed")
    timings: Path | None = Field(
        None, description="an engine's own step times (CSV), read beside this machine's; --from FILE says the same"
    )
    stepped: bool = Field(
        True,
        description="of `timings`: a size between two timed ones costs what the larger one does, as with captured "
        "graphs; false: linear in between",
    )

    @model_validator(mode="after")
    def _contexts(self) -> Latency:
        if self.lengths[0] < 2:
            raise ValueError("lengths: a context holds at least 2 tokens")
        return self


class Evaluate(Section):
    """Decoding of held-out prompts, methods interleaved prompt by prompt."""

    prompts: int = Field(30, ge=2, description="held-out prompts, for every sampling setting")
    tokens: int = Field(
        128, ge=4, description="of each; to be compared with replay as many as data.tokens, and 18 at least"
    )
    assisted: bool = Field(True, description="transformers' assisted generation among the methods")
    gpu_like: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field(
        (), description="synthetic profiles: a draft pass as a share of a target pass, 32 tokens at the price of one"
    )
    bootstrap: int = Field(2000, ge=100, description="resamples of the sources")


class Logs(Section):
    """An engine's logs, from which a selector is trained without any model."""

    files: tuple[Path, ...] = Field((), description="JSON lines with token ids and the lengths that were accepted")
    test: tuple[Path, ...] = Field(
        (), description="held-out logs; empty: a share of the sources (prompts.test) is held out"
    )
    timings: Path | None = Field(
        None, description="the engine's step times by batch size (CSV); null: only accepted lengths are reported"
    )
    drafter: str | None = Field(
        None, description="whose chains are candidates; null: the only drafter that is not a lookup; none: lookups only"
    )
    longest_lookup: int = Field(20, ge=1, le=64, description="lookups of 1 to this many tokens are candidates")

    @model_validator(mode="after")
    def _apart(self) -> Logs:
        both = sorted({path.resolve() for path in self.files} & {path.resolve() for path in self.test})
        if both:
            raise ValueError(f"test: {both[0]} is among files, too")
        return self


class Export(Section):
    """What is made of the selector and the labels for engines."""

    engine: Literal["vllm", "sglang", "tensorrt-llm"] | None = Field(
        None, description="also write this engine's table of chain lengths; --engine NAME says the same"
    )
    compiled: bool = Field(
        False, description="also compile the selector for C++ (`selector.pt2`); needs g++ and half a minute"
    )
    push: str | None = Field(
        None, pattern=r"^[\w.-]+/[\w.-]+$", description="a repository on the hub that gets a copy; needs a token"
    )
    tiers: int | None = Field(
        None, ge=1, description="shapes of trees that the exported selector may take; null: those that training kept"
    )
