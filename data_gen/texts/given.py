"""Texts that another engine wrote, read from JSON lines."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.texts.prompts import Prompt, Record, check_ids, joined, read_lines

Given = Annotated[str, Field(min_length=1)] | Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]


class GivenRecord(Record):
    prompt: Given
    completion: Given
    temperature: float = Field(ge=0, lt=1e9)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, lt=2**31)
    min_p: float = Field(0.0, ge=0, le=1)


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
    and optionally `top_p`, `top_k`, `min_p`, `kind`, `source` and `id`; InputError as `read_lines`.

    Token ids are safer than text: a tokenizer need not give back the tokens that were sampled.
    """

    def parse(place: str, value: Any) -> GivenText:
        record = GivenRecord.model_validate(value)
        prompt = _token_ids(record.prompt, True, pair)
        completion = _token_ids(record.completion, False, pair)
        shown = record.prompt if isinstance(record.prompt, str) else str(pair.tokenizer.decode(prompt))
        sampling = Sampling(record.temperature, record.top_p, record.top_k, record.min_p)
        return GivenText(Prompt.of(record, shown, place), prompt, completion, sampling, place)

    texts = read_lines(path, parse)
    check_ids(path, [text.prompt.id for text in texts])
    return texts


def _token_ids(given: str | list[int], begins: bool, pair: ModelPair) -> list[int]:
    ids = pair.tokenizer(given, add_special_tokens=begins)["input_ids"] if isinstance(given, str) else given
    if not ids or max(ids) >= pair.vocabulary:
        raise ValueError(f"no tokens, or one beyond the vocabulary of {pair.vocabulary}")
    return list(ids)


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
