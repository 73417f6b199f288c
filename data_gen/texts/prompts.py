"""Prompts: how they are read, what tokens they are, and which split they belong to.

They come from JSON lines, or from a data set on the hub or in a local file with the same fields:
`.json`, `.jsonl` or `.parquet`, packed or not; any other file is plain text with one record per
line. Only the first turn of a data set's conversations is taken. The source of its prompts is their
text, so that splits do not depend on the order of a file, and the same text is taken once.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import string
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, TypeVar

import pyarrow as pa
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import from_json
from scipy.cluster.hierarchy import DisjointSet

from selector.files import first_line
from selector.schema import InputError

T = TypeVar("T")
LONG = 200  # characters for each token that is kept: what is beyond them of a text is not read
PACKED = {".gz": "gzip", ".zst": "zstd"}  # how a file of lines is compressed, by suffix


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

    @model_validator(mode="before")
    @classmethod
    def last_turn(cls, line: Any) -> Any:
        """A conversation's text is its last user's turn."""
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
        return {**line, "text": turns[-1].get("content")}


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
        prompt_id = record.id or f"line-{place.rpartition(':')[2]}"
        return cls(prompt_id, text, record.kind or "text", record.source or prompt_id)


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
    """

    tokens: int
    longer: str = "start"
    chat: bool = False
    system: str | None = None

    def whole(self, tokenizer: Any, prompts: Iterable[Prompt]) -> list[list[int]]:
        """All token ids of each prompt, but of very long ones only more than are kept, and one BOS
        where the text has one, too; InputError where there is no chat template, or it takes no
        system turn."""
        most = LONG * self.tokens
        part = slice(-most, None) if self.longer == "end" else slice(most)
        texts = [prompt.text[part] for prompt in prompts]
        if self.chat:
            texts = [self._in_template(tokenizer, text) for text in texts]
        if not texts:
            return []
        bos_twice = [tokenizer.bos_token_id] * 2
        encoded: list[list[int]] = []
        for ids in tokenizer(texts, add_special_tokens=not self.chat)["input_ids"]:
            has_two = ids[:2] == bos_twice
            encoded.append(ids[1:] if has_two else ids)
        return encoded

    def _in_template(self, tokenizer: Any, text: str) -> str:
        name = tokenizer.name_or_path
        if not tokenizer.chat_template:
            raise InputError(f"prompts.chat: the tokenizer of {name} has no chat template")
        turns = [{"role": "user", "content": text}]
        if self.system is not None:
            turns.insert(0, {"role": "system", "content": self.system})
        try:
            return str(
                tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
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
        repeated = len(prompts) - dropped - len(kept)
        if repeated:
            sentence += f"; {repeated} with the tokens of an earlier one are left out"
        return list(kept.values()), sentence

    def cut(self, tokenizer: Any, ids: list[int]) -> list[int]:
        """At most `tokens` of a prompt's tokens."""
        if self.longer != "end" or len(ids) <= self.tokens:
            return ids[: self.tokens]
        special_ids = tokenizer.all_special_ids
        first = next((n for n, token in enumerate(ids) if token not in special_ids), 0)
        return ids[:first] + ids[len(ids) - self.tokens + first :]

    def encode(self, tokenizer: Any, prompt: Prompt) -> list[int]:
        """The token ids of a prompt, at most `tokens`."""
        return self.cut(tokenizer, self.whole(tokenizer, [prompt])[0])


def parsed_lines(path: Path, parse: Callable[[str, Any], T]) -> Iterator[T | InputError]:
    """What `parse` makes of the JSON of each line that is not blank, and of its place,
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


def _parsed(place: str, line: bytes, parse: Callable[[str, Any], T]) -> T | InputError:
    try:
        value = from_json(line.removeprefix(codecs.BOM_UTF8))
    except ValueError as error:
        return InputError(f"{place}: not JSON: {error}")
    try:
        return parse(place, value)
    except ValidationError as error:
        reasons = []
        for problem in error.errors()[:3]:
            field_path = ".".join(map(str, problem["loc"])) or "the line"
            reasons.append(f"{field_path}: {problem['msg']}")
        return InputError(f"{place}: {'; '.join(reasons)}")
    except ValueError as error:
        return InputError(f"{place}: {error}")


def check_ids(path: Path, ids: list[str]) -> None:
    """InputError where two lines of a file have the same id."""
    if len(set(ids)) < len(ids):
        raise InputError(f"{path}: two lines have the same id")


def read_prompts(path: Path) -> list[Prompt]:
    """Prompts from JSON lines with `text`, or a conversation in `messages`, and optionally `kind`,
    `source` and `id`; InputError as `read_lines`."""

    def parse(place: str, value: Any) -> Prompt:
        record = PromptRecord.model_validate(value)
        return Prompt.of(record, record.text, place)

    prompts = read_lines(path, parse)
    check_ids(path, [prompt.id for prompt in prompts])
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


@dataclass(frozen=True)
class PromptSet:
    """A data set. The format strings are over a record's fields."""

    # arguments of `datasets.load_dataset`, with split `train` by default; empty: a file is needed
    hub: dict[str, str]
    # format strings; the first one whose fields all exist makes the prompt
    prompts: tuple[str, ...]
    kind: str = ""  # a format string for the task; the set's name if empty
    # other names for some of the tasks that `kind` gives
    kinds: dict[str, str] = field(default_factory=dict)


TASKS = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
MULTI_TURN = dict.fromkeys(TASKS, "multi_turn")
CODE = "Write a Python program that solves this problem.\n\n{question_content}\n\n{starter_code}"
TRANSLATE = "Translate from English to {to}:\n\n{{translation[en]}}"
LIVECODE = "hf://datasets/livecodebench/code_generation_lite/*.jsonl"
SPEC_BENCH = (
    "https://raw.githubusercontent.com/hemingkx/Spec-Bench/main/data/spec_bench/question.jsonl"
)
FLORES = (
    "https://raw.githubusercontent.com/Helsinki-NLP/OPUS-MT-testsets/master/datasets/facebook/"
    "flores/flores101_dataset/devtest/eng.devtest"
)
SUBTITLES = (
    "hf://datasets/Helsinki-NLP/open_subtitles@refs%2Fconvert%2Fparquet/en-hi/train/*.parquet"
)
SETS = {
    "math500": PromptSet({"path": "HuggingFaceH4/MATH-500", "split": "test"}, ("{problem}",)),
    "olympiadbench": PromptSet(
        {"path": "Hothan/OlympiadBench", "name": "OE_TO_maths_en_COMP"}, ("{question}",)
    ),
    "livecodebench": PromptSet({"path": "json", "data_files": LIVECODE}, ("{turns[0]}", CODE)),
    "litbench": PromptSet({"path": "SAA-Lab/LitBench-Train"}, ("{prompt}",)),
    "opus_books": PromptSet(
        {"path": "Helsinki-NLP/opus_books", "name": "en-fr"}, (TRANSLATE.format(to="French"),)
    ),
    "opus_subtitles": PromptSet(
        {"path": "parquet", "data_files": SUBTITLES}, (TRANSLATE.format(to="Hindi"),)
    ),
    "flores": PromptSet(
        {"path": "text", "data_files": FLORES}, ("Translate from English to French:\n\n{text}",)
    ),
    "spec_bench": PromptSet(
        {"path": "json", "data_files": SPEC_BENCH}, ("{turns[0]}",), "{category}", MULTI_TURN
    ),
    "mt_bench": PromptSet(
        {"path": "HuggingFaceH4/mt_bench_prompts"}, ("{turns[0]}", "{prompt[0]}"), "{category}"
    ),
    "gsm8k": PromptSet({"path": "openai/gsm8k", "name": "main", "split": "test"}, ("{question}",)),
    "humaneval": PromptSet({"path": "openai/openai_humaneval", "split": "test"}, ("{prompt}",)),
    "lines": PromptSet({}, ("{text}",)),
}


def read_set(
    name: str, file: Path | None = None, called: str | None = None
) -> tuple[list[Prompt], int]:
    """The prompts of a set, of the kinds of its tasks or `called`, and its number of records. Empty
    and repeated texts give no prompt. InputError, with the set and the record, where they cannot be
    read or a record has other fields."""
    prompt_set = SETS[name]
    origin = file or prompt_set.hub["path"]
    where = f"prompts.sets: {name}: {origin}"
    default_kind = name
    if file is not None and not prompt_set.hub:
        default_kind = file.stem
    prompts: dict[str, Prompt] = {}
    number = 0
    for number, record in enumerate(_records(name, file), 1):
        try:
            text = _first_filled(prompt_set.prompts, record)
            kind = called or _filled(prompt_set.kind, record) or default_kind
        except ValueError as error:
            raise InputError(f"{where}: record {number}: {error}") from error
        if text is None:
            templates = ", ".join(prompt_set.prompts)
            raise InputError(f"{where}: record {number} has not the fields of {templates!r}")
        identity = f"{name}:{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        if text.strip():
            kind = prompt_set.kinds.get(kind, kind)
            prompts.setdefault(identity, Prompt(identity, text, kind, identity))
    if not prompts:
        raise InputError(f"{where}: holds no prompts")
    return list(prompts.values()), number


class _Fields(string.Formatter):
    """Treats an empty field of a record as a missing one, and a string where there should be turns
    as the first one."""

    def get_field(self, field_name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        name = field_name.partition("[")[0]
        whole = kwargs.get(name)
        if isinstance(whole, str):
            value = whole
        else:
            value, _ = super().get_field(field_name, args, kwargs)
        if value is None:
            raise KeyError(field_name)
        if not isinstance(value, str | int | float):
            raise ValueError(f"{field_name} is no text, but was read as a {type(value).__name__}")
        return value, name


def _first_filled(templates: Iterable[str], record: dict[str, Any]) -> str | None:
    for template in templates:
        text = _filled(template, record)
        if text is not None:
            return text
    return None


def _filled(template: str, record: dict[str, Any]) -> str | None:
    try:
        return _Fields().vformat(template, (), record)
    except (KeyError, IndexError, TypeError, AttributeError):
        return None


def _records(name: str, file: Path | None) -> Iterator[Any]:
    source: dict[str, Any] = SETS[name].hub
    try:
        if file is not None:
            if {".json", ".jsonl"} & {*file.suffixes}:
                yield from _json_records(file)
                return
            file_type = "parquet" if ".parquet" in file.suffixes else "text"
            source = {"path": file_type, "data_files": str(file)}
        from datasets import load_dataset  # a second to import

        arguments: dict[str, Any] = {"split": "train", **source}
        yield from load_dataset(**arguments, streaming=True)
    except Exception as error:  # a damaged file or a missing network may raise anything
        origin = file or source["path"]
        raise InputError(
            f"prompts.sets: {name}: cannot read {origin}: {first_line(error)}"
        ) from error


def _json_records(file: Path) -> list[Any]:
    """As they stand: `datasets` guesses dates, and quotes all texts of a field whose type changes
    in a large file."""
    try:
        content = from_json(pa.input_stream(str(file)).read())  # unpacks by the name's end
    except ValueError:  # lines
        return read_lines(file, lambda _, record: record)
    return content if isinstance(content, list) else [content]
