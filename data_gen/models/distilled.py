"""A draft that `espalier distil` made: some of the target's layers, and its output layer over a
part of the vocabulary.

The embeddings and the output layer's rows are the target's own and are not stored. Tokens that the
draft does not score have the logit minus infinity, so `q` is 0 there. This follows FR-Spec (arXiv
2502.14856) and EAGLE-3 (2503.01840).

Legend: R tokens that the draft scores, V vocabulary, D hidden width, T tokens of a forward pass.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from data_gen.models.checkpoints import CONFIG, text_config
from data_gen.models.prepack import named_weights
from data_gen.models.remembered import loaded_from
from selector.files import atomically
from selector.schema import InputError

WEIGHTS = "model.safetensors"
LAYERS = "espalier_layers"  # the config key of the target's layers that it began as
VOCABULARY = "said_tokens"  # the tensor of the token ids that the draft scores, int32 [R]


class ReducedHead(torch.nn.Module):
    """An output layer over some tokens, `vocabulary_R`; all others have the logit minus
    infinity."""

    vocabulary_R: Tensor

    def __init__(self, whole: Any, vocabulary_R: Tensor) -> None:
        """Args: the output layer over all tokens; int64 on its device."""
        super().__init__()
        self.out_features, self.in_features = whole.weight.shape
        self.rows = torch.nn.Linear(self.in_features, len(vocabulary_R), False, device="meta")
        self.rows.weight = _rows(whole.weight, vocabulary_R)
        if output_bias(whole) is not None:
            self.rows.bias = _rows(whole.bias, vocabulary_R)
        self.register_buffer("vocabulary_R", vocabulary_R, persistent=False)

    @property
    def weight(self) -> Tensor:
        """The rows of the tokens that the draft scores, [R, D]."""
        return self.rows.weight

    @property
    def bias(self) -> Tensor | None:
        """What is added to their logits, [R]."""
        return self.rows.bias

    def forward(self, hidden_TD: Tensor) -> Tensor:
        logits_TR = self.rows(hidden_TD)
        logits_TV = logits_TR.new_full((*logits_TR.shape[:-1], self.out_features), -torch.inf)
        # a self-check cuts the rows
        return logits_TV.index_copy(-1, self.vocabulary_R[: logits_TR.shape[-1]], logits_TR)


def output_bias(head: Any) -> Tensor | None:
    """What an output layer adds to the logits, [V]; None for nothing."""
    bias: Tensor | None = getattr(head, "bias", None)
    return bias


def _rows(weights: Tensor, vocabulary_R: Tensor) -> torch.nn.Parameter:
    return torch.nn.Parameter(weights.detach()[vocabulary_R].clone(), requires_grad=False)


def draft_vocabulary(model: PreTrainedModel) -> Tensor | None:
    """The token ids that a model scores, int64 [R]; None: all."""
    head = model.get_output_embeddings()
    if isinstance(head, ReducedHead):
        return head.vocabulary_R
    return None


def new_draft(
    target: PreTrainedModel, layers: Sequence[int], vocabulary_R: Tensor
) -> PreTrainedModel:
    """A draft whose layers are copies of the target's `layers`, in its dtype on its device; its
    embeddings are the target's. It scores the token ids `vocabulary_R`, int64. InputError where the
    target has no such layers."""
    count = target.config.get_text_config().num_hidden_layers
    if not layers or not all(0 <= number < count for number in layers):
        raise InputError(
            f"distil.layers={list(layers)}: the target's layers have the numbers 0 to {count - 1}"
        )
    config = deepcopy(target.config.get_text_config())
    for key, value in config.to_dict().items():  # such as the kind of each layer
        if isinstance(value, list) and len(value) == count:
            setattr(config, key, [value[number] for number in layers])
    config.num_hidden_layers = len(layers)
    config.tie_word_embeddings = False
    if getattr(config, "final_logit_softcapping", None):
        # it would give tokens that it does not score a finite logit
        config.final_logit_softcapping = None
    setattr(config, LAYERS, list(layers))
    draft = _with_tables(config, target, vocabulary_R)
    of_target = dict(named_weights(target))

    def number_in_target(match: re.Match[str]) -> str:
        return str(layers[int(match.group())])

    with torch.no_grad():
        for name, weights in stored_weights(draft).items():
            name_in_target = re.sub(r"(?<=layers\.)\d+", number_in_target, name, count=1)
            weights.copy_(of_target[name_in_target])
    return draft


def load_draft(name: str, target: PreTrainedModel) -> PreTrainedModel:
    """A stored draft for a target that is loaded, in its dtype on its device; InputError where a
    file is missing or damaged, or where the draft is for a target of another shape."""
    config = text_config(name, "draft")
    table = target.get_output_embeddings()
    width, vocabulary = config.hidden_size, config.vocab_size
    target_width, target_vocabulary = table.weight.shape[1], table.out_features
    if (width, vocabulary) != (target_width, target_vocabulary):
        raise InputError(
            f"pair.draft: {name} was distilled for a target of width {width} with {vocabulary} "
            f"tokens; {target.name_or_path} has width {target_width} and {target_vocabulary} tokens"
        )
    try:
        tensors = load_file(Path(name) / WEIGHTS)
        draft = _with_tables(config, target, tensors[VOCABULARY].long())
        with torch.no_grad():
            for key, weights in stored_weights(draft).items():
                weights.copy_(tensors[key])
    except (OSError, SafetensorError, KeyError, RuntimeError) as error:
        raise InputError(f"pair.draft: cannot load {name}: {error}") from error
    draft.name_or_path = name
    loaded_from(draft, Path(name), target)
    return draft.eval()


def save_draft(draft: PreTrainedModel, folder: Path) -> None:
    """Write a draft's config and, in bfloat16, its weights, whole or not at all; InputError where
    the disk is full."""
    with atomically(folder) as partial:
        partial.mkdir()
        draft.config.to_json_file(partial / CONFIG)
        tensors = {VOCABULARY: draft.get_output_embeddings().vocabulary_R.to("cpu", torch.int32)}
        for name, weights in stored_weights(draft).items():
            tensors[name] = weights.detach().to("cpu", torch.bfloat16).contiguous()
        save_file(tensors, partial / WEIGHTS)


def is_distilled(name: str) -> bool:
    try:
        return LAYERS in json.loads((Path(name) / CONFIG).read_text())
    except (OSError, ValueError, TypeError):
        return False


def stored_weights(draft: PreTrainedModel) -> dict[str, Tensor]:
    """All weights but those of the embeddings and the output layer, by name; the parameters
    themselves, unless they are prepacked."""
    tables = draft.get_input_embeddings(), draft.get_output_embeddings()
    table_prefixes = tuple(f"{name}." for name, module in draft.named_modules() if module in tables)
    stored = {}
    for name, weights in named_weights(draft):
        if not name.startswith(table_prefixes):
            stored[name] = weights
    return stored


def _with_tables(config: Any, target: PreTrainedModel, vocabulary_R: Tensor) -> PreTrainedModel:
    config = deepcopy(config)
    config.vocab_size = 8  # its own tables are replaced at once
    for key in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, key, None)
    draft: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=target.dtype).to(
        target.device
    )
    head = ReducedHead(target.get_output_embeddings(), vocabulary_R.to(target.device))
    draft.set_input_embeddings(target.get_input_embeddings())
    draft.set_output_embeddings(head)
    draft.config.get_text_config().vocab_size = head.out_features
    draft.generation_config = deepcopy(target.generation_config)
    return draft
