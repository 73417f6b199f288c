"""Stage `data`: writes texts, numbers of both models' rows and labels to Parquet shards; it may be interrupted."""

from __future__ import annotations

import gc
import time
from dataclasses import asdict
from typing import Any

import torch

from data_gen.texts.labelled import make_shard
from data_gen.texts.plausibility import Plausibility
from data_gen.traces import TraceStore
from pipelines.config import Config
from pipelines.data.recorded import depends, realised, traces_folder
from pipelines.data.shards import shards, size_line
from pipelines.data.workers import made_by_ray
from pipelines.pair.loading import known_fingerprint, load_pair, recipe
from pipelines.run import Stage, progress
from pipelines.tracking import describe, log_traces, mlflow_run
from selector.schema import InputError
from selector.train.data import SPLITS

SECTIONS = ("pair", "prompts", "sampling", "verifiers", "data")


def plan(config: Config) -> list[str]:
    return [size_line(config)]


def stage_of(config: Config, pair: str | None = None) -> Stage:
    """The stage with what it depends on; `pair` is the pair's fingerprint, None for the recorded one."""
    folder = traces_folder(config)
    inputs = depends(config, pair or known_fingerprint(config))
    return Stage("data", config, inputs, (folder,), hashed=(folder / "manifest.json",))


def run(config: Config) -> None:
    pair: Any = load_pair(config)
    fingerprint, folder = pair.fingerprint, traces_folder(config)
    stage = stage_of(config, fingerprint)
    work = shards(config, pair)
    store = TraceStore(folder, stage.depends)  # raises where there are traces of other inputs
    todo = {name: each for name, each in work.items() if not store.holds(name)}
    if not stage.begin(lambda: not todo):
        return
    stage.replace()
    stage.say(size_line(config))
    seen, roots, started = Plausibility(), 0, time.perf_counter()
    for name in set(work) - set(todo):
        _judge(config, seen, Plausibility(**store.manifest["shards"][name]["plausibility"]))
    with mlflow_run(config, "data", SECTIONS) as mlflow, progress() as bar:
        task = bar.add_task("labelling texts", total=len(work), completed=len(work) - len(todo), note="")
        if config.data.ray is not None:
            pair = None  # workers have their own pairs, so this one leaves the device
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            made = made_by_ray(config, fingerprint, todo)
        else:
            made = ((name, make_shard(pair, recipe(config), each)) for name, each in todo.items())
        for name, shard in made:
            store.write(name, shard.table, plausibility=asdict(shard.plausibility))
            _judge(config, seen, shard.plausibility)
            roots += sum(shard.table["roots"].to_pylist())
            bar.update(task, advance=1, note=f"{roots / (time.perf_counter() - started):.0f} roots/s")
        checks = realised(config)
        texts, size = store.total("rows"), store.total("bytes")
        mlflow.log_metrics({"texts": texts, "bytes": size})
        mlflow.log_metrics({f"z of decoded steps/{row['verifier']} {row['branches']}": row["z"] for row in checks})
        mlflow.log_dict(store.manifest, "manifest.json")
        log_traces(mlflow, folder, SPLITS)
        found = f"{texts} texts, {size / 1e6:.1f} MB in {folder}"
        describe(mlflow, found)
    stage.say(found)
    stage.say(str(seen))
    for row in checks:
        warning = "; [bold yellow]warning[/]: beyond 4 the two disagree" if abs(row["z"]) > 4 else ""
        stage.say(
            f"{row['verifier']}, {row['branches']}: {row['steps']} decoding steps, block efficiency "
            f"{row['expected']:.3f} by the labels, {row['realised']:.3f} realised, z = {row['z']:+.2f}{warning}"
        )
    stage.finish()


def _judge(config: Config, seen: Plausibility, shard: Plausibility) -> None:
    """Add a shard's plausibility; InputError where the target cannot have written the log so far."""
    seen.join(shard)
    if config.data.log is not None and seen.is_foreign:
        raise InputError(f"{config.data.log}: not the target's own texts under their sampling settings: {seen}")
