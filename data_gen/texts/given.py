"""Texts that another engine wrote, read from JSON lines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.texts.prompts import Prompt, joined, read_lines, record_of


@dataclass(frozen=True)
class GivenText:
    """A text and the sampling setting that it was written under. Error messages about it begin with `place`."""

    prompt: Prompt
    prompt_tokens: list[int]
    completion: list[int]
    sampling: Sampling
    place: str


def read_log(path: Path, pair: ModelPair) -> list[GivenText]:
    """An engine's texts: JSON lines with `prompt` and `completion`, each a text or a list of token ids, `temperature`,
    and optionally `top_p`, `top_k`, `min_p`, `kind`, `source` and `id`.

    Token ids are safer than text: a tokenizer need not give back the tokens that were sampled.

    Raises:
        InputError: the file is missing or empty, or a line does not fit; names the file and the line.
    """
    return read_lines(path, "texts", lambda place, line: _text(place, line, pair), lambda text: text.prompt.id)


def apart(texts: list[GivenText]) -> tuple[list[GivenText], str]:
    """Texts that can be split by source, and a sentence on what was done for that, which may be empty.

    Sources with equal prompts become one. At temperature 0 a repeated text is left out; otherwise it is a second draw.
    """
    sources = joined((text.prompt.source, tuple(text.prompt_tokens)) for text in texts)
    kept: dict[Any, GivenText] = {}
    for text in texts:
        content = tuple(text.prompt_tokens), tuple(text.completion), text.sampling
        prompt = replace(text.prompt, source=sources[text.prompt.source])
        kept.setdefault(text.place if text.sampling.temperature > 0 else content, replace(text, prompt=prompt))
    repeated, shared = len(texts) - len(kept), len(sources) - len(set(sources.values()))
    said = [f"greedy texts that are left out, because they are repeated: {repeated}"] if repeated else []
    said += [f"sources that are joined to others, because they have prompts in common: {shared}"] if shared else []
    return list(kept.values()), "; ".join(said)


def _text(place: str, line: bytes, pair: ModelPair) -> GivenText:
    """The text of one line; ValueError where the line does not fit."""
    record = record_of(line, "`prompt` and `completion`")
    prompt, completion = (_token_ids(record, key, pair) for key in ("prompt", "completion"))
    given: dict[str, float] = {}
    for key, default in (("temperature", None), ("top_p", 1.0), ("top_k", 0), ("min_p", 0.0)):
        value = record.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e9:
            raise ValueError(f"`{key}` is missing or no number")
        given[key] = float(value)
    temperature, top_p, top_k, min_p = given.values()
    if temperature < 0 or not 0 < top_p <= 1 or top_k < 0 or top_k % 1 or not 0 <= min_p <= 1:
        raise ValueError(", ".join(f"{key} {value:g}" for key, value in given.items()) + " is no sampling setting")
    sampling = Sampling(temperature, top_p, int(top_k), min_p)
    shown = record["prompt"] if isinstance(record["prompt"], str) else str(pair.tokenizer.decode(prompt))
    return GivenText(Prompt.of(record, shown, place), prompt, completion, sampling, place)


def _token_ids(record: dict[str, Any], key: str, pair: ModelPair) -> list[int]:
    value = record.get(key)
    if isinstance(value, str):
        value = pair.tokenizer(value, add_special_tokens=key == "prompt")["input_ids"]
    if not isinstance(value, list) or not value or not all(type(token) is int for token in value):
        raise ValueError(f"`{key}` is neither a text nor a list of token ids, or is empty")
    if not all(0 <= token < pair.vocabulary for token in value):
        raise ValueError(f"`{key}` holds a token id beyond the vocabulary of {pair.vocabulary}")
    return value
