"""The work of the `data` stage, in units that depend on nothing but the config and the pair.

A unit is one trajectory; a shard holds several. What a shard holds follows from its own prompts and seeds, so that any
worker can make it, in any order.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import torch

from data_gen import traces
from data_gen.decoding import Decoded, Decoder, Random, Step
from data_gen.models import ModelPair
from data_gen.prompts import Prompt
from data_gen.sampling import Sampling
from data_gen.trajectories import Root, TrajectoryLabeller, choose_roots, seed_of
from data_gen.verification import get_verifier
from pipelines.config import Config
from pipelines.prompts import encode, prompts_of
from selector.actions import ActionSpace
from selector.schema import InputError

PARTS = ("draft", "target", "labels", "writing", "rest")  # of the time that a run takes


@dataclass(frozen=True)
class Unit:
    """One trajectory: a prompt under one sampling setting, decoded with one verifier."""

    prompt: Prompt
    sampling: Sampling
    verifier: str


@dataclass
class Shard:
    """The rows of a shard, and the seconds that they took, by part."""

    roots: pa.Table
    steps: pa.Table
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))


def units(config: Config, split: str) -> list[Unit]:
    """The trajectories of a split: prompts of all kinds in turn, settings and verifiers in rotation."""
    return [
        Unit(prompt, setting.build(), config.verifiers[(number + s) % len(config.verifiers)])
        for number, prompt in enumerate(prompts_of(config, split, prompt_count(config, split)))
        for s, setting in enumerate(config.sampling)
    ]


def prompt_count(config: Config, split: str) -> int:
    """Prompts that a split takes; each is continued under every sampling setting."""
    shares = {"train": 1 - config.prompts.validation - config.prompts.test, "validation": config.prompts.validation}
    trajectories = config.data.roots / config.data.roots_per_trajectory
    return max(1, round(trajectories * shares[split] / sum(shares.values()) / len(config.sampling)))


def trajectory_count(config: Config) -> int:
    return len(config.sampling) * sum(prompt_count(config, split) for split in ("train", "validation"))


def shards(config: Config) -> dict[str, list[Unit]]:
    """Shard names (without folder) and their trajectories."""
    size = config.data.trajectories_per_shard
    result = {}
    for split in ("train", "validation"):
        todo = units(config, split)
        for number, start in enumerate(range(0, len(todo), size)):
            result[f"{split}/part-{number:05d}.parquet"] = todo[start : start + size]
    return result


def root_schema(config: Config, widths: list[int]) -> pa.Schema:
    return traces.root_schema(widths, config.verifiers, ActionSpace.default(), config.data.samples)


def make_shard(
    config: Config, pair: ModelPair, todo: list[Unit], done: Callable[[int], None] = lambda roots: None
) -> Shard:
    """The rows of a shard.

    Args:
        done: called after each trajectory with the number of its roots.

    Raises:
        InputError: a model gives something else than finite numbers; names the prompt.
    """
    root_rows: list[dict[str, Any]] = []
    step_rows: list[dict[str, Any]] = []
    seconds = dict.fromkeys(PARTS, 0.0)
    start = time.perf_counter()
    for unit in todo:
        try:
            decoded, prompt = decode(config, pair, unit)
            labelled, labelling = label(config, pair, unit, prompt, decoded)
        except InputError as error:
            raise InputError(f"prompt {unit.prompt.id}: {error}") from error
        except torch.OutOfMemoryError as error:
            raise InputError(
                f"data.together: {config.data.together} supertrees at once take more memory than there is; "
                f"choose fewer ({str(error).splitlines()[0]})"
            ) from error
        for part in ("draft", "target", "labels"):
            seconds[part] += labelling[part]
            if part != "labels":
                seconds[part] += sum(step.seconds[part] for step in decoded.steps)
        step_rows += [step_row(unit, step) for step in decoded.steps]
        root_rows += labelled
        done(len(labelled))
    seconds["rest"] = time.perf_counter() - start - sum(seconds.values())
    widths = [pair.target.config.hidden_size, *[pair.draft.config.hidden_size] * 2]
    roots = traces.to_table(root_rows, root_schema(config, widths))
    return Shard(roots, traces.to_table(step_rows, traces.STEP_SCHEMA), seconds)


def decode(config: Config, pair: ModelPair, unit: Unit) -> tuple[Decoded, list[int]]:
    """The trajectory of a unit, written with actions drawn from `data.behaviour`; and its prompt's token ids."""
    seed = seed_of(config.seed, unit.prompt.id, unit.sampling)
    chooser = Random(config.data.behaviour_actions, torch.Generator().manual_seed(seed))
    prompt = encode(pair, unit.prompt, config.prompts.tokens)
    if not prompt:
        raise InputError("the tokenizer gives no tokens")
    generator = torch.Generator(device=pair.device).manual_seed(seed + 1)
    decoder = Decoder(pair, unit.sampling, get_verifier(unit.verifier), chooser)
    return decoder.decode(prompt, config.data.tokens, generator, audit=True), prompt


def label(
    config: Config, pair: ModelPair, unit: Unit, prompt: list[int], decoded: Decoded
) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """Trace rows of a trajectory's roots, and the seconds that labelling took, by part."""
    data = config.data
    seed = seed_of(config.seed, unit.prompt.id, unit.sampling, "roots")
    roots = choose_roots(prompt, decoded, data.roots_per_trajectory, data.stride, seed)
    tokens = prompt + decoded.tokens
    with threads(data.threads):
        labeller = TrajectoryLabeller(pair, tokens, unit.sampling, data.samples, config.verifiers, data.together)
        labels = labeller.labels([(root.length, seed_of(seed, root.length, kind_of(root))) for root in roots])
    rows = [
        {
            "prompt": unit.prompt.id,
            "kind": unit.prompt.kind,
            "root_kind": kind_of(root),
            "root_token": tokens[root.length - 1],
            "weight": root.weight,
            **labeller.features(root.length),
            **columns,
            **decoded_columns(unit, root),
        }
        for root, columns in zip(roots, labels, strict=True)
    ]
    return rows, labeller.clock.seconds


@contextmanager
def threads(count: int | None) -> Iterator[None]:
    """So many CPU threads in torch for a while; as before if None."""
    before = torch.get_num_threads()
    torch.set_num_threads(min(count, os.cpu_count() or count) if count else before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def kind_of(root: Root) -> str:
    return "stride" if root.step is None else "step"


def decoded_columns(unit: Unit, root: Root) -> dict[str, Any]:
    """What the decoder did at this root; nulls where it did not stand there."""
    if root.step is None:
        return dict.fromkeys(("decoded_verifier", "decoded_action", "decoded_expected", "decoded_realised"))
    row = step_row(unit, root.step)
    return {
        "decoded_verifier": unit.verifier,
        "decoded_action": row["action"],
        "decoded_expected": row["expected"],
        "decoded_realised": row["realised"],
    }


def step_row(unit: Unit, step: Step) -> dict[str, Any]:
    """A decoding step with the mean and variance of its tau + 1 given the drafted tree."""
    assert step.stops_N is not None and step.depths_N is not None  # decoded with audit=True
    stops_N, depths_N = step.stops_N.cpu(), step.depths_N.double()
    mean = float((stops_N * depths_N).sum())
    return {
        "prompt": unit.prompt.id,
        "verifier": unit.verifier,
        "temperature": unit.sampling.temperature,
        "top_p": unit.sampling.top_p,
        "length": step.length,
        "action": ActionSpace.default().index(step.action),
        "nodes": step.nodes,
        "expected": 1 + mean,
        "variance": float((stops_N * (depths_N - mean) ** 2).sum()),
        "realised": 1 + step.accepted,
    }
