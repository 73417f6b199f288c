"""The whole config of a run, with the sections of `quick`, `audit` and `bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from data_gen.verification import VERIFIERS
from pipelines.config.sections import (
    Data,
    Evaluate,
    Export,
    Latency,
    Logs,
    Pair,
    Prompts,
    SamplingSetting,
    Section,
    Settings,
    Train,
    Verifiers,
)

CHEAP = tuple(name for name in VERIFIERS if name not in ("khisti", "greedy_block"))  # verifiers whose labels are cheap


class Quick(Section):
    """The two-minute answer: does speculation pay here, with which verifier and tree; does a selector?"""

    texts: int = Field(24, ge=4, description="of the first of the run's sampling settings")
    verifiers: Verifiers = Field(CHEAP, description="verifiers to compare")


class Audit(Section):
    """The comparison of verifiers, without any training, under each of the run's sampling settings."""

    roots: int = Field(1200, ge=8, description="over all sampling settings")
    verifiers: tuple[str, ...] = Field(tuple(VERIFIERS), description="verifiers to compare")
    draft_temperatures: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (0.7, 1.4), description="of the draft, as multiples of the target's"
    )
    topologies: tuple[Path, ...] = Field((), description="JSON files of child-rank paths, as sparse trees are written")

    @model_validator(mode="after")
    def _consistent(self) -> Audit:
        unknown = [name for name in self.verifiers if name not in VERIFIERS]
        if unknown:
            raise ValueError(f"verifiers: unknown verifier {unknown[0]!r}; known are {', '.join(VERIFIERS)}")
        if "traversal" not in self.verifiers:
            raise ValueError("verifiers: traversal, which the others are compared with, is not among them")
        return self


class Bench(Section):
    """Timing of the verifiers alone, on random rows."""

    vocabularies: tuple[Annotated[int, Field(ge=16)], ...] = Field(
        (2048, 151936), min_length=1, description="sizes of the vocabulary"
    )
    repeats: int = Field(40, ge=2, description="of every timing")


class Config(Section):
    """One run. Outputs go under `runs/<name>/`."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="of the run's folder and MLflow experiment")
    seed: int = Field(1, ge=0, lt=2**32, description="of everything random")
    mlflow_model: str = Field(
        "espalier-selector", pattern=r"^[^/:]+$", description="registered MLflow model that `export` adds a version to"
    )
    pair: Pair = Pair()
    prompts: Prompts = Prompts()
    sampling: Settings = Field((SamplingSetting(),), description="a list of settings, each with its own texts")
    verifiers: Verifiers = Field(
        ("naive_tree", "specinfer", "traversal", "lifted_uniform"),
        description="those whose labels are recorded, and whose static trees are compared",
    )
    data: Data = Data()
    latency: Latency = Latency()
    train: Train = Train()
    evaluate: Evaluate = Evaluate()
    export: Export = Export()
    logs: Logs = Logs()
    quick: Quick = Quick()
    audit: Audit = Audit()
    bench: Bench = Bench()

    @model_validator(mode="after")
    def _labelled(self) -> Config:
        if self.train.verifier not in self.verifiers:
            raise ValueError(f"train.verifier: {self.train.verifier!r} is not among verifiers {list(self.verifiers)}")
        return self

    @property
    def folder(self) -> Path:
        return Path("runs") / self.name
