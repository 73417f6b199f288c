"""Task documents: structured texts, made from source files, whose outputs repeat their material in seven ways.

    edit         a function; the function again with one name replaced
    table        a table of the file's definitions; the same table with reordered columns and perhaps reversed rows
    boilerplate  short functions with a blank; the functions once for each of some names
    code         lines of code; the lines that follow
    prose        lines of docstrings and comments; the lines that follow
    quote        how some definitions begin, in words or code; quotations for the names that are asked for
    mix          several of these, short, one after the other

A document is a prompt (instruction, material, mark) and an output. The prompt ends in a visible character before a line
break, and no token of a byte-level BPE contains both. So the prompt's tokens are the document's first.
"""

from __future__ import annotations

import ast
import random
import re
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial

from transformers import PreTrainedTokenizerFast

from pipelines.pair.corpus import SourceFile, prose_of

MARK = "# Output:"
BLANK = "NAME"
COLUMNS = ("name", "kind", "line", "arguments")
INSTRUCTION = 40  # tokens of instruction and mark, at most about
LONGEST_TOKEN = 8  # characters of a token; no function's average is above that
TRIES = 4  # draws for each document
Count = Callable[[str], int]  # the number of a text's tokens


def counter(tokenizer: PreTrainedTokenizerFast) -> Count:
    return lambda text: len(tokenizer.backend_tokenizer.encode(text))


@dataclass(frozen=True)
class Document:
    """`workload` is one of `WORKLOADS`."""

    workload: str
    instruction: str
    material: str
    output: str

    @property
    def prompt(self) -> str:
        return f"# {self.instruction}\n{self.material}\n{MARK}"

    @property
    def text(self) -> str:
        return f"{self.prompt}\n{self.output}"


class Parts:
    """The pieces of one source file that documents are made from; without definitions if it is not valid Python."""

    def __init__(self, file: SourceFile, count: Count) -> None:
        self.text, self.count = file.text, cache(count)
        self.code_lines = file.text.split("\n")

    @cached_property
    def prose_lines(self) -> list[str]:
        return prose_of(self.text).split("\n")

    @cached_property
    def _nodes(self) -> list[ast.AST]:
        try:
            return list(ast.walk(ast.parse(self.text)))
        except (SyntaxError, ValueError):  # some of the library's test files are not valid Python
            return []

    @cached_property
    def _definitions(self) -> list[ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]:
        found = [n for n in self._nodes if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)]
        return sorted(found, key=lambda node: node.lineno)

    @cached_property
    def _functions(self) -> list[tuple[str, list[str]]]:
        """The source of every function, and the names that it binds and uses more than once."""
        found = []
        for node in self._definitions:
            if not isinstance(node, ast.ClassDef):
                source = textwrap.dedent("\n".join(self.code_lines[node.lineno - 1 : node.end_lineno]))
                bound = {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)} | {
                    n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
                }
                words = Counter(re.findall(r"\w+", source))
                if again := sorted(name for name in bound - {"self", "cls"} if words[name] > 1):
                    found.append((source, again))
        return found

    def functions(self, least: int, most: int) -> list[tuple[str, list[str]]]:
        """The functions of `least` to `most` tokens."""
        short = (each for each in self._functions if len(each[0]) <= LONGEST_TOKEN * most)
        return [each for each in short if least <= self.count(each[0]) <= most]

    def fitting(self, items: Sequence[str], room: int) -> int:
        """How many of the first items, each with a line break, have at most `room` tokens together."""
        for taken, item in enumerate(items):
            room -= self.count(item + "\n")
            if room < 0:
                return taken
        return len(items)

    @cached_property
    def names(self) -> list[str]:
        """The file's public identifiers of 3 to 16 characters."""
        found = {node.id for node in self._nodes if isinstance(node, ast.Name)}
        found |= {node.attr for node in self._nodes if isinstance(node, ast.Attribute)}
        return sorted(name for name in found if 3 <= len(name) <= 16 and not name.startswith("_"))

    @cached_property
    def rows(self) -> list[tuple[str, ...]]:
        """The `COLUMNS` of every definition."""
        found: list[tuple[str, ...]] = []
        for node in self._definitions:
            kind, arguments = "class", "-"
            if not isinstance(node, ast.ClassDef):
                kind, arguments = "function", ", ".join(each.arg for each in node.args.args) or "-"
            found.append((node.name, kind, str(node.lineno), arguments))
        return found

    @cached_property
    def sayings(self) -> list[tuple[str, str]]:
        """Names of definitions, and their first line of code or their docstring's first paragraph."""
        said = {}
        for node in self._definitions:
            docstring = ast.get_docstring(node)
            first = docstring.split("\n\n")[0] if docstring else self.code_lines[node.body[0].lineno - 1]
            said[node.name] = " ".join(first.split())
        return [(name, saying) for name, saying in said.items() if len(saying) > 20]


def _word(name: str) -> re.Pattern[str]:
    return re.compile(rf"\b{re.escape(name)}\b")


def _edit(parts: Parts, rng: random.Random, room: int) -> Document | None:
    functions = parts.functions(room // 3, room)
    if not functions or not parts.names:
        return None
    source, bound = rng.choice(functions)
    old, new = rng.choice(bound), rng.choice(parts.names)
    if _word(new).search(source):
        return None
    return Document("edit", f"Rename {old} to {new} in this function.", source, _word(old).sub(new, source))


def _table(parts: Parts, rng: random.Random, room: int) -> Document | None:
    first = rng.randrange(len(parts.rows) + 1)
    lines = [" | ".join(row) for row in parts.rows[first:]]
    rows = parts.rows[first : first + parts.fitting(lines, room)]
    if len(rows) < 2:
        return None
    order = rng.sample(range(len(COLUMNS)), len(COLUMNS))
    direction, listed = ("last to the first", rows[::-1]) if rng.random() < 0.5 else ("first", rows)
    columns = ", ".join(COLUMNS[c] for c in order)
    return Document(
        "table",
        f"Write this table with the columns {columns}, rows from the {direction}.",
        "\n".join(" | ".join(row) for row in (COLUMNS, *rows)),
        "\n".join(" | ".join(row[c] for c in order) for row in listed),
    )


def _boilerplate(parts: Parts, rng: random.Random, room: int) -> Document | None:
    functions = parts.functions(1, room // 4)
    chosen = rng.sample(functions, min(len(functions), rng.choice((1, 2, 3))))
    template = "\n\n".join(_word(rng.choice(bound)).sub(BLANK, source) for source, bound in chosen)
    unused = [name for name in parts.names if not _word(name).search(template)]
    names = rng.sample(unused, min(len(unused), 8))
    filled = [_word(BLANK).sub(name, template) + "\n" for name in names]
    names = names[: parts.fitting(filled, room)]
    if not template or len(names) < 2:
        return None
    output = "\n".join(filled[: len(names)]).rstrip()
    return Document("boilerplate", f"Write this with {BLANK} as {', '.join(names)}.", template, output)


def _continued(workload: str, parts: Parts, rng: random.Random, room: int) -> Document | None:
    lines = parts.code_lines if workload == "code" else parts.prose_lines
    first = rng.randrange(len(lines))
    middle = first + parts.fitting(lines[first : first + room], room)
    last = middle + parts.fitting(lines[middle : middle + room], room)
    material, output = "\n".join(lines[first:middle]).rstrip(), "\n".join(lines[middle:last]).rstrip()
    return Document(workload, f"Continue this {workload}.", material, output) if material and output else None


def _quote(parts: Parts, rng: random.Random, room: int) -> Document | None:
    first = rng.randrange(len(parts.sayings) + 1)
    lines = [f"{name}: {saying}" for name, saying in parts.sayings[first:]]
    said = parts.sayings[first : first + parts.fitting(lines, room)]
    if len(said) < 2:
        return None
    asked = rng.sample(said, len(said))
    output = "\n".join(f'{name}: "{saying}"' for name, saying in asked)
    names = ", ".join(name for name, _ in asked)
    return Document("quote", f"How do {names} begin? Quote.", "\n".join(lines[: len(said)]), output)


def _mix(parts: Parts, rng: random.Random, room: int) -> Document | None:
    """Three or four other documents, numbered: all instructions and materials, then all outputs."""
    tasks = rng.sample([maker for workload, maker in MAKERS.items() if workload != "mix"], rng.choice((3, 4)))
    made = [_drawn(maker, parts, rng, room // len(tasks) - INSTRUCTION // 4) for maker in tasks]
    numbered = list(enumerate([document for document in made if document is not None], 1))
    if len(numbered) < 2:
        return None
    return Document(
        "mix",
        "Do these one after the other.",
        "\n".join(f"# {n}. {document.instruction}\n{document.material}" for n, document in numbered),
        "\n".join(f"# {n}.\n{document.output}" for n, document in numbered),
    )


Maker = Callable[[Parts, random.Random, int], Document | None]
MAKERS: dict[str, Maker] = {
    "edit": _edit,
    "table": _table,
    "boilerplate": _boilerplate,
    "code": partial(_continued, "code"),
    "prose": partial(_continued, "prose"),
    "quote": _quote,
    "mix": _mix,
}
WORKLOADS = tuple(MAKERS)


def _drawn(maker: Maker, parts: Parts, rng: random.Random, room: int) -> Document | None:
    """A document whose material and output have at most `room` tokens each, if a few draws give one."""
    for _ in range(TRIES):
        document = maker(parts, rng, room)
        if document and max(parts.count(document.material), parts.count(document.output)) <= room:
            return document
    return None


def documents(file: SourceFile, number: int, count: Count, tokens: int) -> Iterator[Document]:
    """At most `number` different documents of each workload from one file, the same ones every time.

    Args:
        tokens: the most tokens of a prompt, and of an output with its end; both together have at least as many.
    """
    parts = Parts(file, count)
    for workload, maker in MAKERS.items():
        rng = random.Random(f"{file.path} {workload}")
        drawn = (_drawn(maker, parts, rng, tokens - INSTRUCTION) for _ in range(2 * number))
        fitting = []
        for document in {document.text: document for document in drawn if document}.values():
            prompt, output = count(document.prompt), count("\n" + document.output) + 1
            if max(prompt, output) <= tokens <= prompt + output:
                fitting.append(document)
        yield from fitting[:number]
