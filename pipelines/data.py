"""Stage `data`: trajectories, roots and labels, into Parquet shards that survive an interruption."""

from __future__ import annotations

import gc
import math
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from data_gen import traces
from data_gen.latency import device_name
from data_gen.models import hidden_width
from pipelines import engines
from pipelines.config import Config
from pipelines.pair import load_pair, pair_names
from pipelines.prompts import prompts_digest
from pipelines.stage import Stage, mlflow_run, progress
from pipelines.units import PARTS, Shard, root_schema, shards, trajectory_count
from selector.actions import ActionSpace
from selector.runtime import LatencyProfile
from selector.schema import InputError, read_manifest


def plan(config: Config) -> list[str]:
    """Rows, passes, time and bytes."""
    lines = [size_line(config, hidden_widths(config)), passes_line(config)]
    predicted = predicted_seconds(config)
    if predicted is None:
        lines.append("no latency profile with this machine's times of labelling: run the latency stage for the hours")
    else:
        total = sum(predicted.values())
        parts = ", ".join(f"{part} {seconds / total:.0%}" for part, seconds in predicted.items())
        lines.append(f"predicted {duration(total)} on one device, by the latency profile ({parts})")
    return lines


def size_line(config: Config, widths: list[int]) -> str:
    """What will be written, in rows and bytes."""
    roots = trajectory_count(config) * config.data.roots_per_trajectory
    size = traces.row_bytes(root_schema(config, widths)) * roots
    return (
        f"about {roots} roots of {config.data.samples} supertrees in {trajectory_count(config)} trajectories, "
        f"about {size / 1e6:.1f} MB of Parquet"
    )


def passes_line(config: Config) -> str:
    """Model passes, those that write the trajectories apart."""
    data, space = config.data, ActionSpace.default()
    batches = trajectory_count(config) * math.ceil(data.roots_per_trajectory * data.samples / data.together)
    drafts = space.max_L1 + space.max_L2 - 1
    passes = batches * (drafts + 1) + 2 * trajectory_count(config)
    return (
        f"labelling takes {passes:,} model passes: {batches:,} batches of up to {data.together} supertrees, each "
        f"{drafts} draft passes and one target pass; two prefills a trajectory"
    )


def predicted_seconds(config: Config) -> dict[str, float] | None:
    """Time by part on one device, from the run's latency profile; None if it has none of this machine."""
    try:
        profile = LatencyProfile.load(config.folder / "latency.json")
    except InputError:
        return None
    here = device_name(config.pair.device, config.pair.dtype, config.pair.threads)
    if profile.device != here or not profile.labelling:
        return None
    tokens = trajectory_count(config) * config.data.tokens
    supertrees = config.data.roots * config.data.samples
    return {
        "trajectories": profile.labelling["token"] * tokens,
        **{part: profile.labelling[part] * supertrees for part in ("draft", "target", "labels")},
    }


def duration(seconds: float) -> str:
    """Seconds in the largest unit that leaves more than one."""
    for unit, size in (("hours", 3600), ("minutes", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f} {unit}"
    return f"{seconds:.0f} seconds"


def hidden_widths(config: Config) -> list[int]:
    """Widths of the hidden-state features, from the models' configs alone."""
    if config.pair.target == "embedded":
        target, draft = config.pair.embedded.target.hidden, config.pair.embedded.draft.hidden
    else:
        target, draft = (
            hidden_width(name, role) for name, role in zip(pair_names(config), ("target", "draft"), strict=True)
        )
    return [target, draft, draft]


def depends(config: Config, pair: str) -> dict[str, Any]:
    """Everything the rows follow from.

    Not: who makes them, and how many at once. That moves the passes' rounding, and with it now and then a token that is
    drawn: other rows, of the same law. The same command gives the same bytes.

    Args:
        pair: the pair's fingerprint.
    """
    return {
        "pair": pair,
        "dtype": config.pair.dtype,
        "device": device_name(config.pair.device, config.pair.dtype).startswith("cuda"),
        "seed": config.seed,
        "sampling": [setting.model_dump() for setting in config.sampling],
        "verifiers": list(config.verifiers),
        "data": config.data.model_dump(mode="json", exclude={"engine", "ray", "threads", "together"}),
        "prompts": {
            "shares": [config.prompts.validation, config.prompts.test],
            "tokens": config.prompts.tokens,
            "texts": prompts_digest(config, "train", "validation"),
        },
    }


def run(config: Config) -> None:
    pair: Any = load_pair(config)
    fingerprint = pair.fingerprint
    folder, steps_folder = config.folder / "traces", config.folder / "steps"
    inputs = depends(config, fingerprint)
    work = shards(config)

    def missing() -> dict[str, Any]:
        stores = traces.TraceStore(folder, inputs), traces.TraceStore(steps_folder, inputs)
        return {name: todo for name, todo in work.items() if not all(store.holds(name) for store in stores)}

    stage = Stage("data", config, inputs, (folder, steps_folder), costly=True)
    if not stage.begin(lambda: not missing()):
        return
    for line in (size_line(config, hidden_widths(config)), passes_line(config)):
        stage.say(line)
    todo = missing()
    store, steps = traces.TraceStore(folder, inputs), traces.TraceStore(steps_folder, inputs)
    spent = _Spent()
    with mlflow_run(config, "data") as mlflow, progress() as bar:
        finished = sum(shard["rows"] for name, shard in store.manifest["shards"].items() if name not in todo)
        task = bar.add_task("labelling roots", total=config.data.roots, completed=finished, note="")

        def done(roots: int) -> None:
            spent.roots += roots
            bar.update(task, advance=roots, note=spent.line())

        if config.data.engine == "ray":
            pair = None  # workers hold pairs of their own: this one leaves the device
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            made = engines.ray(config, fingerprint, todo, done)
        else:
            made = engines.local(config, pair, todo, done)
        for name, shard in made:
            start = time.perf_counter()
            steps.write(name, shard.steps)
            store.write(name, shard.roots)
            spent.add(shard, time.perf_counter() - start)
            bar.update(task, note=spent.line())
        bar.update(task, total=store.rows(), completed=store.rows())
        mlflow.log_metrics({"data/roots": store.rows(), "data/bytes": store.bytes(), "data/steps": steps.rows()})
        mlflow.log_metrics(spent.metrics())
        mlflow.log_dict(store.manifest, "manifest.json")
    stage.say(f"{store.rows()} roots, {store.bytes() / 1e6:.1f} MB in {folder}; {steps.rows()} decoding steps")
    if spent.resident:
        stage.say(f"{spent.line()}; {spent.memory()}")
    for row in realised(config):
        stage.say(
            f"{row['verifier']}: {row['steps']} steps, expected block efficiency {row['expected']:.3f}, "
            f"realised {row['realised']:.3f}, z = {row['z']:+.2f}"
        )
    stage.finish()


class _Spent:
    """Roots, time by part, and memory, of one call of the stage. Workers' seconds are added up."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.roots = 0
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.resident: list[int] = []

    def add(self, shard: Shard, writing: float) -> None:
        for part, seconds in shard.seconds.items():
            self.seconds[part] += seconds
        self.seconds["writing"] += writing
        self.resident.append(resident_bytes())

    def line(self) -> str:
        """Roots per second and the shares of the time."""
        total = sum(self.seconds.values())
        rate = f"{self.roots / (time.perf_counter() - self.started):.1f} roots/s"
        if total == 0:
            return rate
        return f"{rate}; " + ", ".join(f"{part} {seconds / total:.0%}" for part, seconds in self.seconds.items())

    def memory(self) -> str:
        size = self.resident
        first, middle, last = (f"{resident / 1e6:.0f} MB" for resident in (size[0], size[len(size) // 2], size[-1]))
        return f"resident set of this process {first} after the first shard, {middle} half-way, {last} at the end"

    def metrics(self) -> dict[str, float]:
        values = {f"data/seconds/{part}": seconds for part, seconds in self.seconds.items()}
        if self.resident:
            values |= {"data/resident/first": self.resident[0], "data/resident/last": self.resident[-1]}
        return values | {"data/roots_per_second": self.roots / (time.perf_counter() - self.started)}


def resident_bytes() -> int:
    """This process's memory; 0 where the system does not say."""
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0


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
