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
    def _shapes_fit(self) -> Embedded:
        target = self.target
        if self.induction and (target.layers < 2 or target.heads % 2 or target.hidden % (4 * target.heads)):
            raise ValueError(
                "induction takes a target of two or more layers, an even number of heads, and hidden a multiple of "
                f"4 x heads; this one has {target.layers} layers, {target.heads} heads, hidden {target.hidden}"
            )
        same = all(getattr(self.draft, key) == getattr(target, key) for key in ("hidden", "intermediate", "heads"))
        if self.draft.from_target and not (same and self.draft.layers <= target.layers):
            raise ValueError(
                "draft.from_target: the draft's layers must be the target's in hidden, intermediate and heads"
            )
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
    """Where prompts come from, and how they are cut and split. Prompts of one source fall into one split."""

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
Widths = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]
Verifiers = Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(_known)]


class RayEngine(Section):
    """Workers of `data.engine=ray`: one per device."""

    address: str | None = Field(None, description="of a running cluster, or auto; null starts Ray on this machine")
    workers: int | None = Field(None, ge=1, description="null: one per GPU, or per core where there are no GPUs")
    gpus_per_worker: int = Field(1, ge=1, description="more than 1 for a target spread by pair.device_map")
    retries: int = Field(3, ge=0, description="how often a shard may lose its worker")


class Data(Section):
    """Texts and the labels along them."""

    texts: int = Field(480, ge=8, description="texts for each sampling setting, over all splits")
    tokens: int = Field(128, ge=4, description="labelled tokens per text; the text itself is longer by a look-ahead")
    stride: int = Field(2, ge=1, description="every stride-th position of a training text is learned from")
    decoded: float = Field(
        0.1, ge=0, le=1, description="share of training texts from speculative decoding, to compare with the labels"
    )
    log: Path | None = Field(None, description="an engine's texts instead: JSON lines with `prompt` and `completion`")
    siblings: int = Field(2, ge=1, description="labels average over this many draws of the siblings of a text's tokens")
    features: Literal["light", "full"] = Field("light", description="full: hidden states, too")
    texts_per_shard: int = Field(16, ge=1, description="also how many texts the target writes at once")
    engine: Literal["local", "ray"] = Field("local", description="ray: many workers, on one machine or many")
    ray: RayEngine = RayEngine()


class Train(Section):
    """The selector's training."""

    verifier: str = Field("lifted_uniform", description="the one whose labels are learned; one of `verifiers`")
    objectives: tuple[Literal["policy", "regressor"], ...] = Field(
        ("regressor", "policy"),
        min_length=1,
        description="regressor: predicts block efficiencies, and works with any latency profile; policy: the paper's, "
        "learns the choice itself. The best one by replay is kept",
    )
    width: int = Field(32, ge=4, description="each hidden state is projected to this width")
    hidden: Widths = Field((64, 32), description="widths of the hidden layers")
    learning_rate: float = Field(3e-3, gt=0, description="peak of the schedule")
    batch: int = Field(256, ge=2, description="roots")
    epochs: int = Field(12, ge=1, description="all of them are run; the best one by replay is kept")

    @property
    def network(self) -> dict[str, Any]:
        """Keyword arguments of `RootNetwork`."""
        return {"width": self.width, "hidden": list(self.hidden)}


class Latency(Section):
    """What is timed, and how often."""

    lengths: Ascending = Field((32, 96, 160), description="context lengths, in tokens; linear between them")
    widths: Ascending = Field((1, 2, 4), description="branches of a draft pass")
    nodes: Ascending = Field((1, 2, 5, 9, 17, 25, 41), description="nodes of a target pass, the root included")
    repeats: int = Field(40, ge=3, description="of every pass; the mean without the slowest tenth counts")
    prompts: int = Field(8, ge=1, description="training prompts on which real decoding steps are timed")
    timings: Path | None = Field(None, description="an engine's own step times (CSV); --from FILE sets it")
    stepped: bool = Field(
        True, description="of `timings`: sizes in between cost as much as the next larger one; false: linear"
    )

    @model_validator(mode="after")
    def _contexts(self) -> Latency:
        if self.lengths[0] < 2:
            raise ValueError("lengths: a context holds at least 2 tokens")
        return self


class Evaluate(Section):
    """Decoding of held-out prompts with every method, interleaved prompt by prompt."""

    prompts: int = Field(30, ge=2, description="held-out prompts, for every sampling setting")
    tokens: int = Field(
        128, ge=4, description="of each; as in data.tokens, and 18 at least, to be compared with replay"
    )
    assisted: bool = Field(True, description="include transformers' assisted generation")
    gpu_like: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field(
        (), description="synthetic profiles: a draft pass as a share of a target pass; 32 tokens cost as much as one"
    )


class Logs(Section):
    """An engine's logs, from which a selector is trained without any model."""

    files: tuple[Path, ...] = Field((), description="JSON lines with token ids and the lengths that were accepted")
    test: tuple[Path, ...] = Field((), description="held-out logs; empty: prompts.test of the sources are held out")
    timings: Path | None = Field(
        None, description="the engine's step times (CSV); null: only accepted lengths are told"
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
    """What is written for engines."""

    engine: Literal["vllm", "sglang", "tensorrt-llm"] | None = Field(
        None, description="also write this engine's table of chain lengths; --engine NAME sets it"
    )
    compiled: bool = Field(False, description="also compile the selector for C++ (`selector.pt2`), with g++")
    push: str | None = Field(
        None, pattern=r"^[\w.-]+/[\w.-]+$", description="a repository on the hub that gets a copy; needs a token"
    )
    tiers: int | None = Field(None, ge=1, description="most shapes of trees of the exported selector; null: as trained")
