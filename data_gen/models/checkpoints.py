"""Models and tokenizers from Hugging Face directories or hub ids, and what identifies them.

A directory may hold a config and no weights: a *shape*, whose weights are drawn at random. It takes as long as the real
model, so times can be measured before anything is downloaded; what it says means nothing.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Sequence
from contextlib import suppress
from importlib.util import find_spec
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
from transformers.utils.hub import cached_file, extract_commit_hash

from data_gen.models.masks import check_attention
from selector.files import atomically
from selector.schema import InputError

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # whole, or in parts with an index; in the library's order
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
RANDOM = "random weights, "  # what the fingerprint of a pair of shapes begins with


def load_config(name: str, role: str) -> Any:
    """InputError where it cannot be read."""
    return _load(AutoConfig, name, role)


def load_model(
    name: str, role: str, dtype: torch.dtype, device: torch.device | str, device_map: str | None = None
) -> PreTrainedModel:
    """A model on a device, or spread over several; random where there are no weights.

    Its attention is one that honours masks of four axes, whatever the config asks for.

    Raises:
        InputError: it is missing or not readable, cannot be spread, or has layers that cannot be passed over token
            trees; names the role or the model.
    """
    config = load_config(name, role)
    config._attn_implementation = None  # then it is sdpa, or eager where the model has no other
    check_attention(config, name)
    if is_shape(name):
        if device_map is not None:
            raise InputError(f"pair.device_map: {name} has no weights: it is made on one device")
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model.name_or_path = name
    elif device_map is not None:
        model = _spread(name, role, config, dtype, device_map)
    else:
        model = _load(AutoModelForCausalLM, name, role, config=config, dtype=dtype).to(device)
    check_attention(model.config, name)
    return model.eval()


def _spread(name: str, role: str, config: Any, dtype: torch.dtype, device_map: str) -> PreTrainedModel:
    """A model over several devices; InputError where accelerate is missing."""
    if find_spec("accelerate") is None:
        raise InputError("pair.device_map: accelerate is not installed: pip install 'espalier[large]'")
    model = _load(AutoModelForCausalLM, name, role, config=config, dtype=dtype, device_map=device_map)
    places = {str(place) for place in getattr(model, "hf_device_map", {}).values()}
    if torch.cuda.is_available() and places & {"cpu", "disk"}:
        raise InputError(f"pair.device_map: {name} does not fit these devices: {device_map} leaves part of it off them")
    return model


def _load(loader: Any, name: str, role: str, **kwargs: object) -> Any:
    path = Path(name)
    if not path.is_dir() and (path.is_absolute() or name.startswith(".") or name.count("/") > 1):
        raise InputError(f"pair.{role}: {name} is neither a directory nor a hub id")
    try:
        return loader.from_pretrained(name, **kwargs)
    except Exception as error:  # whatever a damaged file makes the libraries raise
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise InputError(f"pair.{role}: cannot load {name}: {reason}") from error


def load_tokenizer(name: str, role: str) -> PreTrainedTokenizerBase:
    """A model's tokenizer; one of bytes for a shape that has none: what random weights read does not matter."""
    if is_shape(name) and not any((Path(name) / file).exists() for file in TOKENIZERS):
        return _of_bytes()
    tokenizer: PreTrainedTokenizerBase = _load(AutoTokenizer, name, role)
    return tokenizer


def _of_bytes() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def is_shape(name: str) -> bool:
    """Whether it is a directory with a config and without weights."""
    folder = Path(name)
    return (folder / CONFIG).is_file() and not weight_files(folder)


def weight_files(folder: Path) -> list[Path]:
    """The files that a model's weights are read from, those of a damaged index left out."""
    for name in WEIGHTS:
        if (folder / name).exists():
            return [folder / name]
        index = folder / f"{name}.index.json"
        if index.exists():
            with suppress(ValueError, KeyError, AttributeError):
                return [folder / part for part in sorted(set(json.loads(index.read_text())["weight_map"].values()))]
            return [index]
    return []


def fingerprint(names: Sequence[str], tokenizer: PreTrainedTokenizerBase, kept: Path | None = None) -> str:
    """A hash of what the models are read from, and of the tokenizer: 16 hex digits, whatever they are loaded as.

    Args:
        names: directories or hub ids, which have been loaded.
        kept: a file of checksums, by path, size and time of change; a file whose checksum is there is not read again.
    """
    digest = hashlib.sha256()
    sums = _Checksums(kept)
    for name in names:
        folder = Path(name) if Path(name).is_dir() else Path(str(cached_file(name, CONFIG))).parent
        for path in (folder / CONFIG, *weight_files(folder)):
            digest.update(f"{path.name} {sums.of(path)}\n".encode())
    sums.save()
    backend = getattr(tokenizer, "backend_tokenizer", None)
    digest.update((backend.to_str() if backend else json.dumps(sorted(tokenizer.get_vocab().items()))).encode())
    shapes = any(is_shape(name) for name in names)
    return (RANDOM if shapes else "") + digest.hexdigest()[:16]


class _Checksums:
    """SHA-256 of large files, kept beside what says that they have not changed; a damaged entry counts for nothing."""

    def __init__(self, kept: Path | None) -> None:
        self.kept, self.known, self.new = kept, {}, False
        if kept is not None:
            with suppress(OSError, ValueError):
                self.known = {str(key): str(value) for key, value in dict(json.loads(kept.read_text())).items()}

    def of(self, path: Path) -> str:
        stat = path.stat()
        key = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
        found, _, check = self.known.get(key, "").partition(" ")
        if not found or check != _check(key, found):
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            self.known[key], self.new = f"{found} {_check(key, found)}", True
        return found

    def save(self) -> None:
        if self.kept is not None and self.new:
            with suppress(InputError), atomically(self.kept) as partial:  # without it, it only takes longer
                partial.write_text(json.dumps(self.known, indent=1))


def _check(key: str, digest: str) -> str:
    return f"{zlib.crc32(f'{key} {digest}'.encode()):08x}"


def revision(name: str) -> str | None:
    """The commit on the hub that a model was read at; None of a directory."""
    return None if Path(name).is_dir() else extract_commit_hash(str(cached_file(name, CONFIG)), None)


def hidden_width(name: str, role: str) -> int:
    """A model's hidden width, without its weights; InputError where its config cannot be read."""
    return int(load_config(name, role).get_text_config().hidden_size)


def positions(config: Any, name: str) -> int:
    """The longest context that a model takes, in tokens; InputError where its config does not say."""
    found = getattr(config.get_text_config(), "max_position_embeddings", None)
    if not isinstance(found, int) or found < 1:
        raise InputError(f"{name}: its config does not say how many positions it has (max_position_embeddings)")
    return found
