"""How long a model's matrices take on this machine: as torch multiplies them, and prepacked."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from copy import deepcopy

import torch
from torch import Tensor
from torch.nn import Module
from transformers import PreTrainedModel

from data_gen.models.prepack import PrepackedLinear, computes_in_bfloat16

MATRIX_ROWS = (1, 2, 4, 8, 16, 32)  # rows of the timed matrices
MATRIX_TIMES = 5  # how often each is timed
MOST_TIMED = 250_000_000  # elements of these, about: far more than a processor's caches hold


@torch.inference_mode()
def matrix_seconds(model: PreTrainedModel) -> list[dict[str, float]]:
    """Seconds that a model's prepacked layers take for some numbers of rows, each layer once: as
    plain layers (`linear`), prepacked, and prepacked in bfloat16 where the processor has it;
    medians, in turn. Of a large model the first layers alone are timed. Empty where no layer is
    prepacked.
    """
    layers: list[PrepackedLinear] = []
    elements = 0
    for layer in model.modules():
        if isinstance(layer, PrepackedLinear) and elements < MOST_TIMED:
            layers.append(layer)
            elements += layer.in_features * layer.out_features
    if not layers:
        return []
    dtype = layers[0].dtype
    plain = [layer.plain() for layer in layers]
    kinds: dict[str, tuple[Sequence[Module], torch.dtype]] = {
        "linear": (plain, dtype),
        "prepacked": (layers, dtype),
    }
    if dtype != torch.bfloat16 and computes_in_bfloat16():
        kinds["prepacked, bfloat16"] = (
            [PrepackedLinear(deepcopy(layer).bfloat16(), is_tied=False) for layer in plain],
            torch.bfloat16,
        )
    measurements = []
    for rows in MATRIX_ROWS:
        taken: dict[str, list[float]] = {name: [] for name in kinds}
        for _ in range(MATRIX_TIMES):
            for name, (modules, input_dtype) in kinds.items():
                taken[name].append(_pass_seconds(layers, modules, rows, input_dtype))
        measurement: dict[str, float] = {"rows": rows}
        for name, seconds in taken.items():
            measurement[name] = statistics.median(seconds)
        measurements.append(measurement)
    return measurements


def _pass_seconds(
    layers: Sequence[PrepackedLinear], modules: Sequence[Module], rows: int, dtype: torch.dtype
) -> float:
    """Seconds of one pass of random rows through `modules`, which stand for `layers`."""
    inputs: dict[int, Tensor] = {}  # by width
    for layer in layers:
        inputs[layer.in_features] = torch.randn(rows, layer.in_features, dtype=dtype)
    start = time.perf_counter()
    for layer, module in zip(layers, modules, strict=True):
        module(inputs[layer.in_features])
    return time.perf_counter() - start
