"""What the data stage needs of a device's memory at its peak, from the models' configs alone: for `--plan`.

Weights stay; writing and labelling take turns. With B texts written at once, prompts of P tokens, texts of T, d bytes a
number, and a model's layers l, hidden width h, width of the feed-forward layers i, and c numbers of its cache a token:

    weights    d (parameters of target and draft)
    writing    the larger of the prompts' pass and the last step's:
               B P (c d + max(3 i + 2 h, 7 h + P) d + P)      all prompts' tokens at once, and their mask
               B T c d (1 + 1 / 2l) + B V s                   a layer's cache while it grows; s for what filters logits
    labelling  T d (c of target and draft) + V (R (2 d + 8) + 8 (R + 14) + (R + 7) (40 + 4 r))
               R rows of both models, the same joined to the last 7 of the block before, and what they are sorted into;
               r is the next power of two above V, over V. Of texts of one block nothing is joined

Not counted: what a device's driver and its allocator keep, and verifiers that look at whole rows in every walk.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cache
from typing import Any, NamedTuple

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, PreTrainedModel

from data_gen.models import DTYPES
from data_gen.text_labels import block_rows
from pipelines.config import Config
from pipelines.data.shards import BEYOND
from pipelines.pair import language_model
from pipelines.pair.loading import pair_names
from selector.actions import ActionSpace
from selector.schema import InputError

FILTERED, PLAIN = 42, 20  # bytes for each logit of a step of `generate`, with top-k or a nucleus, and without
LOOK_BACK = ActionSpace.default().max_L2 - 1  # rows of a block at which branches that began earlier still stand


class Shape(NamedTuple):
    """What memory depends on: numbers, not bytes."""

    parameters: int
    layers: int
    hidden: int
    intermediate: int
    cached: int  # for each token
    vocabulary: int


@dataclass(frozen=True)
class Memory:
    """Bytes."""

    weights: int
    writing: int
    labelling: int

    @property
    def peak(self) -> int:
        return self.weights + max(self.writing, self.labelling)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in asdict(self).items())
        return f"{self.peak / 1e9:.2f} GB of device memory at the peak ({parts})"


def line(config: Config) -> str:
    """The need and what there is, in words.

    Raises:
        InputError: it does not fit; names the key to change.
    """
    try:
        needed = memory(config)
    except InputError as error:
        return f"device memory is not known: {error}"
    there = capacity(config)
    if needed.peak > there:
        raise InputError(f"{_to_change(config, needed, there)}: {needed}; there are {there / 1e9:.2f} GB")
    return f"{needed}, of {there / 1e9:.2f}"


def memory(config: Config) -> Memory:
    """At the peak of the data stage; InputError where a model's config cannot be read."""
    target, draft = shapes(config)
    size = DTYPES[config.pair.dtype].itemsize
    texts, prompt, new = config.data.texts_per_shard, config.prompts.tokens, config.data.tokens + BEYOND
    V = max(target.vocabulary, draft.vocabulary)
    wide = max(3 * target.intermediate + 2 * target.hidden, 7 * target.hidden + prompt)
    prompts = texts * prompt * (size * (target.cached + wide) + prompt)
    filtered = any(not setting.build().cuts_nothing for setting in config.sampling)
    growing = texts * (prompt + new) * target.cached * size * (1 + 1 / (2 * target.layers))
    step = growing + texts * V * (FILTERED if filtered else PLAIN)
    rows = min(new, block_rows(V))
    behind = LOOK_BACK if new > rows else 0
    joined = 8 * (rows + 2 * behind) if behind else 0
    sums = V * (joined + (rows + behind) * (40 + 4 * (1 << V.bit_length()) / V))
    caches = (prompt + new) * size * (target.cached + draft.cached)
    labelling = caches + sums + V * rows * (2 * size + 8)
    return Memory(size * (target.parameters + draft.parameters), int(max(prompts, step)), int(labelling))


def shapes(config: Config) -> tuple[Shape, Shape]:
    """Of target and draft."""
    if config.pair.target == "embedded":
        own, embedded = (config.pair.embedded.target, config.pair.embedded.draft), config.pair.embedded
        with torch.device("meta"):
            models = [language_model.build_model(shape, embedded.vocabulary, 0, config.seed, embedded) for shape in own]
        return _shape(models[0]), _shape(models[1])
    target, draft = pair_names(config)
    return _named(target, "target"), _named(draft, "draft")


@cache
def _named(name: str, role: str) -> Shape:
    try:
        with torch.device("meta"):
            return _shape(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(name)))
    except Exception as error:  # whatever a damaged config makes the library raise
        raise InputError(f"pair.{role}: cannot read the config of {name}") from error


def _shape(model: PreTrainedModel) -> Shape:
    """Of a model without weights: one token is passed to see what its cache holds."""
    text = model.config.get_text_config()
    kept: Any = DynamicCache()
    with torch.device("meta"):
        model(torch.zeros(1, 1, dtype=torch.int64), past_key_values=kept, use_cache=True)
    layers = [layer for layer in kept.layers if layer.is_initialized]
    cached = sum(layer.keys.numel() + layer.values.numel() for layer in layers)
    head = model.get_output_embeddings()
    return Shape(
        model.num_parameters(), len(layers), text.hidden_size, text.intermediate_size, cached, head.weight.shape[0]
    )


def capacity(config: Config) -> int:
    """Bytes of the configured device, of all GPUs where the target is spread over them."""
    device = config.pair.device
    if device == "cpu" or not torch.cuda.is_available():
        return int(psutil.virtual_memory().total)
    count = torch.cuda.device_count()
    places = range(count) if config.pair.device_map else [torch.device("cuda" if device == "auto" else device)]
    return sum(torch.cuda.get_device_properties(place).total_memory for place in places)


def _to_change(config: Config, needed: Memory, there: int) -> str:
    """The key that brings the most."""
    if needed.weights + needed.labelling > there:
        if config.pair.dtype == "float32":
            return "pair.dtype"
        return "pair.device_map" if config.pair.device_map is None and torch.cuda.device_count() > 1 else "pair.target"
    return "data.texts_per_shard" if config.data.texts_per_shard > 1 else "prompts.tokens"
