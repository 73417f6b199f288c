"""The whole config of a run."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator, model_validator

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
    Train,
    distinct,
)
from pipelines.config.studies import Audit, Bench, Quick, check_labelled


class Config(Section):
    """One run. Outputs go under `runs/<name>/`."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$", description="of the run's folder and MLflow experiment")
    seed: int = Field(1, ge=0, lt=2**32, description="of everything random")
    mlflow_model: str = Field(
        "espalier-selector", pattern=r"^[^/:]+$", description="registered MLflow model that `export` adds a version to"
    )
    pair: Pair = Pair()
    prompts: Prompts = Prompts()
    sampling: tuple[SamplingSetting, ...] = Field(
        (SamplingSetting(),), min_length=1, description="a list of settings, each with its own texts"
    )
    verifiers: tuple[str, ...] = Field(
        ("naive_tree", "specinfer", "traversal", "lifted_uniform"),
        min_length=1,
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
