"""Loads models and tokenizers from Hugging Face directories or hub ids, and computes their fingerprints.

A directory with a config and no weights is a *shape*: its weights are random. It has the real model's speed, so times
can be measured before the weights are downloaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging
from transformers.utils.hub import cached_file, extract_commit_hash

from data_gen.models.masks import check_attention
from selector.files import atomically, first_line
from selector.schema import InputError

CONFIG = "config.json"
WEIGHTS = "model*.safetensors", "pytorch_model*.bin"  # in the order in which transformers looks for them
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
SAMPLED = 64  # numbers of each tensor that stand for all of a model's weights
RANDOM = "random weights, "  # the beginning of the fingerprint of a pair with a shape


def load_model(
    name: str, role: str, dtype: torch.dtype, device: torch.device | str, device_map: str | None = None
) -> PreTrainedModel:
    """Load a model on a device, or over several devices by `device_map`; a shape gets random weights on the device.
    InputError, which names the role or the model, where it cannot be loaded or cannot pass token trees."""
    config = _load(AutoConfig, name, role)
    config._attn_implementation = None  # transformers then takes sdpa, or eager where the model has no sdpa
    check_attention(config, name)
    if is_shape(name):
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.name_or_path = name
    else:
        model = _load(AutoModelForCausalLM, name, role, config=config, dtype=dtype, device_map=device_map)
        if device_map is None:
            model = model.to(device)
        elif torch.cuda.is_available() and {"cpu", "disk"} & {*map(str, getattr(model, "hf_device_map", {}).values())}:
            raise InputError(f"pair.device_map: {name} does not fit: {device_map} leaves part of it off the devices")
    check_attention(model.config, name)
    return model.eval()


def _load(loader: Any, name: str, role: str, **kwargs: object) -> Any:
    if (name.startswith(("/", ".", "~")) or name.count("/") > 1) and not Path(name).is_dir():
        raise InputError(f"pair.{role}: there is no folder {name}")
    try:
        return loader.from_pretrained(name, **kwargs)
    except Exception as error:  # a damaged file may raise anything
        raise InputError(f"pair.{role}: cannot load {name}: {first_line(error)}") from error


def load_tokenizer(name: str, role: str) -> PreTrainedTokenizerBase:
    """A model's tokenizer. A shape without one gets a tokenizer of bytes."""
    if not is_shape(name) or any((Path(name) / file).exists() for file in TOKENIZERS):
        tokenizer: PreTrainedTokenizerBase = _load(AutoTokenizer, name, role)
        return tokenizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def is_shape(name: str) -> bool:
    """Whether the model is a directory with a config and without weights."""
    return (Path(name) / CONFIG).is_file() and not _weight_files(Path(name))


def require_weights(name: str, role: str) -> None:
    if is_shape(name):
        raise InputError(f"pair.{role}: {name} holds a config and no weights: only times can be measured")


def _weight_files(folder: Path) -> list[Path]:
    return next(filter(None, (sorted(folder.glob(pattern)) for pattern in WEIGHTS)), [])


def fingerprint(
    names: Sequence[str], tokenizer: PreTrainedTokenizerBase, eos_ids: Collection[int], kept: Path | None = None
) -> str:
    """A hash of the loaded models' files, the tokenizer, its chat template and the ids that end a text: 16 hex digits,
    which do not depend on dtype or device. `kept` is the file of `kept_checksums`."""
    digest = hashlib.sha256()
    with kept_checksums(kept) as known:
        for name in names:
            folder = Path(name) if Path(name).is_dir() else Path(str(cached_file(name, CONFIG))).parent
            for path in (folder / CONFIG, *_weight_files(folder)):
                digest.update(f"{path.name} {checksum(path, known)}\n".encode())
    backend = getattr(tokenizer, "backend_tokenizer", None)
    digest.update((backend.to_str() if backend else json.dumps(sorted(tokenizer.get_vocab().items()))).encode())
    digest.update(json.dumps([tokenizer.chat_template, sorted(eos_ids)], sort_keys=True).encode())
    return (RANDOM if any(map(is_shape, names)) else "") + digest.hexdigest()[:16]


@contextmanager
def kept_checksums(kept: Path | None) -> Iterator[dict[str, str]]:
    """The `known` checksums of `checksum`, from a file, to which those that are added in the context are written."""
    known: dict[str, str] = {}
    if kept is not None:
        with suppress(OSError, ValueError, TypeError):
            known = dict(json.loads(kept.read_text()))
    before = len(known)
    yield known
    if kept is not None and len(known) > before:
        with suppress(InputError), atomically(kept) as partial:  # an unwritable folder only costs time
            partial.write_text(json.dumps(known, indent=1))


def checksum(path: Path, known: dict[str, str]) -> str:
    """The SHA-256 of a file, from the `known` ones if it has the same path, size and time there; else it is added."""
    stat = path.stat()
    key = f"{path.resolve()}, {stat.st_size} bytes, {stat.st_mtime_ns}"
    if key not in known:
        with path.open("rb") as file:
            known[key] = hashlib.file_digest(file, "sha256").hexdigest()
    return known[key]


@contextmanager
def quiet() -> Iterator[None]:
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def weights_of(model: PreTrainedModel) -> str:
    """A hash of the first numbers of a loaded model's weights, in bfloat16: 16 hex digits, which do not depend on the
    device or, of floats, on the dtype. Reading all weights would take minutes."""
    digest = hashlib.sha256()
    for _, weights in sorted(model.named_parameters()):
        if weights.is_floating_point() and not weights.is_meta:
            first = weights.detach().flatten()[:SAMPLED].to("cpu", torch.bfloat16)
            digest.update(first.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()[:16]


def revision(name: str) -> str | None:
    """The hub commit of a loaded model; None for a directory."""
    return None if Path(name).is_dir() else extract_commit_hash(str(cached_file(name, CONFIG)), None)


def text_config(name: str, role: str) -> Any:
    """The part of a model's config that is about its text layers; InputError where it cannot be read."""
    return _load(AutoConfig, name, role).get_text_config()


def positions(config: Any, name: str) -> int:
    """The longest context of a model in tokens; InputError where its config does not say it."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(found, int) or found < 1:
        raise InputError(f"{name}: its config does not say how many positions it has (max_position_embeddings)")
    return found
