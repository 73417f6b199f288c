"""Stage `labels`: how good the labels are, and what they cost.

At every root, one after another in turn: its trajectory's roots labelled as the data stage does, the straightforward
procedure (`data_gen.procedure`), and a pool of supertrees labelled in several ways. From these: whether both procedures
agree, their speed at equal variance, how the error falls with cost, and what choosing a tree by its label loses.

Legend: R roots, S supertrees, P trees per action, V verifiers, A actions.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from data_gen.drafting import nodes_of
from data_gen.expected import expected_labels
from data_gen.labels import survivals
from data_gen.latency import device_name
from data_gen.models import ModelPair
from data_gen.procedure import label_action, passes
from data_gen.prompts import Prompt
from data_gen.sampling import Sampling
from data_gen.slots import Batch
from data_gen.traces import ROWS_VERSION
from data_gen.trajectories import TrajectoryLabeller, choose_roots, seed_of
from data_gen.trees import Supertree
from data_gen.verification.profile import Rows, invert
from pipelines import labels_results
from pipelines.config import Config
from pipelines.labels_results import EXPECTED, WAYS, Measured
from pipelines.pair import load_pair
from pipelines.prompts import prompts_digest, prompts_of
from pipelines.stage import Stage, console, mlflow_run, progress, write_json
from pipelines.units import Unit, decode, threads
from selector.actions import ActionSpace

SPLIT = "train"


def plan(config: Config) -> list[str]:
    ours = config.labels
    return [
        f"{ours.roots} roots: {ours.samples} trees for each of {len(ActionSpace.default())} actions, "
        f"{sum(map(passes, ActionSpace.default())):,} passes a root, beside {ours.pool} supertrees"
    ]


def run(config: Config) -> None:
    output = config.folder / "labels.json"
    pair = load_pair(config)
    name = device_name(config.pair.device, config.pair.dtype, config.pair.threads)
    depends = {
        "device": name,
        "pair": pair.fingerprint,
        "seed": config.seed,
        "verifiers": list(config.verifiers),
        "sampling": config.sampling[0].model_dump(),
        "labels": config.labels.model_dump(mode="json"),
        "rows_version": ROWS_VERSION,
        "data": config.data.model_dump(mode="json", exclude={"engine", "ray", "roots"}),
        "prompts": {"texts": prompts_digest(config, SPLIT), "tokens": config.prompts.tokens},
    }
    stage = Stage("labels", config, depends, (output,))
    if not stage.begin():
        return
    prompts = prompts_of(config, SPLIT, config.labels.roots)
    with mlflow_run(config, "labels") as mlflow, progress() as bar, threads(config.data.threads):
        task = bar.add_task("labelling roots both ways", total=config.labels.roots, note="")
        measured = Measured()
        for number in range(config.labels.roots):
            _measure_root(config, pair, prompts[number], number, measured)
            bar.advance(task)
        results: dict[str, Any] = {
            "device": name,
            "agreement": labels_results.agreement(config, measured),
            "speed": labels_results.speed(config, measured),
            "error": labels_results.errors(config, measured),
            "choice": labels_results.choices(measured, config.verifiers),
            "allocation": labels_results.allocation(measured.pool_RVSA[EXPECTED]),
            "labelling": [row for size in config.labels.vocabularies for row in wide(config, pair, size)],
        }
        stage.replace()
        write_json(output, results)
        figure = labels_results.plot(results["error"], output.with_suffix(".png"))
        for path in (output, figure):
            mlflow.log_artifact(str(path))
        for row in results["speed"]:
            mlflow.log_metric(f"labels/{row['verifier']}/speed_at_equal_variance", row["at equal variance"][0])
    stage.finish()
    for title in ("agreement", "speed", "error", "choice", "labelling"):
        console.print(labels_results.table(labels_results.TITLES[title], results[title]))
    gain = results["allocation"]
    stage.say(
        f"samples shared out by each root's true variance would lower the mean variance {gain['known']:.2f}-fold, by a "
        f"pilot of two samples {gain['pilot']:.2f}-fold"
    )
    stage.say(f"{output.resolve()}")


def _measure_root(config: Config, pair: ModelPair, prompt: Prompt, number: int, measured: Measured) -> None:
    sampling = config.sampling[0].build()
    decoded, tokens = decode(config, pair, Unit(prompt, sampling, config.verifiers[0]))
    seed = seed_of(config.seed, prompt.id, sampling, "labels")
    roots = choose_roots(tokens, decoded, config.data.roots_per_trajectory, config.data.stride, seed)
    tokens = tokens + decoded.tokens
    labeller = TrajectoryLabeller(pair, tokens, sampling, config.data.samples, config.verifiers, config.data.together)
    with _timed(measured.ours, len(roots)):
        labeller.labels([(root.length, seed + n) for n, root in enumerate(roots)])
    length = roots[number % len(roots)].length
    generator = torch.Generator().manual_seed(seed)
    with _timed(measured.theirs, 1):
        own = [
            label_action(labeller, length, action, config.labels.samples, config.verifiers, generator)
            for action in ActionSpace.default()
        ]
    measured.own_RVPA.append(torch.stack(own, dim=-1))
    parts: dict[str, list[Tensor]] = {way: [] for way in WAYS}
    for start in range(0, config.labels.pool, config.data.together):
        size = min(config.data.together, config.labels.pool - start)
        uniforms_SN = torch.rand(size, nodes_of(ActionSpace.default()), generator=generator, dtype=torch.float64)
        with _timed(measured.model_seconds, size):
            batch = labeller.supertrees([length] * size, uniforms_SN)
        for way in WAYS:
            parts[way].append(_labelled(batch, way, config.verifiers, measured.label_seconds.setdefault(way, {})))
    for way, tensors in parts.items():
        measured.pool_RVSA[way].append(torch.cat(tensors, dim=1))


@torch.inference_mode()
def _labelled(batch: Batch, way: str, verifiers: tuple[str, ...], seconds: dict[str, list[float]]) -> Tensor:
    """[V, S, A]; the verifiers timed one by one."""
    rows = []
    for name in verifiers:
        with _timed(seconds.setdefault(name, []), len(batch)):
            choosing = WAYS[way]
            labels = survivals(batch, [name]).sum(-1) if choosing is None else expected_labels(batch, [name], choosing)
            rows.append(labels[0].cpu())
    return torch.stack(rows)


class _timed:
    """Appends the seconds of its block, shared out over `count`."""

    def __init__(self, seconds: list[float], count: int) -> None:
        self.seconds, self.count = seconds, max(1, count)

    def __enter__(self) -> None:
        self._wait()
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self._wait()
        self.seconds.append((time.perf_counter() - self.start) / self.count)

    @staticmethod
    def _wait() -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()


@torch.inference_mode()
def wide(config: Config, pair: ModelPair, vocabulary: int) -> list[dict[str, Any]]:
    """Milliseconds of labelling per supertree on random rows of the sharpness of a language model's."""
    generator = torch.Generator().manual_seed(1)
    length = ActionSpace.default().max_L1 + ActionSpace.default().max_L2
    draft_TV, noise_TV = torch.randn(2, length + 1, vocabulary, generator=generator)
    q_TV, p_TV = (Sampling().probabilities(2.5 * draft_TV + c * noise_TV) for c in (0.0, 1.0))
    repeats = 4 if vocabulary < 1 << 15 else 1
    trees = [_random_tree(q_TV, generator) for _ in range(repeats)]
    depths_N = torch.cat([tree.depths_N for tree in trees])
    rows = Rows(p_TV[depths_N].to(pair.device), q_TV[depths_N].to(pair.device))
    offsets = [sum(map(len, trees[:n])) for n in range(len(trees))]
    batch = Batch(trees, rows, offsets)
    result = []
    for name in config.verifiers:
        seconds: list[float] = []
        for _ in range(4):
            with _timed(seconds, len(trees)):
                expected_labels(batch, [name])
        result.append({"vocabulary": vocabulary, "verifier": name, "ms per supertree": 1e3 * min(seconds)})
    return result


def _random_tree(q_TV: Tensor, generator: torch.Generator) -> Supertree:
    """Every token drawn from its depth's row."""

    def draw(start: int, count: int) -> list[int]:
        u_T1 = torch.rand(count, 1, generator=generator, dtype=torch.float64)
        return invert(q_TV[start : start + count], u_T1)[:, 0].tolist()

    space = ActionSpace.default()
    others = {L1: [draw(L1, space.max_L2) for _ in range(space.max_K - 1)] for L1 in range(space.max_L1 + 1)}
    return Supertree.from_paths(draw(0, space.max_L1 + space.max_L2), others)
