"""Step times of pairs of real sizes on this GPU, without their weights: a CSV file for each pair
(`make gpu`).

    .venv/bin/python docs/examples/engines/clocks.py runs/gpu

Weights are random, but a pass takes as long with them. All requests of a batch have contexts of one
length, every pass is a CUDA graph, and attention reads each cached key once, as an engine's does. A
file that exists is not made again.

Legend: B requests, W tokens of a pass, H heads, D head width, C cached rows, V vocabulary.
"""

from __future__ import annotations

import re
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.cache_utils import Cache, StaticLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from data_gen.models.masks import FULL, SLIDING
from pipelines.latency.timings import Row
from selector.files import atomically

BATCHES = (1, 8, 32)
CONTEXTS = (512, 2048)
VERIFIED = (1, 2, 4, 8, 16, 32)
REPEATS = 15  # timed passes of each size, of which the median counts
LLAMA = {"model_type": "llama", "vocab_size": 128256, "num_key_value_heads": 8}
# target and draft, from their public configs
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama3.1-8b_llama3.2-1b": (
        {
            **LLAMA,
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
        },
        {
            **LLAMA,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 16,
            "num_attention_heads": 32,
            "tie_word_embeddings": True,
        },
    ),
    "qwen2.5-32b_qwen2.5-0.5b": (
        {
            "model_type": "qwen2",
            "vocab_size": 152064,
            "hidden_size": 5120,
            "intermediate_size": 27648,
            "num_hidden_layers": 64,
            "num_attention_heads": 40,
            "num_key_value_heads": 8,
        },
        {
            "model_type": "qwen2",
            "vocab_size": 151936,
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3-27b_gemma3-270m": (
        {
            "model_type": "gemma3_text",
            "vocab_size": 262208,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "num_hidden_layers": 62,
            "num_attention_heads": 32,
            "num_key_value_heads": 16,
            "head_dim": 128,
            "sliding_window": 1024,
            "query_pre_attn_scalar": 168,
        },
        {
            "model_type": "gemma3_text",
            "vocab_size": 262144,
            "hidden_size": 640,
            "intermediate_size": 2048,
            "num_hidden_layers": 18,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
        },
    ),
}


def packed(
    module: torch.nn.Module,
    query_BHWD: Tensor,
    key: Tensor,
    value: Tensor,
    mask: object,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention of W tokens to the whole cache, or its window, without a mask: the heads that share
    keys are one."""
    if window := kwargs.get("sliding_window"):
        key, value = key[:, :, -window:], value[:, :, -window:]
    shared = query_BHWD.reshape(len(query_BHWD), key.shape[1], -1, query_BHWD.shape[-1])
    attended = scaled_dot_product_attention(shared, key, value, scale=kwargs["scaling"])
    return attended.view_as(query_BHWD).transpose(1, 2).contiguous(), None


class _Layer(StaticLayer):
    """A full cache, of which every pass overwrites the last rows."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.keys = self._filled(key_states)
            self.values = self._filled(value_states)
            self.is_initialized = True
        assert self.keys is not None and self.values is not None
        self.keys[:, :, -key_states.shape[2] :] = key_states
        self.values[:, :, -value_states.shape[2] :] = value_states
        return self.keys, self.values

    def _filled(self, states: Tensor) -> Tensor:
        batch, heads, _, width = states.shape
        return states.new_empty(batch, heads, self.max_cache_len, width).normal_()


def model_of(config: dict[str, Any], device: str, dtype: torch.dtype) -> PreTrainedModel:
    ALL_ATTENTION_FUNCTIONS.register(packed.__name__, packed)
    model_config = AutoConfig.for_model(**config, max_position_embeddings=8192)
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(
            model_config, dtype=dtype, attn_implementation=packed.__name__
        )
    return model.eval()


def pass_of(model: PreTrainedModel, batch: int, context: int, width: int) -> Callable[[], Tensor]:
    """A pass over so many new tokens of each request behind `context` cached ones, with a draw
    after each of them."""
    device = model.device
    layers = range(model.config.num_hidden_layers)
    cache = Cache(layers=[_Layer(max_cache_len=context + width) for _ in layers])
    tokens_BW = torch.randint(model.config.vocab_size, (batch, width), device=device)
    positions = torch.arange(context, context + width, device=device).unsqueeze(0)
    # for its shape alone
    mask: Any = torch.zeros(1, 1, width, context + width, dtype=model.dtype, device=device)
    if SLIDING in (getattr(model.config, "layer_types", None) or ()):
        mask = {FULL: mask, SLIDING: mask}

    def run() -> Tensor:
        logits_BWV = model(
            tokens_BW, attention_mask=mask, position_ids=positions, past_key_values=cache
        ).logits
        probs_BWV = logits_BWV.float().softmax(-1)
        return (probs_BWV / torch.empty_like(probs_BWV).exponential_()).argmax(-1)

    return run


def seconds_of(run: Callable[[], Tensor]) -> float:
    """The median time of some work: on a GPU, of its graph."""
    work: Callable[[], object] = run
    for _ in range(2):
        run()
    if torch.cuda.is_available():
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        work = graph.replay
    taken = []
    for _ in range(3 + REPEATS):
        begin = time.perf_counter()
        work()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    return statistics.median(taken[3:])


@torch.inference_mode()
def rows_of(
    target: dict[str, Any], draft: dict[str, Any], device: str, dtype: torch.dtype
) -> Iterator[Row]:
    """The steps of a pair: passes of the target over so many tokens of each request, and one of the
    draft."""
    for config, widths, drafts in ((target, VERIFIED, False), (draft, (1,), True)):
        model = model_of(config, device, dtype)
        for batch, context, width in product(BATCHES, CONTEXTS, widths):
            try:
                seconds = seconds_of(pass_of(model, batch, context, width))
            except torch.OutOfMemoryError:
                continue  # so large a batch does not fit
            verified, passes = (0, 1) if drafts else (width, 0)
            yield Row(
                batch=batch, context=context, verified=verified, passes=passes, seconds=seconds
            )
        del model
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main(folder: Path, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> None:
    card = device
    if device == "cuda":
        names = re.findall(r"[A-Z]+\d+", torch.cuda.get_device_name())
        card = (names or [device])[0].lower()
    for name, (target, draft) in PAIRS.items():
        path = folder / f"{card}_{name}.csv"
        if path.exists():
            continue
        steps = pd.DataFrame([row.model_dump() for row in rows_of(target, draft, device, dtype)])
        sizes = steps.groupby(["batch", "context"])["verified"].transform("nunique")
        whole = steps[sizes == 1 + len(VERIFIED)]  # with the draft's pass, and none out of memory
        with atomically(path) as partial:
            whole.to_csv(partial, index=False, float_format="%.7f")
        print(f"{path}: {len(whole)} steps", flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
