"""Prompts: how they are read, what tokens they are, and which split they belong to.

The data sets are in `prompt_sets`.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import re
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from itertools import cycle, zip_longest
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import pyarrow as pa
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json
from scipy.cluster.hierarchy import DisjointSet

from selector.schema import InputError

T = TypeVar("T")
LONG = 200  # characters for each token that is kept: what is beyond them of a text is not read
PACKED = {".gz": "gzip", ".zst": "zstd"}  # how a file of lines is compressed, by suffix
# where a template writes today's date, in a format
DATE = re.compile(r"""strftime_now\(\s*(["'])(?P<format>.*?)\1\s*\)""")
# stand for turns, to find what a template puts around them
MARKS = ("@@one@@", "@@two@@", "@@three@@")


def _name(value: Any) -> str | None:
    """A number's name is its digits, and NaN, as pandas writes it, is none."""
    if value is None or value != value:
        return None
    # as pandas writes integers beside missing ones
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, str | int | float):
        raise ValueError("a name is a string or a number")
    return str(value)


Name = Annotated[str | None, BeforeValidator(_name)]


class Record(BaseModel):
    """What a line of a file says of its text; further keys are ignored."""

    model_config = ConfigDict(strict=True)
    id: Name = None
    source: Name = None
    kind: Name = None


class PromptRecord(Record):
    text: str = Field(pattern=r"\S")
    is_last_turn: bool = False  # of a conversation whose other turns are left out

    @model_validator(mode="before")
    @classmethod
    def last_turn(cls, line: Any) -> Any:
        """A conversation's text is its last user's turn, of which text parts are joined."""
        if not isinstance(line, dict) or "text" in line:
            return line
        if not isinstance(line.get("messages"), list):
            return line
        turns = []
        for turn in line["messages"]:
            if isinstance(turn, dict) and turn.get("role") == "user":
                turns.append(turn)
        if not turns:
            raise ValueError("messages: no user's turn")
        text = _joined_parts(turns[-1].get("content"))
        return {**line, "text": text, "is_last_turn": len(line["messages"]) > 1}


def _joined_parts(content: Any) -> Any:
    """The text of a turn, whose content may be a list of parts; ValueError where a part is no
    text."""
    if not isinstance(content, list):
        return content
    texts: list[str] = []
    for part in content:
        text = part.get("text") if isinstance(part, dict) else part
        if not isinstance(text, str):
            kind = part.get("type") if isinstance(part, dict) else part
            raise ValueError(f"messages: a part of the last user's turn is no text but {kind!r}")
        texts.append(text)
    return "".join(texts)


@dataclass(frozen=True)
class Prompt:
    """A text to continue. All prompts of one `source` belong to the same split."""

    id: str
    text: str
    kind: str
    source: str
    is_last_turn: bool = False  # of a conversation whose other turns are left out

    @classmethod
    def of(cls, record: Record, text: str, origin: str) -> Prompt:
        """The prompt of a line at an origin, `file:number`."""
        prompt_id = record.id or f"line-{origin.rpartition(':')[2]}"
        source = record.source or prompt_id
        is_last_turn = isinstance(record, PromptRecord) and record.is_last_turn
        return cls(prompt_id, text, record.kind or "text", source, is_last_turn)


class Turns(NamedTuple):
    """The tokens around the turns of texts. A model that continues a text samples the first one of
    `to_answer` and of `to_user` itself: it ends a turn."""

    opening: list[int]  # before a text or, in a chat template, the user's first turn
    to_answer: list[int]  # after a user's turn; empty without a chat template
    to_user: list[int]  # after an answer; empty where the template takes no further turn


@dataclass(frozen=True)
class Form:
    """How prompts become tokens.

    Attributes:
        tokens: the longest prompt.
        longer: what becomes of a longer one. `start` keeps its first tokens, `end` its last ones
            and the special tokens that every text begins with, and `drop` leaves the prompt out.
        chat: the text is a user's turn in the tokenizer's chat template, and the model's turn
            begins after it.
        system: the text of the template's system turn; None for no such turn.
        day: the day that the template may write; None for today.
    """

    tokens: int
    longer: str = "start"
    chat: bool = False
    system: str | None = None
    day: date | None = None

    def texts(self, tokenizer: Any, prompts: Iterable[Prompt]) -> list[str]:
        """The texts whose tokens the prompts are, but of very long ones only more than is kept.
        InputError where there is no chat template, or it takes no system turn."""
        most = LONG * self.tokens
        part = slice(-most, None) if self.longer == "end" else slice(most)
        texts = [prompt.text[part] for prompt in prompts]
        if self.chat:
            texts = [self._in_template(tokenizer, text) for text in texts]
        return texts

    def whole(self, tokenizer: Any, prompts: Iterable[Prompt]) -> list[list[int]]:
        """All token ids of each of the `texts`, and one BOS where the text has one, too; InputError
        as there."""
        texts = self.texts(tokenizer, prompts)
        return self._tokens(tokenizer, texts) if texts else []

    def turns(self, tokenizer: Any) -> Turns:
        """The tokens around the turns of these prompts' texts; InputError as in `texts`."""
        first, second, third = MARKS
        if not self.chat:
            (ids,) = self._tokens(tokenizer, [first])
            return Turns(ids[: _special(tokenizer, ids)], [], [])
        opening, _, to_answer = self._in_template(tokenizer, first).partition(first)
        to_user = ""
        with suppress(InputError):  # it takes no such turns
            conversation = self._in_template(tokenizer, *MARKS)
            to_user, has_third, _ = conversation.partition(second)[2].partition(third)
            to_user = to_user if has_third else ""
        return Turns(*self._tokens(tokenizer, [opening, to_answer, to_user]))

    def _tokens(self, tokenizer: Any, texts: list[str]) -> list[list[int]]:
        bos_twice = [tokenizer.bos_token_id] * 2
        encoded: list[list[int]] = []
        for ids in tokenizer(texts, add_special_tokens=not self.chat)["input_ids"]:
            has_two = ids[:2] == bos_twice
            encoded.append(ids[1:] if has_two else ids)
        return encoded

    def _in_template(self, tokenizer: Any, *contents: str) -> str:
        """Turns of the user and the model, and the beginning of the model's next turn."""
        name = tokenizer.name_or_path
        if not tokenizer.chat_template:
            raise InputError(f"prompts.chat: the tokenizer of {name} has no chat template")
        turns = []
        if self.system is not None:
            turns.append({"role": "system", "content": self.system})
        for role, content in zip(cycle(("user", "assistant")), contents, strict=False):
            turns.append({"role": role, "content": content})
        try:
            template = tokenizer.get_chat_template()
            if self.day is not None:
                template = DATE.sub(partial(_literal, self.day), template)
            return str(
                tokenizer.apply_chat_template(
                    turns, chat_template=template, tokenize=False, add_generation_prompt=True
                )
            )
        except Exception as error:  # a template is a program, and may raise anything
            key = "chat" if self.system is None else "system"
            raise InputError(
                f"prompts.{key}: the chat template of {name} refuses: {error}"
            ) from error

    def fit(self, tokenizer: Any, prompts: list[Prompt]) -> tuple[list[Prompt], str]:
        """The prompts that are kept, and a sentence on all of them. Of prompts with the same
        tokens, once they are cut, only the first is kept: the others could be in other splits."""
        encoded = self.whole(tokenizer, prompts)
        kept: dict[tuple[int, ...], Prompt] = {}
        longer = dropped = 0
        for prompt, ids in zip(prompts, encoded, strict=True):
            if len(ids) > self.tokens:
                longer += 1
                if self.longer == "drop":
                    dropped += 1
                    continue
            kept.setdefault(tuple(self.cut(tokenizer, ids)), prompt)
        longest = max(len(ids) for ids in encoded)
        sentence = f"{len(prompts)} texts of up to {longest} tokens"
        if longer:
            treatment = "left out" if self.longer == "drop" else f"cut to their {self.longer}"
            sentence += (
                f"; {longer} of them are longer than prompts.tokens={self.tokens} and are "
                f"{treatment}"
            )
        last_turns = sum(prompt.is_last_turn for prompt in prompts)
        if last_turns:
            sentence += f"; {last_turns} are last turns of conversations, without the other turns"
        repeated = len(prompts) - dropped - len(kept)
        if repeated:
            sentence += f"; {repeated} with the tokens of an earlier one are left out"
        return list(kept.values()), sentence

    def cut(self, tokenizer: Any, ids: list[int]) -> list[int]:
        """At most `tokens` of a prompt's tokens."""
        if self.longer != "end" or len(ids) <= self.tokens:
            return ids[: self.tokens]
        first = _special(tokenizer, ids)
        return ids[:first] + ids[len(ids) - self.tokens + first :]

    def encode(self, tokenizer: Any, prompt: Prompt) -> list[int]:
        """The token ids of a prompt, at most `tokens`."""
        return self.cut(tokenizer, self.whole(tokenizer, [prompt])[0])


def _literal(day: date, call: re.Match[str]) -> str:
    return repr(day.strftime(call["format"]))


def _special(tokenizer: Any, ids: list[int]) -> int:
    """How many special tokens some ids begin with; 0 where there are no others."""
    special_ids = tokenizer.all_special_ids
    return next((n for n, token in enumerate(ids) if token not in special_ids), 0)


def parsed_lines(path: Path, parse: Callable[[str, Any], T]) -> Iterator[T | InputError]:
    """What `parse` makes of the JSON of each line that is not blank, and of its origin,
    `file:number`; where a line does not fit, the error that names the file and the line. InputError
    where the file is missing, damaged or empty."""
    empty = True
    try:
        with path.open("rb") as file:
            packed = PACKED.get(path.suffix)
            lines: Iterable[bytes] = file
            if packed:
                lines = io.BufferedReader(pa.CompressedInputStream(file, packed))
            for number, line in enumerate(lines, 1):
                if line.strip():
                    empty = False
                    yield _parsed(f"{path}:{number}", line, parse)
    except OSError as error:
        raise InputError(f"{path}: {error.strerror or error}") from error
    if empty:
        raise InputError(f"{path}: no lines there")


def read_lines(path: Path, parse: Callable[[str, Any], T]) -> list[T]:
    """What `parse` makes of every line; InputError as `parsed_lines`, and for the first line that
    does not fit."""
    records = []
    for record in parsed_lines(path, parse):
        if isinstance(record, InputError):
            raise record
        records.append(record)
    return records


def _parsed(origin: str, line: bytes, parse: Callable[[str, Any], T]) -> T | InputError:
    try:
        value = from_json(line.removeprefix(codecs.BOM_UTF8))
    except ValueError as error:
        return InputError(f"{origin}: not JSON: {error}")
    try:
        return parse(origin, value)
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"])) or "the line"
        return InputError(f"{origin}: {key}: {problem['msg']}")
    except ValueError as error:
        return InputError(f"{origin}: {error}")


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts from JSON lines with `text`, or a conversation in `messages`, and optionally `kind`,
    `source` and `id`; InputError as `read_lines`, and where two lines have the same id."""

    def parse(origin: str, value: Any) -> Prompt:
        record = PromptRecord.model_validate(value)
        return Prompt.of(record, record.text, origin)

    prompts = read_lines(path, parse)
    if len({prompt.id for prompt in prompts}) < len(prompts):
        raise InputError(f"{path}: two lines have the same id")
    return prompts


def write_prompts(path: Path, prompts: Iterable[Prompt]) -> None:
    lines = [json.dumps(asdict(prompt)) + "\n" for prompt in prompts]
    path.write_text("".join(lines), encoding="utf-8")


def place_of(source: str) -> float:
    """A source's place among all, from 0 to 1, by its hash."""
    digest = hashlib.sha256(f"split {source}".encode()).digest()
    return int.from_bytes(digest[:4], "big") / 2**32


def split_of(prompt: Prompt, validation: float, test: float) -> str:
    """The split of a prompt, by a hash of its source, so that adding prompts moves none of the
    others."""
    share = place_of(prompt.source)
    if share < test:
        return "test"
    if share < test + validation:
        return "validation"
    return "train"


def joined(held: Iterable[tuple[str, Hashable]]) -> dict[str, str]:
    """The common name, by source, of sources that belong together because some of their texts are
    the same; `held` are the source and the content of every text."""
    sets = DisjointSet()
    first: dict[Hashable, str] = {}
    for source, content in held:
        sets.add(source)
        sets.merge(source, first.setdefault(content, source))
    names: dict[str, str] = {}
    for sources in sets.subsets():
        # the first one in the alphabet, whatever the order of the texts
        name = min(sources)
        for source in sources:
            names[source] = name
    return names


def take_evenly(prompts: list[Prompt], count: int | None = None) -> list[Prompt]:
    """The first `count` prompts or all, kinds in turn, in an order that depends on the prompts' ids
    alone."""
    kinds = sorted({prompt.kind for prompt in prompts})
    by_kind: dict[str, list[Prompt]] = {kind: [] for kind in kinds}
    for prompt in sorted(prompts, key=_order):
        by_kind[prompt.kind].append(prompt)
    in_turn: list[Prompt] = []
    for turn in zip_longest(*by_kind.values()):
        in_turn += [prompt for prompt in turn if prompt is not None]
    return in_turn[:count]


def _order(prompt: Prompt) -> bytes:
    return hashlib.sha256(f"order {prompt.id}".encode()).digest()
