"""Measures on a GPU how near passes and decoding steps of large pairs come to the memory bandwidth; writes JSON.

    .venv/bin/python -m pipelines.studies.device device.json           # a GPU with 80 GB
    .venv/bin/python -m pipelines.studies.device device.json --tiny    # the same at tiny size, on a CPU

The pairs have random weights, which does not change their times. A pass is compared with a copy of the weights that
it reads; a decoding step, eager and static (a CUDA graph), with copies of those that all its passes read.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Gemma3TextConfig, PreTrainedModel, Qwen2Config

from data_gen.decoding.decoder import Decoder
from data_gen.decoding.graph import GraphDecoder
from data_gen.decoding.loop import FixedTree, Loop
from data_gen.models.pair import ModelPair
from data_gen.models.preallocated import PreallocatedModel, run_window
from data_gen.models.sampling import Sampling
from data_gen.slots import layout_of
from data_gen.timing import device_name
from data_gen.verification import get_verifier
from pipelines.run import console, write_json
from selector.actions import Action

WIDTHS = (1, 2, 4, 8, 16, 32)
TREES = ((Action(1, 5, 0), "traversal"), (Action(2, 2, 4), "traversal"), (Action(4, 0, 8), "specinfer"))
REPEATS, STEPS, CONTEXT = 20, 30, 1024
QWEN, GEMMA = "Qwen2.5-32B and 0.5B", "Gemma-3-27B and 270M"
PAIRS: dict[str, tuple[Any, str]] = {
    QWEN: (Qwen2Config, "Qwen2ForCausalLM"),
    GEMMA: (Gemma3TextConfig, "Gemma3ForCausalLM"),
}
SIZES = ("hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size")
KEYS = (*SIZES, "vocab_size")
SHAPES: dict[tuple[str, str], tuple[tuple[int, ...], dict[str, Any]]] = {
    (QWEN, "target"): ((5120, 64, 40, 8, 27648, 152064), {"tie_word_embeddings": False}),
    (QWEN, "draft"): ((896, 24, 14, 2, 4864, 151936), {"tie_word_embeddings": True}),
    (GEMMA, "target"): ((5376, 62, 32, 16, 21504, 262208), {"head_dim": 128, "sliding_window": 1024}),
    (GEMMA, "draft"): ((640, 18, 4, 1, 2048, 262144), {"head_dim": 256, "sliding_window": 512}),
}
TINY = dict(zip(KEYS, (64, 2, 4, 2, 96, 512), strict=True)) | {"head_dim": 16}


def main(file: str, tiny: bool) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype, context = ("float32", 64) if tiny else ("bfloat16", CONTEXT)
    source = torch.zeros(1 << (30 if device.type == "cuda" else 27), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    bandwidth = 2 * len(source) / median_seconds(lambda: target.copy_(source), device)  # read and written
    found: dict[str, Any] = {"device": device_name(str(device), dtype, None), "torch": torch.__version__}
    found |= {"copy_gigabytes_per_second": bandwidth / 1e9, "pairs": []}
    for name, (kind, architecture) in PAIRS.items():
        with console.status(name), tempfile.TemporaryDirectory() as folder:
            for role in ("target", "draft"):
                sizes, others = SHAPES[name, role]
                values = {**dict(zip(KEYS, sizes, strict=True)), **others, **(TINY if tiny else {})}
                config = kind(max_position_embeddings=4 * CONTEXT, architectures=[architecture], **values)
                config.save_pretrained(f"{folder}/{role}")
            pair = ModelPair.load(f"{folder}/target", f"{folder}/draft", str(device), dtype, shapes=True)
            found["pairs"].append({"pair": name, **measured(pair, bandwidth, context)})
        write_json(Path(file), found)  # earlier pairs are kept if the next one fails
    console.print_json(data=found)


def measured(pair: ModelPair, bandwidth: float, context: int) -> dict[str, Any]:
    """Median seconds of passes by width, and of steps with some trees, behind a context of random tokens."""
    models = {"target": pair.target, "draft": pair.draft}
    size = {role: bytes_read(model) for role, model in models.items()}
    text_T = torch.randint(min(256, pair.vocabulary), (context,), generator=torch.Generator().manual_seed(0))
    passes, steps = [], []
    for role, model in models.items():
        seconds = pass_seconds(model, text_T.to(model.device))
        widths = [{"tokens": w, "seconds": s, "of_copy": size[role] / s / bandwidth} for w, s in seconds.items()]
        passes.append({"model": role, "widths": widths})
    for action, verifier in TREES:
        arguments = pair, Sampling(1.0), get_verifier(verifier), FixedTree(action)
        static = GraphDecoder(*arguments, context + 3 * STEPS * (action.nodes + 1), compiled=True)
        own = {name: step_seconds(d, text_T) for name, d in (("eager", Decoder(*arguments)), ("static", static))}
        limit = (size["target"] + layout_of(action, pair.device).depth * size["draft"]) / bandwidth
        row = {"tree": str(action), "verifier": verifier, "seconds": own, "limit_seconds": limit}
        steps.append({**row, "static_over_limit": own["static"] / limit})
    return {"weight_gigabytes": {role: own / 1e9 for role, own in size.items()}, "passes": passes, "steps": steps}


def bytes_read(model: PreTrainedModel) -> int:
    """Bytes of the weights that a pass reads: of an embedding that is not tied, it reads only single rows."""
    embedding: Any = model.get_input_embeddings().weight
    tied = embedding is model.get_output_embeddings().weight
    return sum(weights.nbytes for weights in model.parameters()) - (0 if tied else embedding.nbytes)


@torch.inference_mode()
def pass_seconds(model: PreTrainedModel, text_T: torch.Tensor) -> dict[int, float]:
    """Of a compiled pass, by the number of its tokens."""
    static = PreallocatedModel(model, len(text_T) + 2 * max(WIDTHS), max(WIDTHS), compiled=True)
    static.fill(text_T)
    base, found = torch.tensor(len(text_T), device=model.device), {}
    for width in WIDTHS:
        given = text_T[:width], base, run_window(width, max(WIDTHS), model.device)
        found[width] = median_seconds(lambda: static.forward(*given), model.device)  # noqa: B023
    return found


def step_seconds(decoder: Loop, text_T: torch.Tensor) -> float:
    running = decoder.steps(text_T.tolist(), torch.Generator(device=decoder.pair.device).manual_seed(0))
    return median_seconds(lambda: next(running), decoder.pair.device, warm=6, count=STEPS)


def median_seconds(work: Callable[[], object], device: torch.device, warm: int = 3, count: int = REPEATS) -> float:
    """The median time of some calls after the first ones, in which graphs are compiled and recorded."""

    def now() -> float:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    times = []
    for _ in range(warm + count):
        begin = now()
        work()
        times.append(now() - begin)
    return statistics.median(times[warm:])


if __name__ == "__main__":
    main(sys.argv[1], "--tiny" in sys.argv)
