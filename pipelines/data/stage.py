"""Stage `data`: writes texts, numbers of both models' rows and labels to Parquet shards; it may be interrupted."""

from __future__ import annotations

import gc
import time
from dataclasses import asdict
from typing import Any

import numpy as np
import torch

from data_gen.texts.labelled import PARTS, Shard, make_shard
from data_gen.texts.plausibility import Plausibility
from data_gen.traces import TraceStore
from pipelines.config import Config
from pipelines.data import workers
from pipelines.data.recorded import depends, realised, traces_folder
from pipelines.data.shards import predicted_seconds, shards, size_line
from pipelines.pair.loading import known_fingerprint, load_pair, recipe
from pipelines.run import Stage, progress
from pipelines.tracking import describe, log_traces, mlflow_run
from selector.schema import InputError
from selector.train.data import SPLITS

SECTIONS = ("pair", "prompts", "sampling", "verifiers", "data")


def plan(config: Config) -> list[str]:
    """Texts and bytes; and what is missing for the time."""
    if predicted_seconds(config) is not None:
        return [size_line(config)]
    missing = "no latency profile with this machine's times of labelling: run the latency stage for the hours"
    return [size_line(config), missing]


seconds = predicted_seconds


def stage_of(config: Config, pair: str | None = None) -> Stage:
    """The stage with what it depends on; `pair` is the pair's fingerprint, None for the recorded one."""
    folder = traces_folder(config)
    inputs = depends(config, pair or known_fingerprint(config))
    return Stage("data", config, inputs, (folder,), hashed=(folder / "manifest.json",))


def run(config: Config) -> None:
    pair: Any = load_pair(config)
    fingerprint, folder = pair.fingerprint, traces_folder(config)
    several = (config.data.workers or 1) > 1
    elsewhere = config.data.ray is not None or (several and pair.device.type == "cpu")
    stage = stage_of(config, fingerprint)
    work = shards(config, pair)
    store = TraceStore(folder, stage.depends)  # raises where there are traces of other inputs
    todo = {name: each for name, each in work.items() if not store.holds(name)}
    if not stage.begin(lambda: not todo):
        return
    stage.replace()
    stage.say(size_line(config))
    if several and not elsewhere:
        stage.say("one process makes the shards: several with GPUs need Ray (data.ray=local)")
    spent = _Spent(config)
    for name in set(work) - set(todo):
        spent.judge(Plausibility(**store.manifest["shards"][name]["plausibility"]))
    with mlflow_run(config, "data", SECTIONS) as mlflow, progress() as bar:
        task = bar.add_task("labelling texts", total=len(work), completed=len(work) - len(todo), note="")
        if elsewhere:
            pair = None  # workers have their own pairs, so this one leaves the device
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            made = (workers.processes if config.data.ray is None else workers.ray)(config, fingerprint, todo)
        else:
            made = ((name, make_shard(pair, recipe(config), each)) for name, each in todo.items())
        for name, shard in made:
            start = time.perf_counter()
            store.write(name, shard.table, plausibility=asdict(shard.plausibility))
            spent.add(shard, time.perf_counter() - start)
            bar.update(task, advance=1, note=spent.line())
        checks = realised(config)
        texts, size = store.total("rows"), store.total("bytes")
        mlflow.log_metrics({"texts": texts, "bytes": size})
        mlflow.log_metrics({f"seconds/{part}": seconds for part, seconds in spent.seconds.items()})
        mlflow.log_metrics({f"z of decoded steps/{row['verifier']} {row['branches']}": row["z"] for row in checks})
        mlflow.log_dict(store.manifest, "manifest.json")
        log_traces(mlflow, folder, SPLITS)
        found = f"{texts} texts, {size / 1e6:.1f} MB in {folder}"
        describe(mlflow, found)
    stage.say(found)
    if spent.roots:
        stage.say(f"{spent.line()}; {spent.plausibility}")
    for row in checks:
        warning = "; [bold yellow]warning[/]: beyond 4 the two disagree" if abs(row["z"]) > 4 else ""
        stage.say(
            f"{row['verifier']}, {row['branches']}: {row['steps']} decoding steps, block efficiency "
            f"{row['expected']:.3f} by the labels, {row['realised']:.3f} realised, z = {row['z']:+.2f}{warning}"
        )
    stage.finish()


class _Spent:
    """Roots, and seconds by part of one call of the stage, summed over workers; and all texts' plausibility."""

    def __init__(self, config: Config) -> None:
        self.log, self.started, self.roots = config.data.log, time.perf_counter(), 0
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.plausibility = Plausibility()

    def add(self, shard: Shard, writing: float) -> None:
        self.roots += int(np.asarray(shard.table["roots"]).sum())
        for part, seconds in {**shard.seconds, "writing": writing}.items():
            self.seconds[part] += seconds
        self.judge(shard.plausibility)

    def judge(self, plausibility: Plausibility) -> None:
        """Add a shard's plausibility; InputError where the target cannot have written the log so far."""
        self.plausibility.join(plausibility)
        if self.log is not None and self.plausibility.is_foreign:
            raise InputError(
                f"{self.log}: not the target's own texts under their sampling settings: {self.plausibility}"
            )

    def line(self) -> str:
        total = sum(self.seconds.values())
        shares = ", ".join(f"{part} {seconds / total:.0%}" for part, seconds in self.seconds.items())
        return f"{self.roots / (time.perf_counter() - self.started):.0f} roots/s; {shares}"
