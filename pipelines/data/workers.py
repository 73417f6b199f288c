"""Who makes the shards of the `data` stage: this process, or Ray actors on one machine or many.

Both yield the same shards, byte for byte on CPUs; only the order may differ. The driver alone writes to the store.
"""

from __future__ import annotations

import os
import socket
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from data_gen.models import ModelPair
from pipelines.config import Config
from pipelines.data.shards import Shard, Work, make_shard
from pipelines.pair.loading import load_pair
from selector.schema import InputError

START_SECONDS = 900  # for a worker to be placed and to load its pair


def local(config: Config, pair: ModelPair, work: dict[str, Work]) -> Iterator[tuple[str, Shard]]:
    """One shard after another, in this process."""
    for name, todo in work.items():
        yield name, make_shard(config, pair, todo)


class Worker:
    """What a Ray actor runs. It holds one pair."""

    def start(self, config: Config, fingerprint: str, folder: str, threads: int) -> None:
        """Load the pair as the driver did.

        Raises:
            InputError: it is not there, or another one.
        """
        here = socket.gethostname()
        if not Path(folder).is_dir():
            raise InputError(f"{folder} does not exist on {here}: workers need the driver's folder, on a shared disk")
        os.chdir(folder)
        torch.set_num_threads(threads)
        self.config, self.pair = config, load_pair(config)
        if self.pair.fingerprint != fingerprint:
            raise InputError(f"the pair on {here} is another than the driver's")

    def make(self, todo: Work) -> Shard:
        return make_shard(self.config, self.pair, todo)


def ray(config: Config, fingerprint: str, work: dict[str, Work]) -> Iterator[tuple[str, Shard]]:
    """Shards as they are finished, by one actor per device; what a lost actor held is given to another.

    Args:
        fingerprint: of the driver's pair.

    Raises:
        InputError: Ray is not installed, or has not the devices asked for; a shard lost its worker time and again.
    """
    try:
        import ray as engine
    except ImportError as error:
        raise InputError("data.engine: ray is not installed: pip install 'espalier[ray]'") from error
    if ":" in config.pair.device:
        raise InputError(f"pair.device: {config.pair.device}: Ray gives every worker devices of its own; say cuda")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    address = config.data.ray.address
    settings: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        settings |= {"address": "local", "include_dashboard": False, "object_store_memory": 512 << 20}
    else:
        settings["address"] = address
    try:
        engine.init(**settings)
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise InputError(f"data.ray.address: {address}: {str(error).splitlines()[0]}") from error
    try:
        yield from Pool(engine, config, fingerprint).shards(work)
    finally:
        engine.shutdown()


class Pool:
    """Actors, and what they are at: they start, make a shard, or wait for one."""

    def __init__(self, engine: Any, config: Config, fingerprint: str) -> None:
        self.engine, self.config = engine, config
        self.count, gpus = devices([node["Resources"] for node in engine.nodes() if node["Alive"]], config)
        self.actor = engine.remote(num_cpus=0 if gpus else 1, num_gpus=gpus, max_restarts=0)(Worker)
        self.arguments = config, fingerprint, str(Path.cwd()), torch.get_num_threads()
        self.pending: dict[Any, tuple[str | None, Any]] = {}  # by future: the shard (None: it starts) and the worker

    def shards(self, work: dict[str, Work]) -> Iterator[tuple[str, Shard]]:
        waiting = deque(work)
        losses: Counter[str | None] = Counter()
        idle: list[Any] = []
        for _ in range(min(self.count, len(work))):
            self._start()
        while waiting or any(name is not None for name, _ in self.pending.values()):
            while waiting and idle:
                worker = idle.pop()
                name = waiting.popleft()
                self.pending[worker.make.remote(work[name])] = name, worker
            future = self._next()
            made, worker = self.pending.pop(future)
            try:
                result = self._result(future)
            except self.engine.exceptions.RayError as error:  # the actor, its node, or what it had made
                losses[made] += 1
                if losses[made] > self.config.data.ray.retries:
                    raise InputError(_lost(made, losses[made], error)) from error
                if made is not None:
                    waiting.appendleft(made)
                self._start()
                continue
            idle.append(worker)
            if made is not None:
                yield made, result

    def _start(self) -> None:
        worker = self.actor.remote()
        self.pending[worker.start.remote(*self.arguments)] = None, worker

    def _next(self) -> Any:
        """The next finished call. InputError where no worker has been placed in good time."""
        only_starts = all(name is None for name, _ in self.pending.values())
        ready, _ = self.engine.wait(list(self.pending), num_returns=1, timeout=START_SECONDS if only_starts else None)
        if not ready:
            raise InputError(
                f"data.ray.workers: Ray has placed none of {len(self.pending)} workers in {START_SECONDS} seconds: "
                f"are its devices taken?"
            )
        return ready[0]

    def _result(self, future: Any) -> Any:
        try:
            return self.engine.get(future)
        except self.engine.exceptions.RayTaskError as error:
            raise (error.cause if isinstance(error.cause, InputError) else error) from None


def _lost(name: str | None, times: int, error: Exception) -> str:
    reason = str(error).strip().splitlines()[0]
    if name is None:
        return f"data.engine: a Ray worker could not be started, {times} times: {reason}"
    return f"{name}: its worker was lost {times} times ({reason}); short of memory? lower data.texts_per_shard"


def devices(nodes: Sequence[dict[str, float]], config: Config) -> tuple[int, int]:
    """How many workers, and GPUs for each; without GPUs, one worker for as many cores as its passes take threads.

    Args:
        nodes: the resources of each node; a worker's devices stand in one of them.

    Raises:
        InputError: fewer than `data.ray.workers` fit.
    """
    ours = config.data.ray
    on_gpu = config.pair.device == "cuda" or (config.pair.device == "auto" and any(n.get("GPU", 0) for n in nodes))
    if on_gpu:
        kind, each = "GPU", ours.gpus_per_worker
    else:  # a given number of workers may share the cores
        threads = max(config.pair.threads or 0, config.data.threads or 0) or torch.get_num_threads()
        kind, each = "CPU", 1 if ours.workers else threads
    most = sum(int(node.get(kind, 0) // each) for node in nodes)
    if not on_gpu and not ours.workers:
        most = max(1, most)
    if most < (ours.workers or 1):
        found = sum(node.get(kind, 0) for node in nodes)
        raise InputError(f"data.ray.workers: {ours.workers or 1} with {each} {kind} each; Ray has {found:g}")
    return ours.workers or most, each if on_gpu else 0
