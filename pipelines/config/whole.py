"""The whole config of a run, and the sections of its stages; `--help` and the docs print each key's description."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from data_gen.text_labels.labels import labelled_verifier
from data_gen.verification import VERIFIERS
from pipelines.config.sections import Distil, Pair, Prompts, SamplingSetting, Section


def _distinct(settings: tuple[SamplingSetting, ...]) -> tuple[SamplingSetting, ...]:
    if len({setting.build().law for setting in settings}) < len(settings):
        raise ValueError("a setting is listed twice")
    if len({(setting.temperature, setting.top_p) for setting in settings}) < len(settings):
        raise ValueError("settings that differ in top_k or min_p alone need runs of their own: a selector sees neither")
    return settings


def _known(verifiers: tuple[str, ...]) -> tuple[str, ...]:
    for name in verifiers:
        if name not in VERIFIERS:
            raise ValueError(f"unknown verifier {name!r}; known are {', '.join(VERIFIERS)}")
        labelled_verifier(name)  # its ValueError says why a verifier has no labels
    return verifiers


Settings = Annotated[tuple[SamplingSetting, ...], Field(min_length=1), AfterValidator(_distinct)]
Widths = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1)]
Verifiers = Annotated[tuple[str, ...], Field(min_length=1), AfterValidator(_known)]


class Data(Section):
    """Texts and the labels along them."""

    texts: int = Field(480, ge=8, le=10**7, description="texts for each sampling setting, over all splits")
    tokens: int = Field(128, ge=4, description="labelled tokens per text; the text itself is longer by a look-ahead")
    stride: int = Field(1, ge=1, description="of a training text every stride-th position is learned from")
    log: Path | None = Field(None, description="an engine's texts instead: JSON lines with `prompt` and `completion`")
    siblings: int = Field(2, ge=1, description="labels average over this many draws of the siblings of a text's tokens")
    features: Literal["light", "full"] = Field(
        "light", description="full: hidden states are recorded, too, which takes disk"
    )
    texts_per_shard: int = Field(32, ge=1, description="texts that the target writes at once, and that one file holds")
    ray: str | None = Field(
        None, description="local: Ray's workers on this machine; auto or an address: on a cluster; null: no Ray"
    )
    workers: int | None = Field(
        None,
        ge=1,
        description="processes that make shards; null: one, or with Ray one per GPU or as many as the cores allow. "
        "Without Ray, a GPU always has one",
    )
    gpus_per_worker: int = Field(
        1, ge=1, description="GPUs of one worker; more than 1 for a target that pair.device_map spreads"
    )


class Train(Section):
    """The selector's training."""

    verifier: str = Field("lifted_uniform", description="the one of `verifiers` that the selector is trained for")
    objectives: tuple[Literal["policy", "regressor"], ...] = Field(
        ("regressor", "policy"),
        min_length=1,
        description="regressor: predicts block efficiencies, and works with any latency profile; policy: DDTE's, "
        "learns the choice itself for this machine. The best one by replay is kept",
    )
    hidden: Widths = Field((64, 32), description="widths of the network's hidden layers")
    batch: int = Field(256, ge=2, description="roots of one optimiser step")
    epochs: int = Field(
        12, ge=1, description="passes over the training roots; all are run, and the best one by replay is kept"
    )

    lightning: tuple[str, ...] = Field(
        (),
        exclude_if=operator.not_,  # without any, what the stage depends on stays as it was
        description="Lightning callbacks and loggers of your own: import paths of classes or functions that need no "
        "arguments, such as `mine.Watch`, seen from the current folder",
    )

    @property
    def network(self) -> dict[str, Any]:
        """Keyword arguments of `RootNetwork`."""
        return {"hidden": list(self.hidden)}


class Latency(Section):
    """The machine whose times count."""

    repeats: int = Field(
        40,
        ge=3,
        description="times that a pass is measured; decoding steps are timed on a fifth as many prompts",
    )
    timings: Path | None = Field(
        None, description="an engine's own step times (CSV); latency --from FILE or logs --timings FILE sets it"
    )
    stepped: bool = Field(
        True,
        description="whether sizes between those in `timings` cost what the next larger one does; false: "
        "linear in between",
    )


class Evaluate(Section):
    """Decoding of held-out prompts with every method, interleaved prompt by prompt."""

    prompts: int = Field(30, ge=2, description="held-out prompts for each sampling setting, of data.tokens tokens each")
    rounds: int = Field(1, ge=1, description="times that greedy text is decoded with every method, in rotating order")
    assisted: bool = Field(
        True, description="whether transformers' assisted generation and prompt lookup are compared, too"
    )
    gpu_like: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field(
        (),
        description="synthetic clocks for replay: a draft pass as a share of a target pass, where 32 tokens "
        "cost as much as one",
    )


class Logs(Section):
    """An engine's logs, from which a selector is trained without any model."""

    files: tuple[Path, ...] = Field((), description="JSON lines with token ids and the lengths that were accepted")
    test: tuple[Path, ...] = Field((), description="held-out logs; empty: prompts.test of the sources are held out")
    drafter: str | None = Field(
        None, description="whose chains are candidates; null: the only drafter that is not a lookup; none: lookups only"
    )

    @model_validator(mode="after")
    def _apart(self) -> Logs:
        both = sorted(set(map(Path.resolve, self.files)) & set(map(Path.resolve, self.test)))
        if both:
            raise ValueError(f"test: {both[0]} is among files, too")
        return self


class Export(Section):
    """What is written for engines."""

    engine: Literal["vllm", "sglang", "tensorrt-llm", "llama-server", "transformers"] | None = Field(
        None, description="the engine whose chain lengths or rule are written, too; --engine NAME sets it"
    )


class Quick(Section):
    """A check in minutes: whether speculation pays here, with which verifier and tree, and whether a selector does."""

    minutes: float = Field(
        2.0, gt=0, description="how long it may take; with less time it labels fewer texts and leaves settings out"
    )
    texts: int = Field(48, ge=4, description="most texts under each sampling setting")


class Config(Section):
    """One run. Outputs go under `runs/<name>/`."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$",
        max_length=100,
        description="name of the run's folder and of its MLflow experiment",
    )
    seed: int = Field(1, ge=0, lt=2**32, description="seed of everything random")
    pair: Pair = Pair()
    prompts: Prompts = Prompts()
    distil: Distil = Distil()
    sampling: Settings = Field((SamplingSetting(),), description="a list of settings, each with its own texts")
    verifiers: Verifiers = Field(
        ("naive_tree", "specinfer", "traversal", "lifted_uniform"),
        description="the verifiers whose labels are recorded and whose static trees are compared",
    )
    data: Data = Data()
    latency: Latency = Latency()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()
    export: Export = Export()
    logs: Logs = Logs()
    quick: Quick = Quick()

    @model_validator(mode="after")
    def _labelled(self) -> Config:
        if self.train.verifier not in self.verifiers:
            raise ValueError(f"train.verifier: {self.train.verifier!r} is not among verifiers {list(self.verifiers)}")
        return self

    @property
    def folder(self) -> Path:
        return Path("runs") / self.name
