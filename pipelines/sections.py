"""Sections of the config that stand on their own; the rest, and how they are read, in `pipelines.config`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class RayEngine(Section):
    """Workers of `data.engine=ray`: one per device."""

    address: str | None = Field(None, description="of a running cluster, or auto; null starts Ray on this machine")
    workers: int | None = Field(None, ge=1, description="null: as many as the GPUs, or else the cores, allow")
    gpus_per_worker: int = Field(1, ge=1, description="more than 1 for a target spread by pair.device_map")
    retries: int = Field(3, ge=0, description="how often a shard may lose its worker")


class Latency(Section):
    """What is timed, and how often."""

    lengths: tuple[int, ...] = (32, 96, 160)
    widths: tuple[int, ...] = (1, 2, 4)
    nodes: tuple[int, ...] = (1, 2, 5, 9, 17, 25, 41)
    repeats: int = Field(12, ge=3)
    prompts: int = Field(8, ge=1, description="training prompts on which real decoding steps are timed")

    @field_validator("lengths", "widths", "nodes")
    @classmethod
    def _ascending(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if not value or value[0] < 1 or list(value) != sorted(set(value)):
            raise ValueError("must be ascending numbers from 1 on")
        return value

    @field_validator("lengths")
    @classmethod
    def _contexts(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        if value[0] < 2:
            raise ValueError("a context holds at least 2 tokens")
        return value


class Evaluate(Section):
    """Decoding of held-out prompts, methods interleaved prompt by prompt."""

    prompts: int = Field(40, ge=2)
    tokens: int = Field(64, ge=4)
    assisted: bool = Field(True, description="transformers' assisted generation among the methods")
    gpu_like: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field(
        (), description="synthetic profiles: a draft pass as a share of a target pass, 32 tokens at the price of one"
    )
    bootstrap: int = Field(2000, ge=100, description="resamples of the prompts")


class Bench(Section):
    """Timing of the verifiers alone, on random rows."""

    vocabularies: tuple[Annotated[int, Field(ge=16)], ...] = Field((2048, 151936), min_length=1)
    repeats: int = Field(40, ge=2)


class Labels(Section):
    """How good labels are, and what they cost: the supertree against a tree per action."""

    roots: int = Field(12, ge=2, description="roots of as many trajectories, labelled both ways")
    samples: int = Field(4, ge=2, description="trees per action of the straightforward procedure; DDTE draws 4")
    pool: int = Field(64, ge=16, description="supertrees at each of the roots, from which errors are estimated")
    vocabularies: tuple[Annotated[int, Field(ge=16)], ...] = Field((2048, 151936), min_length=1)


class Studies(Section):
    """Variants of the regressor, trained on the run's traces and compared; an empty list leaves a group out."""

    features: tuple[Literal["target", "draft", "divergences", "context", "trunk"], ...] = Field(
        ("target", "draft", "divergences", "context", "trunk"),
        description="left out one at a time: at the root the target's state, the draft's two, entropies and "
        "divergences, or length, temperature and top-p; or the draft's state along the trunk",
    )
    widths: tuple[Annotated[float, Field(gt=0)], ...] = Field(
        (0.25, 0.5, 2.0), description="multiples of train.width, train.hidden and train.trunk_hidden"
    )
    shares: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = Field(
        (0.125, 0.25, 0.5), description="of the training prompts, the smaller ones parts of the larger"
    )
    half_samples: bool = Field(True, description="labels from the first half of a root's supertrees")
    kinds: bool = Field(True, description="trained on the other kinds of prompts, each kind in turn")
    temperatures: bool = Field(True, description="trained on the other temperatures, each temperature in turn")
    policy: bool = Field(True, description="the policy beside the regressor")
    gpu_like: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field(
        (0.2, 0.05), description="synthetic profiles, as in evaluate.gpu_like: what a policy's training ties it to"
    )
