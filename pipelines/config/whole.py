"""The whole config of a run, with the sections of `quick`, `audit` and `bench`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from data_gen.verification import STYLES, VERIFIERS, get_verifier
from pipelines.config.sections import (
    ActionField,
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

EIGHT_SETTINGS = (
    *(SamplingSetting(temperature=t) for t in (0.2, 0.4, 0.6, 0.8, 1.0, 1.2)),
    *(SamplingSetting(top_p=p) for p in (0.9, 0.99)),
)
MIN_ROOTS = 8  # of the audit, for each sampling setting
CHEAP = tuple(name for name in VERIFIERS if name not in ("khisti", "greedy_block"))  # verifiers whose labels are cheap


class Quick(Section):
    """The two-minute answer: does speculation pay here, with which verifier and tree; does a selector?"""

    texts: int = Field(24, ge=4, description="of the first of the run's sampling settings")
    verifiers: Verifiers = Field(CHEAP, description="verifiers to compare")


class Audit(Section):
    """The comparison of verifiers, without any training."""

    sampling: Settings = Field(EIGHT_SETTINGS, description="settings to compare in")
    roots: int = Field(1200, ge=8, description="over all sampling settings")
    verifiers: Verifiers = Field(CHEAP, description="verifiers to compare")
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
    bootstrap: int = Field(2000, ge=100, description="resamples of the sources")

    @model_validator(mode="after")
    def _consistent(self) -> Audit:
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
