"""Stage `data`: trajectories, roots and labels, into Parquet shards that survive an interruption."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from data_gen import traces
from data_gen.decoding import Decoded, Decoder, Random, Step
from data_gen.models import ModelPair, hidden_width
from data_gen.prompts import Prompt
from data_gen.sampling import Sampling
from data_gen.trajectories import Root, TrajectoryLabeller, choose_roots, seed_of
from data_gen.verification import get_verifier
from pipelines.config import Config
from pipelines.pair import load_pair, pair_names
from pipelines.prompts import encode, prompts_digest, prompts_of, prompts_path
from pipelines.stage import Stage, mlflow_run, progress
from selector.actions import ActionSpace
from selector.schema import InputError, read_manifest


@dataclass(frozen=True)
class Unit:
    """One trajectory: a prompt under one sampling setting, decoded with one verifier."""

    prompt: Prompt
    sampling: Sampling
    verifier: str


def units(config: Config, split: str) -> list[Unit]:
    """The trajectories of a split: prompts of all kinds in turn, settings and verifiers in rotation."""
    shares = {"train": 1 - config.prompts.validation - config.prompts.test, "validation": config.prompts.validation}
    trajectories = config.data.roots / config.data.roots_per_trajectory
    count = max(1, round(trajectories * shares[split] / sum(shares.values()) / len(config.sampling)))
    return [
        Unit(prompt, setting.build(), config.verifiers[(number + s) % len(config.verifiers)])
        for number, prompt in enumerate(prompts_of(config, split, count))
        for s, setting in enumerate(config.sampling)
    ]


def shards(config: Config) -> dict[str, list[Unit]]:
    """Shard names (without folder) and their trajectories."""
    size = config.data.trajectories_per_shard
    result = {}
    for split in ("train", "validation"):
        todo = units(config, split)
        for number, start in enumerate(range(0, len(todo), size)):
            result[f"{split}/part-{number:05d}.parquet"] = todo[start : start + size]
    return result


def plan(config: Config) -> list[str]:
    return [size_line(config, hidden_widths(config))]


def size_line(config: Config, widths: list[int]) -> str:
    """What will be written, in rows and bytes."""
    size = traces.row_bytes(root_schema(config, widths)) * config.data.roots
    trajectories = sum(map(len, shards(config).values())) if prompts_path(config).exists() else None
    return (
        f"about {config.data.roots} roots of {config.data.samples} supertrees in "
        f"{trajectories or config.data.roots // config.data.roots_per_trajectory} trajectories, "
        f"at most {size / 1e6:.1f} MB of Parquet"
    )


def hidden_widths(config: Config) -> list[int]:
    """Widths of the hidden-state features, from the models' configs alone."""
    if config.pair.target == "embedded":
        target, draft = config.pair.embedded.target.hidden, config.pair.embedded.draft.hidden
    else:
        target, draft = (
            hidden_width(name, role) for name, role in zip(pair_names(config), ("target", "draft"), strict=True)
        )
    return [target, draft, draft]


def root_schema(config: Config, widths: list[int]) -> Any:
    return traces.root_schema(widths, config.verifiers, len(ActionSpace.default()))


def depends(config: Config, pair: str) -> dict[str, Any]:
    """Everything the rows follow from.

    Args:
        pair: the pair's fingerprint.
    """
    return {
        "pair": pair,
        "dtype": config.pair.dtype,
        "seed": config.seed,
        "sampling": [setting.model_dump() for setting in config.sampling],
        "verifiers": list(config.verifiers),
        "data": config.data.model_dump(mode="json"),
        "prompts": {
            "shares": [config.prompts.validation, config.prompts.test],
            "tokens": config.prompts.tokens,
            "texts": prompts_digest(config, "train", "validation"),
        },
    }


def run(config: Config) -> None:
    pair = load_pair(config)
    folder, steps_folder = config.folder / "traces", config.folder / "steps"
    inputs = depends(config, pair.fingerprint)
    work = shards(config)

    def intact() -> bool:
        stores = traces.TraceStore(folder, inputs), traces.TraceStore(steps_folder, inputs)
        return all(store.holds(name) for store in stores for name in work)

    stage = Stage("data", config, inputs, (folder, steps_folder), costly=True)
    if not stage.begin(intact):
        return
    widths = hidden_widths(config)
    stage.say(size_line(config, widths))
    store, steps = traces.TraceStore(folder, inputs), traces.TraceStore(steps_folder, inputs)
    with mlflow_run(config, "data") as mlflow, progress() as bar:
        task = bar.add_task("labelling roots", total=config.data.roots, note="")
        for name, todo in work.items():
            if store.holds(name) and steps.holds(name):
                bar.update(task, completed=store.rows())
                continue
            root_rows: list[dict[str, Any]] = []
            step_rows: list[dict[str, Any]] = []
            for unit in todo:
                decoded, prompt = decode(config, pair, unit)
                step_rows += [step_row(unit, step) for step in decoded.steps]
                for row in label(config, pair, unit, prompt, decoded):
                    root_rows.append(row)
                    bar.advance(task)
            steps.write(name, step_rows, traces.STEP_SCHEMA)
            store.write(name, root_rows, root_schema(config, widths))
        bar.update(task, total=store.rows(), completed=store.rows())
        mlflow.log_metrics({"data/roots": store.rows(), "data/bytes": store.bytes(), "data/steps": steps.rows()})
        mlflow.log_dict(store.manifest, "manifest.json")
    stage.say(f"{store.rows()} roots, {store.bytes() / 1e6:.1f} MB in {folder}; {steps.rows()} decoding steps")
    for row in realised(config):
        stage.say(
            f"{row['verifier']}: {row['steps']} steps, expected block efficiency {row['expected']:.3f}, "
            f"realised {row['realised']:.3f}, z = {row['z']:+.2f}"
        )
    stage.finish()


def realised(config: Config) -> list[dict[str, Any]]:
    """Expected against realised block efficiency over all decoding steps, by verifier.

    `z` is the sum of the differences over its standard deviation under the law of each step's own tree.
    """
    folder = config.folder / "steps"
    table = pq.ParquetDataset([folder / name for name in read_manifest(folder)["shards"]]).read()
    steps = {name: np.asarray(table[name]) for name in ("verifier", "expected", "realised", "variance")}
    rows = []
    for verifier in config.verifiers:
        mine = steps["verifier"] == verifier
        if mine.any():
            difference = (steps["realised"][mine] - steps["expected"][mine]).sum()
            rows.append(
                {
                    "verifier": verifier,
                    "steps": int(mine.sum()),
                    "expected": float(steps["expected"][mine].mean()),
                    "realised": float(steps["realised"][mine].mean()),
                    "z": float(difference / max(steps["variance"][mine].sum() ** 0.5, 1e-300)),
                }
            )
    return rows


def decode(config: Config, pair: ModelPair, unit: Unit) -> tuple[Decoded, list[int]]:
    """The trajectory of a unit, written with actions drawn from `data.behaviour`; and its prompt's token ids."""
    seed = seed_of(config.seed, unit.prompt.id, unit.sampling)
    chooser = Random(config.data.behaviour_actions, torch.Generator().manual_seed(seed))
    prompt = encode(pair, unit.prompt, config.prompts.tokens)
    if not prompt:
        raise InputError(f"prompt {unit.prompt.id}: the tokenizer gives no tokens")
    generator = torch.Generator(device=pair.device).manual_seed(seed + 1)
    decoder = Decoder(pair, unit.sampling, get_verifier(unit.verifier), chooser)
    return decoder.decode(prompt, config.data.tokens, generator, audit=True), prompt


def label(config: Config, pair: ModelPair, unit: Unit, prompt: list[int], decoded: Decoded) -> Iterator[dict[str, Any]]:
    """Trace rows of a trajectory's roots."""
    seed = seed_of(config.seed, unit.prompt.id, unit.sampling, "roots")
    roots = choose_roots(prompt, decoded, config.data.roots_per_trajectory, config.data.stride, seed)
    tokens = prompt + decoded.tokens
    labeller = TrajectoryLabeller(pair, tokens, unit.sampling, config.data.samples, config.verifiers)
    for root in roots:
        kind = "stride" if root.step is None else "step"
        labels = labeller.labels(root.length, seed_of(seed, root.length, kind))
        yield {
            "prompt": unit.prompt.id,
            "kind": unit.prompt.kind,
            "root_kind": kind,
            "root_token": tokens[root.length - 1],
            **labeller.features(root.length),
            **labels,
            **decoded_columns(unit, root),
        }


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
        "seconds": sum(step.seconds.values()),
    }
