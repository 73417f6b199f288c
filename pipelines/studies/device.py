"""What a device makes of big pairs: passes beside the time of reading the weights, steps with and without waits.

    .venv/bin/python -m pipelines.studies.device --out device.json           # a GPU with 80 GB
    .venv/bin/python -m pipelines.studies.device --out device.json --tiny    # the same at tiny size, on a CPU

Qwen2.5-32B with 0.5B and Gemma-3-27B with 270M in bf16, from their configs, with random weights: times are real. For
each: passes over some numbers of tokens behind a context, as bytes of weights read per second and as a share of a
measured copy's bandwidth; and whole steps of fixed trees, eager and static (compiled passes, the step recorded as a
CUDA graph), beside the limit, which is the time in which a copy would move the weights that the step has to read: the
target's once, and the draft's for each of its passes. Writes one JSON file.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import Gemma3TextConfig, PreTrainedModel, Qwen2Config

from data_gen.decoding.decoder import Decoder, FixedTree
from data_gen.decoding.graph import GraphDecoder
from data_gen.decoding.loop import Loop
from data_gen.drafting.slots import layout_of
from data_gen.models.pair import ModelPair
from data_gen.models.preallocated import PreallocatedModel, run_window
from data_gen.models.sampling import Sampling
from data_gen.timing import device_name
from data_gen.verification import get_verifier
from pipelines.run import console, write_json
from selector.actions import Action

WIDTHS = (1, 2, 4, 8, 16, 32)
TREES = ((Action(1, 5, 0), "traversal"), (Action(2, 2, 4), "traversal"), (Action(4, 0, 8), "specinfer"))
REPEATS, STEPS = 20, 30
CONTEXT, COPIED = 1024, 1 << 30
PAIRS: dict[str, tuple[Any, dict[str, int], dict[str, int]]] = {
    "Qwen2.5-32B and 0.5B": (
        Qwen2Config,
        {"hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40, "intermediate_size": 27648},
        {"hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14, "intermediate_size": 4864},
    ),
    "Gemma-3-27B and 270M": (
        Gemma3TextConfig,
        {"hidden_size": 5376, "num_hidden_layers": 62, "num_attention_heads": 32, "intermediate_size": 21504},
        {"hidden_size": 640, "num_hidden_layers": 18, "num_attention_heads": 4, "intermediate_size": 2048},
    ),
}
REST: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2.5-32B and 0.5B": (
        {"num_key_value_heads": 8, "vocab_size": 152064, "tie_word_embeddings": False},
        {"num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True},
    ),
    "Gemma-3-27B and 270M": (
        {"num_key_value_heads": 16, "head_dim": 128, "vocab_size": 262208, "sliding_window": 1024},
        {"num_key_value_heads": 1, "head_dim": 256, "vocab_size": 262144, "sliding_window": 512},
    ),
}
TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
TINIER = {"intermediate_size": 96, "head_dim": 16, "vocab_size": 512}


def main() -> None:
    parser = ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = "float32" if asked.tiny else "bfloat16"
    bandwidth = copied_per_second(device)
    found: dict[str, Any] = {
        "device": device_name(str(device), dtype, None),
        "torch": torch.__version__,
        "copy_gigabytes_per_second": bandwidth / 1e9,
        "pairs": [],
    }
    for name in PAIRS:
        with console.status(name), tempfile.TemporaryDirectory() as folder:
            pair = made(name, Path(folder), device, dtype, asked.tiny)
            found["pairs"].append({"pair": name, **measured(pair, bandwidth, 64 if asked.tiny else CONTEXT)})
        write_json(asked.out, found)  # what is there is kept if the next one fails
    console.print_json(json.dumps(found))


def made(name: str, folder: Path, device: torch.device, dtype: str, tiny: bool) -> ModelPair:
    """The pair with random weights."""
    kind, *shapes = PAIRS[name]
    names = []
    for role, shape, rest in zip(("target", "draft"), shapes, REST[name], strict=True):
        values = {**shape, **rest, **(TINY | TINIER if tiny else {})}
        kind(max_position_embeddings=4 * CONTEXT, architectures=[_class_of(kind)], **values).save_pretrained(
            folder / role
        )
        names.append(str(folder / role))
    return ModelPair.load(names[0], names[1], str(device), dtype, shapes=True)


def _class_of(kind: Any) -> str:
    return "Qwen2ForCausalLM" if kind is Qwen2Config else "Gemma3ForCausalLM"


def measured(pair: ModelPair, bandwidth: float, context: int) -> dict[str, Any]:
    """Passes of both models, and steps."""
    weights = {role: bytes_read(model) for role, model in (("target", pair.target), ("draft", pair.draft))}
    text = torch.randint(min(256, pair.vocabulary), (context,), generator=torch.Generator().manual_seed(0)).tolist()
    return {
        "weight_gigabytes": {role: size / 1e9 for role, size in weights.items()},
        "passes": [
            passes(model, role, text, weights[role], bandwidth)
            for role, model in (("target", pair.target), ("draft", pair.draft))
        ],
        "steps": [steps(pair, action, verifier, text, weights, bandwidth) for action, verifier in TREES],
    }


def bytes_read(model: PreTrainedModel) -> int:
    """Of weights, in a pass: all but an embedding of its own, of which a pass reads single rows."""
    whole = sum(weights.nbytes for weights in model.parameters())  # a tied one counts once
    embedding: Any = model.get_input_embeddings().weight
    return whole if embedding is model.get_output_embeddings().weight else whole - embedding.nbytes


def passes(model: PreTrainedModel, role: str, text: list[int], weights: int, bandwidth: float) -> dict[str, Any]:
    """Median seconds of a compiled pass by width, and the share of the copy's bandwidth at which it reads weights."""
    static = PreallocatedModel(model, len(text) + 2 * max(WIDTHS), max(WIDTHS), compiled=True)
    device = model.device
    text_T = torch.tensor(text, device=device)
    static.fill(text_T)
    base = torch.tensor(len(text), device=device)
    rows = []
    for width in WIDTHS:
        over, tokens_W = run_window(width, max(WIDTHS), device), text_T[:width]
        seconds = median_seconds(lambda: static.forward(tokens_W, base, over), device)  # noqa: B023
        rows.append({"tokens": width, "seconds": seconds, "of_copy": weights / seconds / bandwidth})
    return {"model": role, "widths": rows}


def steps(
    pair: ModelPair, action: Action, verifier: str, text: list[int], weights: dict[str, int], bandwidth: float
) -> dict[str, Any]:
    """Median seconds of a step, eager and static, beside the limit."""
    arguments = pair, Sampling(1.0), get_verifier(verifier), FixedTree(action)
    longest = len(text) + 3 * STEPS * (action.nodes + 1)
    seconds = {
        "eager": step_seconds(Decoder(*arguments), text),
        "static": step_seconds(GraphDecoder(*arguments, longest, compiled=True), text),
    }
    drafted = layout_of(action, pair.device).depth
    limit = (weights["target"] + drafted * weights["draft"]) / bandwidth
    return {
        "tree": str(action),
        "verifier": verifier,
        "seconds": seconds,
        "limit_seconds": limit,
        "static_over_limit": seconds["static"] / limit,
    }


@torch.inference_mode()
def median_seconds(work: Callable[[], object], device: torch.device) -> float:
    return statistics.median(_times(work, device, warm=3, count=REPEATS))


def step_seconds(decoder: Loop, text: list[int]) -> float:
    """Of a step, once graphs are compiled and recorded."""
    running = decoder.steps(text, torch.Generator(device=decoder.pair.device).manual_seed(0))
    return statistics.median(_times(lambda: next(running), decoder.pair.device, warm=6, count=STEPS))


def _times(work: Callable[[], object], device: torch.device, warm: int, count: int) -> list[float]:
    times = []
    for repeat in range(-warm, count):
        _wait(device)
        begin = time.perf_counter()
        work()
        _wait(device)
        if repeat >= 0:
            times.append(time.perf_counter() - begin)
    return times


def copied_per_second(device: torch.device) -> float:
    """Bytes that a copy within the device's memory reads and writes per second, both counted; passes are held to it."""
    size = COPIED if device.type == "cuda" else COPIED >> 3
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / median_seconds(lambda: target.copy_(source), device)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
