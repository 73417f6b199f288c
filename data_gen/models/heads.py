"""Loads EAGLE-3 heads in the format of the `speculators` library (the extra `heads`), and checks them.

Legend: T tokens, V vocabulary, A widths of the target's states together.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from data_gen.models.cached_head import caches
from data_gen.models.checkpoints import (
    CONFIG,
    fingerprint,
    is_shape,
    load_model,
    load_tokenizer,
    require_weights,
    text_config,
)
from data_gen.models.gguf import resolved
from data_gen.models.pair import DTYPES, CachedModel, ModelPair, eos_ids, resolve_device
from data_gen.models.self_check import TOLERANCES
from data_gen.models.vocabulary import scored
from selector.files import first_line
from selector.schema import InputError

EAGLE3 = "eagle3"
CHECKED_TEXT, CHECKED_DEPTH = 24, 4  # tokens of the self-check


def load_pair_with_head(
    target: str,
    head: str,
    device: str = "auto",
    dtype: str = "float32",
    device_map: str | None = None,
    shapes: bool = False,
    checksums: Path | None = None,
) -> ModelPair:
    """A target and an EAGLE-3 head for it; arguments as `ModelPair.load`.

    Raises:
        InputError: as `ModelPair.load`; or the library is missing, the head is of another kind, or it does not fit the
            target.
    """
    device, target = resolve_device(device), resolved(target, "target")
    check_head_config(head, target)
    for name, role in ((target, "target"), (head, "head")):
        if not shapes:
            require_weights(name, role)
    tokenizer = load_tokenizer(target, "target")
    model = load_model(target, "target", DTYPES[dtype], device, device_map)
    loaded = load_head(head, target, model.device, DTYPES[dtype])
    check_fits(loaded, model, f"pair.head: {head}")
    found = fingerprint((target, head), tokenizer, eos_ids(model), checksums)
    return ModelPair(model, loaded, tokenizer, (target, head), found)


def require_library() -> None:
    """InputError unless the library of heads is installed; it names every file that it reads, which is turned off."""
    if find_spec("speculators") is None:
        raise InputError("pair.head: speculators is not installed: pip install '.[heads]' in Espalier's repository")
    from loguru import logger

    logger.disable("speculators")


def head_config(name: str) -> Any:
    """A head's config; InputError where it is not that of an EAGLE-3 head."""
    from speculators.models.eagle3 import Eagle3SpeculatorConfig

    try:
        path = Path(name) / CONFIG if Path(name).is_dir() else Path(str(cached_file(name, CONFIG)))
        kind = json.loads(path.read_text()).get("speculators_model_type")
        config = Eagle3SpeculatorConfig.from_pretrained(name) if kind == EAGLE3 else None
    except Exception as error:  # a damaged file may raise anything
        raise InputError(f"pair.head: cannot read {name}: {first_line(error)}") from error
    if kind is None:
        raise InputError(f"pair.head: {name} is not in the format of the speculators library, whose `convert` makes it")
    if config is None:
        raise InputError(f"pair.head: {name} is a head of the kind {kind}; only {EAGLE3} can be decoded here")
    return config


def check_head_config(name: str, target: str) -> None:
    """Check a head as far as that needs no weights: the library, its kind, its layers, and its sizes against the
    target's config; InputError where one is wrong."""
    require_library()
    config, own = head_config(name), text_config(target, "target")
    layer, read = config.transformer_layer_config, config.eagle_aux_hidden_state_layer_ids
    for key in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(layer, key), getattr(own, key)
        if ours != theirs:
            raise InputError(f"pair.head: {name} is for a target with {key}={ours}; {target} has {theirs}")
    if read and max(read) > own.num_hidden_layers:
        raise InputError(f"pair.head: {name} reads layer {max(read)}; {target} has {own.num_hidden_layers}")
    if "sliding_attention" in (getattr(layer, "layer_types", None) or ()):
        raise InputError(f"pair.head: {name} has a sliding window, for which there is no mask here")


def load_head(name: str, target: str, device: torch.device | str, dtype: torch.dtype) -> Any:
    """A head for a target; embeddings and output rows that its checkpoint lacks are the target's. A shape gets random
    weights. InputError where it does not load."""
    require_library()
    from speculators.models.eagle3 import Eagle3DraftModel
    from speculators.models.utils import resolve_target_layer_ids

    try:
        config = head_config(name)
        config.transformer_layer_config._attn_implementation = "eager"  # takes a mask for each row of a pass
        config.speculators_config.verifier.name_or_path = target
        if is_shape(name):
            ids = resolve_target_layer_ids(config.eagle_aux_hidden_state_layer_ids, target)
            config.eagle_aux_hidden_state_layer_ids = ids
            made: Any = Eagle3DraftModel(config)
            model = _with_random_weights(made.to(dtype))
        else:
            model = Eagle3DraftModel.from_pretrained(name, config=config, dtype=dtype)
            _complete(model, name)
    except InputError:
        raise
    except Exception as error:  # a damaged file may raise anything
        raise InputError(f"pair.head: cannot load {name}: {first_line(error)}") from error
    model.name_or_path = name
    return model.to(device).eval()


def _complete(head: Any, name: str) -> None:
    """The library takes weights that are NaN from the target, but transformers 5 gives those that a checkpoint lacks
    random numbers, or what the memory held before."""
    index = cached_file(name, "model.safetensors.index.json", _raise_exceptions_for_missing_entries=False)
    if index is not None:
        held = set(json.loads(Path(index).read_text())["weight_map"])
    else:
        with safe_open(str(cached_file(name, "model.safetensors")), "pt") as file:
            held = set(file.keys())
    for table in ("embed_tokens", "lm_head"):
        if f"{table}.weight" not in held:
            getattr(head, table).weight.data.fill_(torch.nan)
    head.load_verifier_weights()


def _with_random_weights(head: Any) -> Any:
    for table in (head.embed_tokens, head.lm_head):
        table.weight.data.normal_(std=0.02)
    if head.t2d is not None:
        head.t2d[: head.draft_vocab_size] = True
    return head


def check_fits(head: Any, target: PreTrainedModel, name: str) -> None:
    """InputError where a loaded head's vocabulary maps contradict each other, or are not of the target's vocabulary."""
    if head.verifier_vocab_size != scored(target):
        raise InputError(
            f"{name} is for a vocabulary of {head.verifier_vocab_size} tokens; the target scores {scored(target)}"
        )
    if head.d2t is not None:
        ids = head.d2t + torch.arange(len(head.d2t), device=head.d2t.device)
        if not torch.equal(ids, head.t2d.nonzero()[:, 0]):
            raise InputError(f"{name}: its maps d2t and t2d of the vocabulary contradict each other")


@torch.inference_mode()
def check_head(pair: ModelPair, name: str) -> float:
    """The largest difference, as a share of the logits' standard deviation, between the library's pass over a text,
    which drafts from all roots at once, and chains that are drafted step by step; InputError where it is too large."""
    head, generator = pair.draft, torch.Generator().manual_seed(0)
    if head.config.transformer_layer_config._attn_implementation != "eager":
        raise InputError(f"{name}: load it with data_gen.models.heads.load_head, which asks for eager attention")
    tokens = torch.randint(pair.vocabulary, (CHECKED_TEXT,), generator=generator).tolist()
    expected_DTV, worst = _one_call(pair, tokens), 0.0
    target, cached = caches(pair)
    target.fill(tokens)
    cached.fill(tokens[:1])
    for root in range(1, CHECKED_TEXT - CHECKED_DEPTH):
        found = cached.extend(tokens[root : root + 1])
        for d in range(CHECKED_DEPTH):
            known = found.logits_BWV[0, -1].isfinite()
            expected_V = expected_DTV[d][root - 1].float()
            apart = (found.logits_BWV[0, -1, known].float() - expected_V).abs().amax() / expected_V.std()
            worst = max(worst, float(apart))
            drafted = torch.tensor([[tokens[root + d + 1]]], device=pair.device)
            found = cached.forward(drafted, torch.tensor([d]), torch.ones(1, d + 1, dtype=torch.bool))
        cached.keep([])
    if not worst <= TOLERANCES.get(head.dtype, TOLERANCES[torch.float32]):
        raise InputError(f"{name}: drafting step by step is not what the library's own pass gives: {worst:.2g} apart")
    return worst


def _one_call(pair: ModelPair, tokens: list[int]) -> list[Tensor]:
    """The head's logits by depth, [T - 1, V of the head] each, by the library's training pass over a whole text."""
    head: Any = pair.draft
    target, seen = CachedModel(pair.target, head.target_layer_ids), list[Tensor]()
    target.fill(tokens)
    tokens_1T = torch.tensor([tokens[1:]], device=pair.device)
    states_1TA = target.take_states(len(tokens) - 1).unsqueeze(0).to(head.dtype)
    hook = head.lm_head.register_forward_hook(lambda _, inputs, output: seen.append(output[0]))
    with hook, torch.compiler.set_stance("force_eager"):
        head(states_1TA, tokens_1T, torch.zeros_like(tokens_1T), ttt_steps=CHECKED_DEPTH)
    return seen
