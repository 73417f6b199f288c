"""Prompts: how they are read, what tokens they are, and which split they belong to."""

from __future__ import annotations

import codecs
import hashlib
import json
from collections.abc import Callable, Hashable, Iterable
from dataclasses import asdict, dataclass
from itertools import compress, zip_longest
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import from_json
from scipy.cluster.hierarchy import DisjointSet

from selector.schema import InputError

T = TypeVar("T")
Name = Annotated[str, BeforeValidator(str)]


class Record(BaseModel):
    """What a line of a file says of its text; further keys are ignored."""

    model_config = ConfigDict(strict=True)
    id: Name | None = None
    source: Name | None = None
    kind: Name | None = None


class PromptRecord(Record):
    text: str = Field(pattern=r"\S")


@dataclass(frozen=True)
class Prompt:
    """A text to continue. All prompts of one `source` belong to the same split."""

    id: str
    text: str
    kind: str
    source: str

    @classmethod
    def of(cls, record: Record, text: str, place: str) -> Prompt:
        """The prompt of a line at a place, `file:number`."""
        own = record.id or f"line-{place.rpartition(':')[2]}"
        return cls(own, text, record.kind or "text", record.source or own)


@dataclass(frozen=True)
class Form:
    """How prompts become tokens.

    Attributes:
        tokens: the longest prompt.
        longer: what becomes of a longer one. `start` keeps its first tokens, `end` its last ones and the special tokens
            that every text begins with, and `drop` leaves the prompt out.
        chat: the text is a user's turn in the tokenizer's chat template, and the model's turn begins after it.
        system: the text of the template's system turn; None for no such turn.
    """

    tokens: int
    longer: str = "start"
    chat: bool = False
    system: str | None = None

    def whole(self, tokenizer: Any, prompts: Iterable[Prompt]) -> list[list[int]]:
        """All token ids of each prompt; InputError where there is no chat template, or it takes no system turn."""
        texts = [prompt.text for prompt in prompts]
        if self.chat:
            texts = [self._in_template(tokenizer, text) for text in texts]
        return tokenizer(texts, add_special_tokens=not self.chat)["input_ids"] if texts else []

    def _in_template(self, tokenizer: Any, text: str) -> str:
        name = tokenizer.name_or_path
        if not tokenizer.chat_template:
            raise InputError(f"prompts.chat: the tokenizer of {name} has no chat template")
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        turns = [*system, {"role": "user", "content": text}]
        try:
            return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
        except Exception as error:  # a template is a program, and may raise anything
            key = "system" if system else "chat"
            raise InputError(f"prompts.{key}: the chat template of {name} refuses: {error}") from error

    def fit(self, tokenizer: Any, prompts: list[Prompt]) -> tuple[list[Prompt], str]:
        """The prompts that are kept, and a sentence on all of them. Of prompts with the same tokens, once they are cut,
        only the first is kept: the others could be in other splits."""
        encoded = self.whole(tokenizer, prompts)
        fitting = [not (self.longer == "drop" and len(ids) > self.tokens) for ids in encoded]
        kept: dict[tuple[int, ...], Prompt] = {}
        for prompt, ids in compress(zip(prompts, encoded, strict=True), fitting):
            kept.setdefault(tuple(self.cut(tokenizer, ids)), prompt)
        lengths, what = list(map(len, encoded)), "left out" if self.longer == "drop" else f"cut to their {self.longer}"
        longer, repeated = sum(length > self.tokens for length in lengths), sum(fitting) - len(kept)
        said = f"{len(prompts)} texts of up to {max(lengths)} tokens"
        said += f"; {longer} of them are longer than prompts.tokens={self.tokens} and are {what}" if longer else ""
        said += f"; {repeated} with the tokens of an earlier one are left out" if repeated else ""
        return list(kept.values()), said

    def cut(self, tokenizer: Any, ids: list[int]) -> list[int]:
        """At most `tokens` of a prompt's tokens."""
        if self.longer != "end" or len(ids) <= self.tokens:
            return ids[: self.tokens]
        first = next((n for n, token in enumerate(ids) if token not in tokenizer.all_special_ids), 0)
        return ids[:first] + ids[len(ids) - self.tokens + first :]

    def encode(self, tokenizer: Any, prompt: Prompt) -> list[int]:
        """The token ids of a prompt, at most `tokens`."""
        return self.cut(tokenizer, self.whole(tokenizer, [prompt])[0])


def read_lines(path: Path, parse: Callable[[str, Any], T]) -> list[T]:
    """What `parse` makes of the JSON of each line that is not blank, and of its place, `file:number`; InputError where
    the file is missing or empty, or a line does not fit, which names the file and the line."""
    found = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    found.append(_parsed(f"{path}:{number}", line, parse))
    except OSError as error:
        raise InputError(f"{path}: {error.strerror}") from error
    if not found:
        raise InputError(f"{path}: no lines there")
    return found


def _parsed(place: str, line: bytes, parse: Callable[[str, Any], T]) -> T:
    try:
        value = from_json(line.removeprefix(codecs.BOM_UTF8))
    except ValueError as error:
        raise InputError(f"{place}: not JSON: {error}") from error
    try:
        return parse(place, value)
    except ValidationError as error:
        first = error.errors()[:3]
        reasons = (": ".join((".".join(map(str, each["loc"])) or "the line", each["msg"])) for each in first)
        raise InputError(f"{place}: {'; '.join(reasons)}") from error
    except ValueError as error:
        raise InputError(f"{place}: {error}") from error


def check_ids(path: Path, ids: list[str]) -> None:
    """InputError where two lines of a file have the same id."""
    if len(set(ids)) < len(ids):
        raise InputError(f"{path}: two lines have the same id")


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts from JSON lines with `text`, and optionally `kind`, `source` and `id`; InputError as `read_lines`."""

    def parse(place: str, value: Any) -> Prompt:
        record = PromptRecord.model_validate(value)
        return Prompt.of(record, record.text, place)

    prompts = read_lines(path, parse)
    check_ids(path, [prompt.id for prompt in prompts])
    return prompts


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> None:
    path.write_text("".join(json.dumps(asdict(prompt)) + "\n" for prompt in prompts), encoding="utf-8")


def place_of(source: str) -> float:
    """A source's place among all, from 0 to 1, by its hash."""
    return int.from_bytes(hashlib.sha256(f"split {source}".encode()).digest()[:4], "big") / 2**32


def split_of(prompt: Prompt, validation: float, test: float) -> str:
    """The split of a prompt, by a hash of its source, so that adding prompts moves none of the others."""
    share = place_of(prompt.source)
    return "test" if share < test else "validation" if share < test + validation else "train"


def joined(held: Iterable[tuple[str, Hashable]]) -> dict[str, str]:
    """The common name, by source, of sources that belong together because some of their texts are the same; `held` are
    the source and the content of every text."""
    sets = DisjointSet()
    first: dict[Hashable, str] = {}
    for source, content in held:
        sets.add(source)
        sets.merge(source, first.setdefault(content, source))
    # the first one in the alphabet, whatever the order of the texts
    named = ((min(sources), sources) for sources in sets.subsets())
    return {source: name for name, sources in named for source in sources}


def take_evenly(prompts: list[Prompt], count: int | None = None) -> list[Prompt]:
    """The first `count` prompts or all, kinds in turn, in an order that depends on the prompts' ids alone."""
    ordered = sorted(prompts, key=lambda p: hashlib.sha256(f"order {p.id}".encode()).digest())
    by_kind = ([p for p in ordered if p.kind == kind] for kind in sorted({p.kind for p in prompts}))
    return [prompt for turn in zip_longest(*by_kind) for prompt in turn if prompt is not None][:count]
