"""The config of a run: strict, complete, and resolved before any work.

Every key has one meaning and is documented here; an unknown key is an error that names it and the nearest known one.
"""

from __future__ import annotations

import difflib
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, ValidationInfo, field_validator, model_validator

from data_gen.sampling import Sampling
from data_gen.text_labels import labelled_verifier
from data_gen.verification import STYLES, VERIFIERS, get_verifier
from pipelines.sections import Bench, Evaluate, Latency, RayEngine, Section
from selector.actions import Action, ActionSpace
from selector.schema import InputError


class EmbeddedModel(Section):
    """A Llama-shaped model that the `pair` stage trains."""

    layers: int = Field(ge=1)
    hidden: int = Field(ge=8)
    intermediate: int = Field(ge=8)
    heads: int = Field(ge=1)
    steps: int = Field(ge=1, description="optimiser steps")
    batch: int = Field(16, ge=1, description="sequences per step")
    learning_rate: float = Field(3e-3, gt=0)

    @model_validator(mode="after")
    def _heads_divide(self) -> EmbeddedModel:
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden {self.hidden} is not an even multiple of heads {self.heads}")
        return self


class Embedded(Section):
    """The embedded pair, trained on the standard library of the running Python."""

    vocabulary: int = Field(2048, ge=300, description="tokens of the byte-level BPE")
    context: int = Field(128, ge=16, description="tokens per training sequence")
    held_out: float = Field(0.12, gt=0, lt=1, description="share of the files kept for prompts")
    max_files: int | None = Field(None, ge=8, description="train on the first files only (for tests)")
    target: EmbeddedModel = EmbeddedModel(layers=16, hidden=128, intermediate=352, heads=4, steps=600)
    draft: EmbeddedModel = EmbeddedModel(layers=1, hidden=128, intermediate=352, heads=4, steps=350, learning_rate=4e-3)

    @field_validator("target", "draft", mode="before")
    @classmethod
    def _over_the_default(cls, value: Any, info: ValidationInfo) -> Any:
        """A shape may name only the keys that it changes."""
        default = cls.model_fields[str(info.field_name)].default
        return {**default.model_dump(), **value} if isinstance(value, dict) else value


class Pair(Section):
    """The two models. `embedded` trains a small pair; anything else is a Hugging Face directory or hub id."""

    target: str = "embedded"
    draft: str = "embedded"
    device: str = "auto"
    device_map: str | None = Field(None, description="auto spreads a large target over all devices (accelerate)")
    dtype: Literal["float32", "bfloat16"] = "float32"
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


class Prompts(Section):
    """Where prompts come from and how they are split. A file's prompts all fall into one split."""

    file: Path | None = Field(None, description="JSON lines with `text`, and optionally `kind` and `source`")
    tokens: int = Field(48, ge=2, description="length of a prompt")
    per_source: int = Field(3, ge=1, description="prompts taken from one file at most")
    validation: float = Field(0.2, gt=0, lt=1, description="share of the sources")
    test: float = Field(0.25, gt=0, lt=1, description="share of the sources, for `evaluate`")


class SamplingSetting(Section):
    temperature: float = Field(1.0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    draft_temperature: float | None = Field(None, ge=0, description="the draft's own; null: the target's")

    def build(self) -> Sampling:
        return Sampling(self.temperature, self.top_p, self.draft_temperature)


def distinct(settings: tuple[SamplingSetting, ...]) -> tuple[SamplingSetting, ...]:
    """The settings; ValueError where two of them sample the target alike."""
    if len({(setting.temperature, setting.top_p) for setting in settings}) < len(settings):
        raise ValueError("a setting is listed twice")
    return settings


def _action(value: Any) -> Action:
    return ActionSpace.default().canonical(Action(*value))


ActionField = Annotated[tuple[int, int, int], Field(description="(K, L1, L2)")]


class Data(Section):
    """Texts and the labels along them."""

    texts: int = Field(480, ge=8, description="texts for each sampling setting, over all splits")
    tokens: int = Field(128, ge=4, description="labelled tokens per text; it is written 16 tokens longer")
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
    threads: int | None = Field(None, ge=1, description="CPU threads of labelling; null: as pair.threads")
    texts_per_shard: int = Field(16, ge=1, description="also how many texts the target writes at once")
    engine: Literal["local", "ray"] = "local"
    ray: RayEngine = RayEngine()
    behaviour: tuple[ActionField, ...] = Field(
        ((1, 4, 0), (1, 8, 0), (1, 12, 0), (2, 2, 4), (2, 4, 6), (3, 1, 5), (4, 0, 4), (4, 4, 4)),
        min_length=1,
        description="actions of the texts that are decoded, one drawn at every step",
    )

    @field_validator("behaviour")
    @classmethod
    def _in_space(cls, value: tuple[tuple[int, int, int], ...]) -> tuple[tuple[int, int, int], ...]:
        for action in value:
            _action(action)
        return value

    @property
    def behaviour_actions(self) -> list[Action]:
        return [_action(value) for value in self.behaviour]


class Train(Section):
    """The selector's training."""

    verifier: str = "lifted_uniform"
    objectives: tuple[Literal["policy", "regressor"], ...] = Field(("regressor", "policy"), min_length=1)
    width: int = Field(32, ge=4, description="each hidden state is projected to this width")
    hidden: tuple[Annotated[int, Field(ge=1)], ...] = Field((64, 32), min_length=1)
    dropout: float = Field(0.0, ge=0, lt=1)
    learning_rate: float = Field(3e-3, gt=0)
    weight_decay: float = Field(0.02, ge=0)
    batch: int = Field(256, ge=2)
    epochs: int = Field(12, ge=1)
    worst_weight: float = Field(1.0, ge=0, description="lambda of DDTE eq. 12")
    worst_share: float = Field(0.05, gt=0, le=1, description="alpha of DDTE eq. 12")


EIGHT_SETTINGS = (
    *(SamplingSetting(temperature=t) for t in (0.2, 0.4, 0.6, 0.8, 1.0, 1.2)),
    *(SamplingSetting(top_p=p) for p in (0.9, 0.99)),
)


MIN_ROOTS = 8
LABELLED = tuple(name for name in VERIFIERS if name not in ("khisti", "greedy_block"))  # those whose labels are cheap


def check_labelled(verifiers: tuple[str, ...]) -> None:
    """ValueError unless all of these verifiers exist and have labels along a text."""
    for name in verifiers:
        if name not in VERIFIERS:
            raise ValueError(f"verifiers: unknown verifier {name!r}; known are {', '.join(VERIFIERS)}")
        try:
            labelled_verifier(name)
        except ValueError as error:
            raise ValueError(f"verifiers: {error}") from error


class Audit(Section):
    """The comparison of verifiers, without any training."""

    sampling: tuple[SamplingSetting, ...] = Field(EIGHT_SETTINGS, min_length=1)
    roots: int = Field(1200, ge=8, description="over all sampling settings")
    verifiers: tuple[str, ...] = Field(LABELLED, min_length=1)
    styled: tuple[str, ...] = Field(
        (
            "khisti:iid",
            "greedy_block:iid",
            "specinfer:without_replacement",
            "traversal:without_replacement",
            "greedy:greedy",
        ),
        description="verifier:style, on further trees whose branches are drawn so",
    )
    draft_temperatures: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (0.7, 1.4), description="of the draft, as multiples of the target's"
    )
    topologies: tuple[Path, ...] = Field((), description="JSON files of child-rank paths, as sparse trees are written")
    acceptance_roots: int = Field(160, ge=0, description="roots at which the acceptance of every rule is computed")
    tree: ActionField = Field((4, 0, 8), description="the tree on which verifiers, styles and temperatures compare")
    quick_texts: int = Field(24, ge=4, description="texts of `--quick`, of the first of the run's sampling settings")
    bootstrap: int = Field(2000, ge=100)

    @field_validator("sampling")
    @classmethod
    def _distinct(cls, value: tuple[SamplingSetting, ...]) -> tuple[SamplingSetting, ...]:
        return distinct(value)

    @field_validator("tree")
    @classmethod
    def _tree_in_space(cls, value: tuple[int, int, int]) -> tuple[int, int, int]:
        K, L1, L2 = _action(value)
        return K, L1, L2

    @model_validator(mode="after")
    def _verifiers_exist(self) -> Audit:
        check_labelled(self.verifiers)
        for name in self.styled:
            verifier, separator, style = name.partition(":")
            if not separator or style not in STYLES:
                raise ValueError(f"styled: {name!r} is not verifier:style; styles are {', '.join(STYLES)}")
            get_verifier(verifier, style)  # its ValueError says what is wrong
            if verifier == "spechub" and self.tree[0] > 2:
                raise ValueError(f"styled: spechub verifies pairs; tree has K = {self.tree[0]}")
        if self.roots < MIN_ROOTS * len(self.sampling):
            raise ValueError(f"roots: fewer than {MIN_ROOTS} for each of {len(self.sampling)} sampling settings")
        if "traversal" not in self.verifiers:
            raise ValueError("verifiers: traversal, which the others are compared with, is not among them")
        return self


class Config(Section):
    """One run. Outputs go under `runs/<name>/`."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
    seed: int = Field(1, ge=0)
    mlflow_model: str = Field(
        "espalier-selector", pattern=r"^[^/:]+$", description="registered MLflow model that `export` adds a version to"
    )
    pair: Pair = Pair()
    prompts: Prompts = Prompts()
    sampling: tuple[SamplingSetting, ...] = Field((SamplingSetting(),), min_length=1)
    verifiers: tuple[str, ...] = Field(("naive_tree", "specinfer", "traversal", "lifted_uniform"), min_length=1)
    data: Data = Data()
    latency: Latency = Latency()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()
    audit: Audit = Audit()
    bench: Bench = Bench()

    @field_validator("sampling")
    @classmethod
    def _distinct(cls, value: tuple[SamplingSetting, ...]) -> tuple[SamplingSetting, ...]:
        return distinct(value)

    @model_validator(mode="after")
    def _verifiers_exist(self) -> Config:
        check_labelled(self.verifiers)
        if self.train.verifier not in self.verifiers:
            raise ValueError(f"train.verifier: {self.train.verifier!r} is not among verifiers {list(self.verifiers)}")
        return self

    @property
    def folder(self) -> Path:
        return Path("runs") / self.name


def load_config(file: Path, overrides: list[str]) -> Config:
    """The resolved config of a YAML file and `section.key=value` overrides.

    Raises:
        InputError: the file is missing or no YAML mapping, a key is unknown, or a value does not fit; one line.
    """
    try:
        values = yaml.safe_load(file.read_text())
    except OSError as error:
        raise InputError(f"{file}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{file}: not UTF-8 text") from error
    except yaml.YAMLError as error:
        raise InputError(f"{file}: not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise InputError(f"{file}: expected a mapping of keys")
    for override in overrides:
        _apply(values, override)
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise InputError(f"{file}: {_one_line(error)}") from error


def _apply(values: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise InputError(f"{override!r}: an override reads section.key=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError(f"{override!r}: the value is not YAML") from error
    *sections, last = key.split(".")
    node = values
    for section in sections:
        inner = node.setdefault(section, {})
        if not isinstance(inner, dict):
            raise InputError(f"{override!r}: {section} is not a section")
        node = inner
    node[last] = value


def _one_line(error: ValidationError) -> str:
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        plain = ".".join(str(part) for part in first["loc"] if isinstance(part, str))
        close = difflib.get_close_matches(plain, list(known_keys()), n=1, cutoff=0.6)
        hint = f"; did you mean {close[0]}?" if close else ""
        return f"unknown key {key}{hint}{more}"
    message = first["msg"].removeprefix("Value error, ")
    return f"{key}: {message}{more}" if key else f"{message}{more}"


def known_keys(model: type[BaseModel] = Config, prefix: str = "") -> dict[str, type[BaseModel]]:
    """Every dotted key of the schema, sections included."""
    keys: dict[str, type[BaseModel]] = {}
    for name, field in model.model_fields.items():
        keys[f"{prefix}{name}"] = model
        annotation: Any = field.annotation
        if typing.get_origin(annotation) is tuple:  # a list of sections
            annotation = typing.get_args(annotation)[0]
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            keys |= known_keys(annotation, f"{prefix}{name}.")
    return keys
