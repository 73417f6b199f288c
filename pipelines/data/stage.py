"""Stage `data`: writes texts, numbers of both models' rows and labels to Parquet shards; it may be
interrupted."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from data_gen.models.pair import ModelPair
from data_gen.texts.labelled import make_shard
from data_gen.texts.log_labels import splits_of
from data_gen.texts.logs import read_all
from data_gen.texts.written import BEYOND, Work
from data_gen.traces import TraceStore, text_bytes
from pipelines.config import Config
from pipelines.data.recorded import depends, realised, traces_folder
from pipelines.pair import stage as pairs
from pipelines.pair.log import Log, log_of
from pipelines.run import Stage, made, ticking
from pipelines.tracking import describe, log_traces, mlflow_run
from selector.actions import ActionSpace
from selector.schema import FULL, InputError
from selector.train.data import SPLITS


def plan(config: Config) -> list[str]:
    if config.logs.files:
        log = log_of(config)
        return [str(log), *log.logs.remarks]
    if config.data.log is not None:
        return [f"the texts of {config.data.log}, one teacher-forced pass of each model over each"]
    counts = split_counts(config)
    settings = len(config.sampling)
    data = config.data
    hidden = 0
    if data.features == FULL:
        hidden = sum(pairs.hidden_widths(config)) * data.tokens
    tokens = config.prompts.tokens + data.tokens + BEYOND
    largest = 0
    total = 0
    for split, count in counts.items():
        stride = data.stride if split == "train" else 1
        size = text_bytes(
            tokens, data.tokens, len(config.verifiers), hidden // stride, ActionSpace.recorded()
        )
        largest = max(largest, size)
        total += settings * count * size
    texts = ", ".join(f"{count} for {split}" for split, count in counts.items())
    limit = f"; no more once {data.seconds} s are over" if data.seconds else ""
    return [
        f"{settings} sampling settings x {sum(counts.values())} texts ({texts}) of {data.tokens} "
        f"labelled tokens; up to {largest / 1e3:.0f} kB a text, {total / 1e6:.0f} MB in all "
        f"before compression{limit}"
    ]


def stage_of(config: Config, pair: str | None = None) -> Stage:
    """The stage with what it depends on; `pair` is the pair's fingerprint, None for the recorded
    one."""
    folder = traces_folder(config)
    if pair is None:
        pair = pairs.known_fingerprint(config)
    return Stage(
        "data", config, depends(config, pair), (folder,), hashed=(folder / "manifest.json",)
    )


def run(config: Config) -> None:
    log: Log | None = None
    pair: Any = None
    if config.logs.files:
        log = log_of(config)
        fingerprint = log.fingerprint
    else:
        pair = pairs.load_pair(config)
        fingerprint = pair.fingerprint
    folder = traces_folder(config)
    stage = stage_of(config, fingerprint)
    work = shards(config, pair, log)
    store = TraceStore(folder, stage.depends)  # raises where there are traces of other inputs
    todo = {name: shard_work for name, shard_work in work.items() if not store.holds(name)}
    if (not todo or config.data.seconds) and not stage.begin():
        return
    kinds = {name: (shard_work.split, shard_work.sampling) for name, shard_work in work.items()}
    missing = set(kinds.values()) - {kind for name, kind in kinds.items() if store.holds(name)}
    stage.replace()
    for line in plan(config):  # a log's remarks are lines of their own
        stage.say(line)
    roots = 0
    started = time.perf_counter()
    make = log.shard if log is not None else partial(make_shard, pair, pairs.recipe(config))
    forks = pair is not None and pair.device.type == "cpu"
    processes = config.processes if forks else 1
    bar = ticking("labelling texts", len(work), len(work) - len(todo))
    with mlflow_run(config, "data") as mlflow, bar as tick:
        for name, shard in made(make, todo, processes):
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


def split_counts(config: Config) -> dict[str, int]:
    test = config.prompts.test
    validation = config.prompts.validation
    shares = {"train": 1 - test - validation, "validation": validation, "test": test}
    return {split: max(2, round(config.data.texts * share)) for split, share in shares.items()}


def shards(config: Config, pair: ModelPair, log: Log | None = None) -> dict[str, Work]:
    """Shard names (within the folder of traces) and the work of each, the first ones of all splits
    and sampling settings first. The texts are a log's, if one is given, else the pair's."""
    wholes: Iterable[Work]
    if log is not None:
        wholes = log.work
    elif config.data.log is not None:
        wholes = _of_log(config, pair, config.data.log)
    else:
        wholes = _of_prompts(config, pair)
    named_work: list[tuple[int, str, Work]] = []
    numbers = Counter[str]()
    size = config.data.texts_per_shard
    for whole in wholes:
        count = len(whole.prompts) or len(whole.logged)
        for begin in range(0, count, size):
            part = slice(begin, begin + size)
            name = f"{whole.split}/part-{numbers[whole.split]:05d}.parquet"
            work = replace(whole, prompts=whole.prompts[part], logged=whole.logged[part])
            named_work.append((begin, name, work))
            numbers[whole.split] += 1
    return {name: work for _, name, work in sorted(named_work, key=itemgetter(0))}


def _of_prompts(config: Config, pair: ModelPair) -> Iterator[Work]:
    for split, count in split_counts(config).items():
        prompts = pairs.prompts_of(config, pair, split)
        for setting in config.sampling:
            sampling = setting.build()
            # all greedy texts of one prompt are the same
            different = min(count, len(prompts)) if sampling.temperature == 0 else count
            texts = []
            for number in range(different):
                continuation, prompt = divmod(number, len(prompts))
                texts.append((prompts[prompt], continuation))
            decoded = 0
            if split == "train":
                decoded = round(config.data.decoded * len(texts))
            yield Work(split, sampling, tuple(texts[:decoded]), decoded=True)
            # shorter prompts are padded to longer ones
            by_length = sorted(texts[decoded:], key=lambda text: len(text[0].text))
            yield Work(split, sampling, tuple(by_length))


def _of_log(config: Config, pair: ModelPair, path: Path) -> Iterator[Work]:
    """InputError where the run has several sampling settings, a text is too long or has other token
    ids, or a split is empty."""
    if len(config.sampling) > 1:
        raise InputError(
            "data.log: a log's texts are of one sampling setting: leave one in sampling"
        )
    sampling = config.sampling[0].build()
    logs = read_all([path], [], sampling)
    for remark in logs.remarks:
        Stage("data", config, {}, ()).say(remark)
    longest = 0
    for text in logs.texts:
        if len(text.tokens) > pair.max_positions:
            raise InputError(
                f"{text.place}: {len(text.tokens)} tokens; the pair has {pair.max_positions} "
                "positions"
            )
        if max(text.tokens) >= pair.vocabulary:
            raise InputError(f"{text.place}: a token beyond the vocabulary of {pair.vocabulary}")
        longest = max(longest, len(text.tokens))
    pairs.check_models(pair, longest)  # no trees are drafted behind these texts
    splits = splits_of(logs, config.prompts.validation, config.prompts.test)
    for split, texts in splits.items():
        yield Work(split, sampling, (), logged=tuple(texts))
