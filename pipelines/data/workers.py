"""Ray's workers, which make the data stage's shards. Only the driver writes the store."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from data_gen.models.pair import ModelPair
from data_gen.texts.labelled import Shard, Work, make_shard
from pipelines.config import Config
from pipelines.pair.loading import load_pair, recipe
from selector.files import first_line
from selector.schema import InputError

RETRIES = 3  # how often one shard may lose its worker


class Worker:
    """It loads its pair with its first shard, and again where Ray replaces a lost actor."""

    def __init__(self, config: Config, fingerprint: str, folder: str, threads: int) -> None:
        self.config, self.fingerprint, self.folder, self.threads = config, fingerprint, folder, threads

    def make(self, name: str, todo: Work) -> tuple[str, Shard]:
        """A shard, and its name; InputError if the pair is missing, or differs from the driver's."""
        return name, make_shard(self._pair, recipe(self.config), todo)

    @cached_property
    def _pair(self) -> ModelPair:
        os.chdir(self.folder)  # of the driver, on a shared disk
        torch.set_num_threads(self.threads)
        pair = load_pair(self.config)
        if pair.fingerprint != self.fingerprint:
            raise InputError("the pair of a worker is not the driver's")
        return pair


def made_by_ray(config: Config, fingerprint: str, work: dict[str, Work]) -> Iterator[tuple[str, Shard]]:
    """Shards in the order in which they are finished, by one actor per device. Ray makes a lost actor's shard again;
    InputError where it is not installed or lacks the devices asked for, or a shard lost its worker too often."""
    try:
        import ray
        from ray.util import ActorPool
    except ImportError as error:
        raise InputError("data.ray: ray is not installed: pip install '.[ray]' in Espalier's repository") from error
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    settings: dict[str, Any] = {"address": config.data.ray, "log_to_driver": False, "logging_level": "ERROR"}
    if config.data.ray == "local":
        settings |= {"include_dashboard": False, "object_store_memory": 512 << 20}
    try:
        ray.init(**settings)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(f"data.ray: {config.data.ray}: {first_line(error)}") from error
    try:
        count, gpus = devices([node["Resources"] for node in ray.nodes() if node["Alive"]], config)
        options: dict[str, Any] = {"max_restarts": RETRIES * len(work), "max_task_retries": RETRIES}
        actor = ray.remote(num_cpus=0 if gpus else 1, num_gpus=gpus, **options)(Worker)
        arguments = config, fingerprint, str(Path.cwd()), torch.get_num_threads()
        pool = ActorPool([actor.remote(*arguments) for _ in range(min(count, len(work)))])
        yield from pool.map_unordered(lambda actor, item: actor.make.remote(*item), list(work.items()))
    except ray.exceptions.RayTaskError as error:
        raise (error.cause if isinstance(error.cause, InputError) else error) from None
    except ray.exceptions.RayError as error:
        reason = f"a worker was lost more than {RETRIES} times over one shard ({first_line(error)})"
        raise InputError(f"data.ray: {reason}; short of memory? lower data.texts_per_shard") from error
    finally:
        ray.shutdown()


def devices(nodes: Sequence[dict[str, float]], config: Config) -> tuple[int, int]:
    """The number of workers, and the GPUs of each, from the resources of each node, as a worker stands on one; without
    GPUs, it has as many cores as its passes have threads. InputError where fewer than `data.workers` fit."""
    ours, gpus = config.data, config.data.gpus_per_worker
    kind, each = "GPU", gpus
    if config.pair.device == "cpu" or not any(node.get("GPU", 0) for node in nodes):
        gpus, kind = 0, "CPU"
        each = 1 if ours.workers else config.pair.threads or torch.get_num_threads()  # given workers may share cores
    most = sum(int(node.get(kind, 0) // each) for node in nodes)
    if most < (ours.workers or 1):
        found = sum(node.get(kind, 0) for node in nodes)
        raise InputError(f"data.workers: {ours.workers or 1} with {each} {kind} each; Ray has {found:g}")
    return ours.workers or most, gpus
