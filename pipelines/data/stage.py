"""Stage `data`: writes texts, numbers of both models' rows and labels to Parquet shards; it may be
interrupted."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from data_gen.texts.written import Work
from data_gen.traces import TraceStore
from pipelines.config import Config
from pipelines.data.recorded import realised, traces_folder
from pipelines.pair.source import Source, source_of
from pipelines.run import Stage
from pipelines.terminal import made, ticking
from pipelines.tracking import describe, log_traces, mlflow_run
from selector.train.data import SPLITS


def plan(config: Config) -> list[str]:
    return source_of(config).plan()


def stage_of(config: Config, source: Source | None = None) -> Stage:
    """The stage with what it depends on; without a source whose models are loaded, on the recorded
    pair."""
    folder = traces_folder(config)
    depends = (source or source_of(config)).depends()
    return Stage("data", config, depends, (folder,), hashed=(folder / "manifest.json",))


def run(config: Config) -> None:
    source = source_of(config)
    work = shards(config, source)  # of loaded models, so that the stage depends on these
    folder = traces_folder(config)
    stage = stage_of(config, source)
    store = TraceStore(folder, stage.depends)  # raises where there are traces of other inputs
    todo = {name: shard_work for name, shard_work in work.items() if not store.holds(name)}
    if (not todo or config.data.seconds) and not stage.begin():
        return
    kinds = {name: (shard_work.split, shard_work.sampling) for name, shard_work in work.items()}
    missing = set(kinds.values()) - {kind for name, kind in kinds.items() if name not in todo}
    for line in source.plan():  # a log's remarks are lines of their own
        stage.say(line)
    roots = 0
    started = time.perf_counter()
    bar = ticking("labelling texts", len(work), len(work) - len(todo))
    with mlflow_run(config, "data") as mlflow, bar as tick:
        for number, (name, shard) in enumerate(made(source.make, todo, source.processes)):
            if number == 0:
                stage.replace()
            store.write(name, shard)
            roots += sum(shard["roots"].to_pylist())
            seconds = time.perf_counter() - started
            tick(note=f"{roots / seconds:.0f} roots/s")
            missing.discard(kinds[name])
            if config.data.seconds and seconds > config.data.seconds and not missing:
                break
        checks = realised(config)
        summary = _logged(mlflow, folder, store, checks)
    stage.say(summary)
    for row in checks:
        stage.say(_in_words(row))
    stage.finish()


def _logged(mlflow: Any, folder: Path, store: TraceStore, checks: list[dict[str, Any]]) -> str:
    """What the stage has written, in words, after MLflow was told."""
    texts = store.total("rows")
    size = store.total("bytes")
    mlflow.log_metrics({"texts": texts, "bytes": size})
    distances = {}
    for row in checks:
        distances[f"z of decoded steps/{row['verifier']} {row['branches']}"] = row["z"]
    mlflow.log_metrics(distances)
    mlflow.log_dict(store.manifest, "manifest.json")
    log_traces(mlflow, folder, SPLITS)
    summary = f"{texts} texts, {size / 1e6:.1f} MB in {folder}"
    describe(mlflow, summary)
    return summary


def _in_words(check: dict[str, Any]) -> str:
    warning = "; warning: beyond 4 the two disagree" if abs(check["z"]) > 4 else ""
    return (
        f"{check['verifier']}, {check['branches']}: {check['steps']} decoding steps, block "
        f"efficiency {check['expected']:.3f} by the labels, {check['realised']:.3f} realised, "
        f"z = {check['z']:+.2f}{warning}"
    )


def shards(config: Config, source: Source) -> dict[str, Work]:
    """Shard names (within the folder of traces) and the work of each, the first ones of all splits
    and sampling settings first."""
    named_work: list[tuple[int, str, Work]] = []
    numbers = Counter[str]()
    size = config.data.texts_per_shard
    for whole in source.work():
        for begin in range(0, len(whole.prompts) or len(whole.logged), size):
            part = slice(begin, begin + size)
            name = f"{whole.split}/part-{numbers[whole.split]:05d}.parquet"
            work = replace(whole, prompts=whole.prompts[part], logged=whole.logged[part])
            named_work.append((begin, name, work))
            numbers[whole.split] += 1
    return {name: work for _, name, work in sorted(named_work, key=itemgetter(0))}
