"""Stage `data`: texts of the target, their features and labels, into Parquet shards that survive an interruption."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from data_gen import traces
from data_gen.latency import device_name
from data_gen.models import hidden_width
from data_gen.texts import Plausibility
from pipelines import engines
from pipelines.config import Config
from pipelines.pair import load_pair, pair_names
from pipelines.prompts import prompts_digest
from pipelines.stage import Stage, mlflow_run, progress
from pipelines.units import DEPTH, PARTS, Shard, shards, split_counts
from selector.actions import ActionSpace
from selector.replay import outcomes
from selector.runtime import LatencyProfile
from selector.schema import FULL, InputError, read_manifest, sha256, survival_column

COSTS = {"written": "token", "decoded": "decoded", "labelled": "root"}  # parts, and their price in a latency profile


def plan(config: Config) -> list[str]:
    """Texts, passes, time and bytes."""
    lines = [size_line(config)]
    predicted = predicted_seconds(config)
    if predicted is None:
        lines.append("no latency profile with this machine's times of labelling: run the latency stage for the hours")
    else:
        total = sum(predicted.values())
        parts = ", ".join(f"{part} {seconds / total:.0%}" for part, seconds in predicted.items())
        lines.append(f"predicted {duration(total)} on one device, by the latency profile ({parts})")
    return lines


def size_line(config: Config) -> str:
    """What will be written, in texts and bytes."""
    if config.data.log is not None:
        return f"the texts of {config.data.log}, one teacher-forced pass of each model over each"
    counts, settings, data = split_counts(config), len(config.sampling), config.data
    hidden = sum(hidden_widths(config)) * data.tokens if data.features == FULL else 0
    tokens = config.prompts.tokens + data.tokens + DEPTH
    each = {
        split: traces.text_bytes(
            tokens, data.tokens, len(config.verifiers), hidden // (data.stride if split == "train" else 1)
        )
        for split in counts
    }
    total = settings * sum(count * each[split] for split, count in counts.items())
    texts = ", ".join(f"{count} for {split}" for split, count in counts.items())
    return (
        f"{settings} sampling settings x {sum(counts.values())} texts ({texts}) of {data.tokens} labelled tokens; "
        f"up to {max(each.values()) / 1e3:.0f} kB a text, {total / 1e6:.0f} MB in all before compression"
    )


def predicted_seconds(config: Config) -> dict[str, float] | None:
    """Time by part on one device, from the run's latency profile; None if it has none of this machine."""
    try:
        profile = LatencyProfile.load(config.folder / "latency.json")
    except InputError:
        return None
    here = device_name(config.pair.device, config.pair.dtype, config.pair.threads)
    if profile.device != here or not profile.labelling or config.data.log is not None:
        return None
    counts, settings, data = split_counts(config), len(config.sampling), config.data
    texts, decoded = sum(counts.values()), round(data.decoded * counts["train"])
    tokens = data.tokens + DEPTH
    amount = {"written": (texts - decoded) * tokens, "decoded": decoded * tokens, "labelled": texts * data.tokens}
    return {part: settings * amount[part] * profile.labelling[price] for part, price in COSTS.items()}


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

    Not: who makes them. That moves the passes' rounding, and with it now and then a token that is drawn: other rows, of
    the same law. The same command gives the same bytes.

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
        "data": config.data.model_dump(mode="json", exclude={"engine", "ray", "threads"}),
        "log": _log_digest(config.data.log),
        "prompts": {
            "shares": [config.prompts.validation, config.prompts.test],
            "tokens": config.prompts.tokens,
            "texts": prompts_digest(config, "train", "validation", "test"),
        },
    }


def _log_digest(path: Path | None) -> str | None:
    try:
        return None if path is None else sha256(path)
    except OSError as error:
        raise InputError(f"data.log: {path}: {error.strerror}") from error


def run(config: Config) -> None:
    pair: Any = load_pair(config)
    fingerprint = pair.fingerprint
    folder = config.folder / "traces"
    inputs = depends(config, fingerprint)
    work = shards(config, pair)

    def missing() -> dict[str, Any]:
        store = traces.TraceStore(folder, inputs)
        return {name: todo for name, todo in work.items() if not store.holds(name)}

    stage = Stage("data", config, inputs, (folder,), costly=True)
    if not stage.begin(lambda: not missing()):
        return
    stage.say(size_line(config))
    todo = missing()
    store = traces.TraceStore(folder, inputs)
    spent = _Spent()
    with mlflow_run(config, "data") as mlflow, progress() as bar:
        task = bar.add_task("labelling texts", total=len(work), completed=len(work) - len(todo), note="")
        if config.data.engine == "ray":
            pair = None  # workers hold pairs of their own: this one leaves the device
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            made = engines.ray(config, fingerprint, todo)
        else:
            made = engines.local(config, pair, todo)
        for name, shard in made:
            start = time.perf_counter()
            store.write(name, shard.table)
            spent.add(shard, time.perf_counter() - start)
            bar.update(task, advance=1, note=spent.line())
        mlflow.log_metrics({"data/texts": store.rows(), "data/bytes": store.bytes(), **spent.metrics()})
        mlflow.log_dict(store.manifest, "manifest.json")
    stage.say(f"{store.rows()} texts, {store.bytes() / 1e6:.1f} MB in {folder}")
    if spent.resident:
        stage.say(f"{spent.line()}; {spent.memory()}")
        stage.say(str(spent.plausibility))
    for row in realised(config):
        stage.say(
            f"{row['verifier']}: {row['steps']} decoding steps, block efficiency {row['expected']:.3f} by the labels, "
            f"{row['realised']:.3f} realised, z = {row['z']:+.2f}"
        )
    stage.finish()


class _Spent:
    """Roots, time by part, and memory, of one call of the stage. Workers' seconds are added up."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.roots = 0
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.resident: list[int] = []
        self.plausibility = Plausibility()

    def add(self, shard: Shard, writing: float) -> None:
        self.roots += int(np.asarray(shard.table["roots"]).sum())
        for part, seconds in shard.seconds.items():
            self.seconds[part] += seconds
        self.seconds["writing"] += writing
        self.resident.append(resident_bytes())
        self.plausibility.join(shard.plausibility)

    def line(self) -> str:
        """Roots per second and the shares of the time."""
        total = sum(self.seconds.values())
        rate = f"{self.roots / (time.perf_counter() - self.started):.0f} roots/s"
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
    """What decoding accepted against what the labels say of the same steps, by verifier.

    Given the text, the accepted lengths of its steps are independent, and the labels hold their laws: `z` is the sum of
    the differences over its standard deviation. (Labels of branching trees carry the noise of one draw of siblings,
    which that deviation leaves out.)
    """
    folder = config.folder / "traces"
    names = [name for name in read_manifest(folder)["shards"] if name.startswith("train/")]
    found: dict[str, list[np.ndarray]] = {}
    for name in names:
        table = pq.read_table(folder / name)
        for row in range(table.num_rows):
            verifier = table["step_verifier"][row].as_py()
            if verifier is not None and table["roots"][row].as_py() > 0:
                found.setdefault(verifier, []).append(_against_labels(table.slice(row, 1), verifier))
    rows = []
    for verifier in config.verifiers:
        if verifier in found and len(steps := np.concatenate(found[verifier])):
            realised, mean, variance = steps.T
            z = float((realised - mean).sum() / max(variance.sum() ** 0.5, 1e-300))
            figures = {"expected": float(mean.mean()), "realised": float(realised.mean()), "z": z}
            rows.append({"verifier": verifier, "steps": len(steps), **figures})
    return rows


def _against_labels(text: pa.Table, verifier: str) -> np.ndarray:
    """Of every step of one text: tau + 1 as realised, and its mean and variance by the labels; [steps, 3]."""
    space = ActionSpace.default()
    root, action, accepted = (
        torch.tensor(text[name][0].as_py(), dtype=torch.int64) for name in ("step_root", "step_action", "step_accepted")
    )
    flat = text[survival_column(verifier)].chunk(0).flatten().to_numpy(zero_copy_only=False)
    survivals_RS = torch.from_numpy(flat.astype(np.float64)).view(-1, len(space.sums_SA))
    law_RJ = outcomes(survivals_RS[root], action, space)
    n_J = torch.arange(1, law_RJ.shape[-1] + 1, dtype=torch.float64)
    mean_R = law_RJ @ n_J
    variance_R = law_RJ @ n_J**2 - mean_R**2
    return torch.stack([accepted + 1.0, mean_R, variance_R.clamp(min=0)], dim=-1).numpy()
