"""Stage `bench`: the times of verification on this machine, softmax over the vocabulary included.

Every verifier verifies the same (4, 0, 8) trees; `naive` and `block` also verify chains of 8, as does transformers'
`_speculative_sampling` on the same logits. The calls are interleaved, and times are medians.

Legend: L depths, N tree nodes, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.table import Column, Table
from torch import Tensor
from transformers.generation.utils import _speculative_sampling

from data_gen.models.pair import check_device
from data_gen.models.sampling import Sampling
from data_gen.timing import device_name
from data_gen.trees import DraftTree
from data_gen.verification import VERIFIERS, get_verifier
from data_gen.verification.distributions import Rows, sample
from pipelines.config import Config
from pipelines.run import Stage, console, progress, write_json
from pipelines.statistics import interval
from pipelines.tracking import mlflow_run

SECTIONS = ("pair", "sampling", "bench")

K, L = 4, 8  # branches of so many tokens
SLOW = 8  # khisti solves linear programs, and is timed in every eighth round only
RIVAL = "transformers, chain"
Call = Callable[[], object]


def plan(config: Config) -> list[str]:
    sizes = ", ".join(f"{size:,}" for size in config.bench.vocabularies)
    return [f"{len(VERIFIERS)} verifiers on (4, 0, 8) at V = {sizes}, {config.bench.repeats} times each, interleaved"]


def run(config: Config) -> None:
    output = config.folder / "bench.json"
    check_device(config.pair.device)
    device = config.pair.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    name = device_name(device, config.pair.dtype, config.pair.threads)
    stage = Stage("bench", config, {"device": name, "bench": config.bench.model_dump(mode="json")}, (output,))
    if config.pair.threads:
        torch.set_num_threads(config.pair.threads)
    with mlflow_run(config, "bench", SECTIONS) as mlflow, progress() as bar:
        task = bar.add_task("timing", total=len(config.bench.vocabularies) * config.bench.repeats, note="")
        rows = [
            row
            for vocabulary in config.bench.vocabularies
            for row in measure(vocabulary, config.bench.repeats, torch.device(device), lambda: bar.advance(task))
        ]
        stage.replace()
        write_json(output, {"device": name, "rows": rows})
        mlflow.log_artifact(str(output))
        for row in rows:
            mlflow.log_metric(f"milliseconds/{row['vocabulary']}/{row['what'].replace(', ', '_')}", row["milliseconds"])
    stage.finish()
    console.print(_table(name, rows))
    stage.say(f"{output.resolve()}")


def measure(vocabulary: int, repeats: int, device: torch.device, done: Callable[[], None]) -> list[dict[str, Any]]:
    """Median milliseconds of every call; for chains also the ratio to transformers' time."""
    generator = torch.Generator(device=device).manual_seed(1)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    seconds: dict[str, list[float]] = {}
    for repeat in range(-1, repeats):  # the first round warms up
        for name, call in _calls(vocabulary, generator).items():
            if name == "khisti" and repeat % SLOW:
                continue
            wait()
            start = time.perf_counter()
            call()
            wait()
            if repeat >= 0:
                seconds.setdefault(name, []).append(time.perf_counter() - start)
        if repeat >= 0:
            done()
    rng, rival, rows = np.random.default_rng(0), np.array(seconds[RIVAL]), []
    for name, mine in ((name, np.array(values)) for name, values in seconds.items()):
        row: dict[str, Any] = {"vocabulary": vocabulary, "what": name, "milliseconds": 1e3 * float(np.median(mine))}
        if name.endswith("chain"):
            picks = np.vstack([np.arange(len(mine)), rng.integers(len(mine), size=(2000, len(mine)))])
            ratio_B = np.median(mine[picks], axis=1) / np.median(rival[picks], axis=1)
            row |= {"ratio": float(ratio_B[0]), "interval_95": interval(ratio_B)}
        rows.append(row)
    return rows


def _calls(vocabulary: int, generator: torch.Generator) -> dict[str, Call]:
    """The calls of one round, all on the same random logits, about as peaked as a language model's."""
    device = generator.device
    draft_LV, noise_LV = (torch.randn(L + 1, vocabulary, generator=generator, device=device) for _ in range(2))
    draft_LV *= 2.5
    target_LV = draft_LV + 0.6 * noise_LV
    softmax = Sampling().probabilities
    q_LV = softmax(draft_LV)
    chain = DraftTree.from_paths(sample(q_LV[:L], 1, generator)[:, 0].tolist(), [[]])
    tree = DraftTree.from_paths([], sample(q_LV[:L], K, generator).T.tolist())
    # nodes of one depth have equal rows, on which the time does not depend
    tree_target_NV, tree_draft_NV = target_LV[tree.depths_N.to(device)], draft_LV[tree.depths_N.to(device)]

    def verify(name: str, tree: DraftTree, target_NV: Tensor, draft_NV: Tensor) -> Call:
        verifier = get_verifier(name)
        return lambda: verifier.verify(tree, softmax(target_NV), softmax(draft_NV), generator)

    candidates = torch.tensor([[0, *(chain.token(n) for n in range(1, L + 1))]], device=device)
    row = Rows(softmax(target_LV[:1]), q_LV[:1]).at(torch.zeros(1, dtype=torch.int64, device=device))
    return {
        RIVAL: lambda: _speculative_sampling(candidates, draft_LV[None, :L], L, target_LV[None]),
        "naive, chain": verify("naive", chain, target_LV, draft_LV),
        "block, chain": verify("block", chain, target_LV, draft_LV),
        **{name: verify(name, tree, tree_target_NV, tree_draft_NV) for name in VERIFIERS},
        "softmax of all rows": lambda: (softmax(tree_target_NV), softmax(tree_draft_NV)),
        "one pass over a row": lambda: row.excess(row.ones(), row.ones()),
        "one sort of a row": lambda: (row.rows.p_NV / row.rows.q_NV).sort(descending=True),
    }


def _table(device: str, rows: list[dict[str, Any]]) -> Table:
    sizes = dict.fromkeys(row["vocabulary"] for row in rows)
    columns = [Column(name, justify="right") for size in sizes for name in (f"V = {size:,}", "of transformers'")]
    title = f"Verification, softmax included, {device}: median milliseconds"
    result, cells = Table("", *columns, title=title, title_justify="left"), dict[str, list[str]]()
    for row in rows:
        ratio = "{:.2f} [{:.2f}, {:.2f}]".format(row["ratio"], *row["interval_95"]) if "ratio" in row else ""
        cells.setdefault(row["what"], []).extend([f"{row['milliseconds']:.3f}", ratio])
    for name, values in cells.items():
        result.add_row(name, *values)
    return result
