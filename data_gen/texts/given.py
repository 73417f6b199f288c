"""Texts that another engine wrote, read from JSON lines."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.texts.prompts import Prompt
from selector.schema import InputError


@dataclass(frozen=True)
class GivenText:
    """A text that exists already, with the sampling setting it was written under; errors begin with `place`."""

    prompt: Prompt
    prompt_tokens: list[int]
    completion: list[int]
    sampling: Sampling
    place: str


def read_log(path: Path, pair: ModelPair, draft_temperature: float | None = None) -> list[GivenText]:
    """An engine's texts: JSON lines with `prompt` and `completion`, each a text or a list of token ids, `temperature`,
    and optionally `top_p`, `top_k`, `min_p`, `kind`, `source` and `id`.

    Token ids are safer than text: a tokenizer need not give back the tokens that were sampled.

    Args:
        draft_temperature: of the draft, which the log says nothing of; the target's if None.

    Raises:
        InputError: the file is missing or empty, or a line does not fit; names the file and the line.
    """
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    texts = [
        _logged(path, number, line, pair, draft_temperature) for number, line in enumerate(lines, 1) if line.strip()
    ]
    if not texts:
        raise InputError(f"{path}: holds no texts")
    if len({text.prompt.id for text in texts}) < len(texts):
        raise InputError(f"{path}: two texts have the same id")
    return texts


def _logged(path: Path, number: int, line: bytes, pair: ModelPair, draft_temperature: float | None) -> GivenText:
    where = f"{path}:{number}"
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise InputError(f"{where}: not UTF-8 text") from error
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{where}: not JSON") from error
    if not isinstance(record, dict):
        raise InputError(f"{where}: expected a JSON object with `prompt` and `completion`")
    prompt, completion = (_token_ids(where, record, key, pair) for key in ("prompt", "completion"))
    sampling = _sampling(where, record, draft_temperature)
    identity = str(record.get("id", f"line-{number}"))
    kind, source = str(record.get("kind", "text")), str(record.get("source", identity))
    shown = record["prompt"] if isinstance(record["prompt"], str) else str(pair.tokenizer.decode(prompt))
    return GivenText(Prompt(identity, shown, kind, source), prompt, completion, sampling, where)


def _sampling(where: str, record: dict[str, Any], draft_temperature: float | None) -> Sampling:
    temperature, top_p = _number(where, record, "temperature", None), _number(where, record, "top_p", 1.0)
    top_k, min_p = _number(where, record, "top_k", 0), _number(where, record, "min_p", 0.0)
    if temperature < 0 or not 0 < top_p <= 1 or top_k < 0 or top_k % 1 or not 0 <= min_p <= 1:
        given = {"temperature": temperature, "top_p": top_p, "top_k": top_k, "min_p": min_p}
        shown = ", ".join(f"{key} {value:g}" for key, value in given.items())
        raise InputError(f"{where}: {shown} is no sampling setting")
    return Sampling(temperature, top_p, draft_temperature, int(top_k), min_p)


def _token_ids(where: str, record: dict[str, Any], key: str, pair: ModelPair) -> list[int]:
    value = record.get(key)
    if isinstance(value, str):
        value = pair.tokenizer(value, add_special_tokens=key == "prompt")["input_ids"]
    if not isinstance(value, list) or not value or not all(type(token) is int for token in value):
        raise InputError(f"{where}: `{key}` is neither a text nor a list of token ids, or is empty")
    if not all(0 <= token < pair.vocabulary for token in value):
        raise InputError(f"{where}: `{key}` holds a token id beyond the vocabulary of {pair.vocabulary}")
    return value


def _number(where: str, record: dict[str, Any], key: str, default: float | None) -> float:
    value = record.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e9:
        raise InputError(f"{where}: `{key}` is missing or no number")
    return float(value)
