"""Sections of the config that stand on their own; the rest, and how they are read, in `pipelines.config`."""

from __future__ import annotations

from typing import Annotated

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

    prompts: int = Field(30, ge=2)
    tokens: int = Field(128, ge=4, description="as data.tokens, where decoding and replay are to agree")
    assisted: bool = Field(True, description="transformers' assisted generation among the methods")
    gpu_like: tuple[Annotated[float, Field(gt=0, le=1)], ...] = Field(
        (), description="synthetic profiles: a draft pass as a share of a target pass, 32 tokens at the price of one"
    )
    bootstrap: int = Field(2000, ge=100, description="resamples of the prompts")


class Bench(Section):
    """Timing of the verifiers alone, on random rows."""

    vocabularies: tuple[Annotated[int, Field(ge=16)], ...] = Field((2048, 151936), min_length=1)
    repeats: int = Field(40, ge=2)
