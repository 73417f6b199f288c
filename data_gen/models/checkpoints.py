"""Loads models and tokenizers from Hugging Face directories or hub ids, and computes their
fingerprints.

Legend: R rows and C columns of a tensor's bits.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging
from transformers.utils.hub import cached_file, extract_commit_hash

from data_gen.models.masks import check_attention
from data_gen.models.prepack import named_weights
from data_gen.models.remembered import loaded_from, recall, remember
from selector.files import first_line
from selector.schema import InputError

CONFIG = "config.json"
WEIGHTS = "weights"  # the hash, as it is remembered


def load_model(
    name: str,
    role: str,
    dtype: torch.dtype,
    device: torch.device | str,
    device_map: str | None = None,
) -> PreTrainedModel:
    """Load a model on a device, or over several devices by `device_map`. InputError, which names
    the role or the model, where it cannot be loaded, lacks weights, or cannot process token
    trees."""
    config = _load(AutoConfig, name, role)
    # transformers then takes sdpa, or eager where the model has no sdpa
    config._attn_implementation = None
    check_attention(config, name)
    options = {
        "config": config,
        "dtype": dtype,
        "device_map": device_map,
        "output_loading_info": True,
    }
    model, loading_info = _load(AutoModelForCausalLM, name, role, **options)
    missing = sorted(loading_info["missing_keys"])
    if missing:  # transformers would make them up
        raise InputError(
            f"pair.{role}: {name} lacks {len(missing)} of its weights, such as {missing[0]}"
        )
    if device_map is None:
        model = model.to(device)
    elif torch.cuda.is_available():
        devices = {str(device) for device in getattr(model, "hf_device_map", {}).values()}
        if devices & {"cpu", "disk"}:
            raise InputError(
                f"pair.device_map: {name} does not fit: {device_map} leaves part of it off the "
                "devices"
            )
    if Path(name).is_dir():
        loaded_from(model, Path(name))
    else:
        config_file = cached_file(name, CONFIG)
        if config_file:
            loaded_from(model, Path(config_file).parent)
    return model.eval()


def load_target(
    name: str,
    tokenizer: PreTrainedTokenizerBase,
    dtype: torch.dtype,
    device: torch.device | str,
    device_map: str | None = None,
) -> PreTrainedModel:
    """Load a target as `load_model` does. Its texts also end with the tokenizer's own end; a line
    on the standard error says so where the generation config names others."""
    model = load_model(name, "target", dtype, device, device_map)
    ends = eos_ids(model)
    end: Any = tokenizer.eos_token_id
    if end is None or end in ends:
        return model
    if ends:
        others = ", ".join(map(repr, tokenizer.convert_ids_to_tokens(sorted(ends))))
        print(
            f"espalier: {name}: texts end with {others} by its generation config and with "
            f"{tokenizer.eos_token!r} by its tokenizer: all of them count",
            file=sys.stderr,
        )
    model.generation_config.eos_token_id = sorted({*ends, end})
    return model


def eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """Tokens that end a model's text, by its generation config."""
    eos = model.generation_config.eos_token_id
    if eos is None:
        return frozenset()
    if isinstance(eos, int):
        return frozenset([eos])
    return frozenset(eos)


def load_tokenizer(name: str, role: str) -> PreTrainedTokenizerBase:
    """A model's tokenizer; InputError where it cannot be loaded."""
    tokenizer: PreTrainedTokenizerBase = _load(AutoTokenizer, name, role)
    return tokenizer


def fingerprint(
    models: Sequence[PreTrainedModel], tokenizer: PreTrainedTokenizerBase, eos_ids: Collection[int]
) -> str:
    """A hash of loaded models' configs and weights, the tokenizer, its chat template and the ids
    that end a text: 16 hex digits, which do not depend on dtype or device."""
    digest = hashlib.sha256()
    for model in models:
        name = str(model.name_or_path)
        if Path(name).is_dir():
            config = Path(name) / CONFIG
        else:
            config = Path(str(cached_file(name, CONFIG)))
        digest.update(config.read_bytes())
        digest.update(known_weights_of(model).encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend:
        vocabulary = backend.to_str()
    else:
        vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    digest.update(vocabulary.encode())
    digest.update(json.dumps([tokenizer.chat_template, sorted(eos_ids)], sort_keys=True).encode())
    return digest.hexdigest()[:16]


def weights_of(model: PreTrainedModel) -> str:
    """A hash of a loaded model's weights, by the sums of the bits in every row and column: 16 hex
    digits, which do not depend on the device or, of floats, on the dtype, as these count in
    bfloat16."""
    digest = hashlib.sha256()
    for name, weights in sorted(named_weights(model), key=itemgetter(0)):
        if not weights.is_meta:
            rows_RC = torch.atleast_2d(weights.detach()).flatten(0, -2)
            if rows_RC.is_floating_point():
                bits_RC = rows_RC.to(torch.bfloat16).contiguous().view(torch.int16)
            else:
                bits_RC = rows_RC.contiguous().view(torch.int8)
            digest.update(name.encode())
            for axis in (0, 1):
                digest.update(bits_RC.sum(axis, dtype=torch.int64).cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def known_weights_of(model: PreTrainedModel) -> str:
    """`weights_of` a model, remembered until its files or, by an operation of torch, its weights
    change."""
    digest: str | None = recall(model, WEIGHTS)
    if digest is None:
        digest = weights_of(model)
        remember(model, WEIGHTS, digest)
    return digest


def revision(name: str) -> str | None:
    """The hub commit of a loaded model; None for a directory."""
    if Path(name).is_dir():
        return None
    return extract_commit_hash(str(cached_file(name, CONFIG)), None)


def text_config(name: str, role: str) -> Any:
    """The part of a model's config that is about its text layers; InputError where it cannot be
    read."""
    return _load(AutoConfig, name, role).get_text_config()


def positions(config: Any, name: str) -> int:
    """The longest context of a model in tokens; InputError where its config does not say it."""
    longest = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(longest, int) or longest < 1:
        raise InputError(
            f"{name}: its config does not say how many positions it has (max_position_embeddings)"
        )
    return longest


@contextmanager
def quiet() -> Iterator[None]:
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _load(loader: Any, name: str, role: str, **kwargs: object) -> Any:
    is_path = name.startswith(("/", ".", "~")) or name.count("/") > 1
    if is_path and not Path(name).is_dir():
        raise InputError(f"pair.{role}: there is no folder {name}")
    try:
        return loader.from_pretrained(name, **kwargs)
    except Exception as error:  # a damaged file may raise anything
        raise InputError(f"pair.{role}: cannot load {name}: {first_line(error)}") from error
