"""The corpus of the embedded pair: the standard library of the running Python, which every machine already has.

Files are held out by a hash of their path. Held-out files give prompts of these kinds:

    code    modules of the library            tests   modules below `test/` or `tests/`
    prose   docstrings and comments of code   data    tables: character maps, entity names, topics
"""

from __future__ import annotations

import ast
import hashlib
import io
import sys
import sysconfig
import tokenize
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

KINDS = ("code", "prose", "tests", "data")
SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
HELD_OUT = 0.12  # share of the files that training must not see
LARGEST_FILE = 300_000  # characters, so that no single file of tables dominates the corpus


@dataclass(frozen=True)
class SourceFile:
    """One file of the corpus; `kind` is 'code', 'tests' or 'data'."""

    path: str
    kind: str
    text: str
    sha256: str
    held_out: bool


def stdlib_files() -> list[SourceFile]:
    """Every readable `.py` file of the running Python's standard library, in sorted order."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if SKIPPED_FOLDERS & set(relative.parts):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError):  # dangling links and test files in other encodings
            continue
        if text.strip() and len(text) <= LARGEST_FILE:
            name = relative.as_posix()
            digest = hashlib.sha256(text.encode()).hexdigest()
            share = int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") / 2**32
            files.append(SourceFile(name, kind_of(name, text), text, digest, share < HELD_OUT))
    return files


def described(files: list[SourceFile]) -> dict[str, Any]:
    """What tells these files from those of another Python."""
    digest = hashlib.sha256("".join(file.path + file.sha256 for file in files).encode()).hexdigest()[:16]
    return {"files": len(files), "python": sys.version.split()[0], "sha256": digest}


def kind_of(name: str, text: str) -> str:
    """'tests' by folder or name, 'data' where most lines are literals, 'code' otherwise."""
    parts = name.split("/")
    if {"test", "tests", "idle_test"} & set(parts[:-1]) or parts[-1].startswith("test_"):
        return "tests"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    literals = sum(line[0] in "'\"([{)]}0123456789-" or line[:2] in ("b'", "u'") for line in lines)
    return "data" if literals > 0.6 * len(lines) else "code"


@cache
def prose_of(text: str) -> str:
    """The docstrings and comments of a module, in order, as running text."""
    pieces: list[tuple[int, str]] = []
    try:
        tree = ast.parse(text)
        tokens = list(tokenize.generate_tokens(io.StringIO(text).readline))
    except (SyntaxError, tokenize.TokenError):  # some of the library's test files are not valid Python
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and (
            docstring := ast.get_docstring(node)
        ):
            pieces.append((node.body[0].lineno, docstring))
    pieces += [(t.start[0], t.string.lstrip("#: ")) for t in tokens if t.type == tokenize.COMMENT]
    return "\n".join(piece for _, piece in sorted(pieces))
