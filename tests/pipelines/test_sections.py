"""Every stage declares the parts of the config that its code reads: what can be reached from its `plan` and `run`."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from pipelines.cli import APART, STAGES, declared_by, module_of
from pipelines.config import Config

ROOT = Path(__file__).parents[2]
READ_BY_ALL = {"name", "seed"}
Place = tuple[str, str]  # a module and a name at its top level


@cache
def module(name: str) -> tuple[dict[str, ast.AST], dict[str, str]]:
    """What a module of `pipelines` defines at its top level, and the dotted names that it imports, by local name."""
    path = ROOT / name.replace(".", "/")
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    if not (name.startswith("pipelines") and path.exists()):
        return {}, {}
    tree, defined, imported = ast.parse(path.read_text()), {}, {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            stored = (each for each in ast.walk(node) if isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store))
            defined |= dict.fromkeys((each.id for each in stored), node)
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            imported |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return defined, imported


def uses(place: Place) -> tuple[set[Place], set[str]]:
    """The places that one place mentions, and the keys of the config that it reads."""
    name, own = place
    defined, imported = module(name)
    if own not in defined:
        return ({tuple(imported[own].rsplit(".", 1))} if own in imported else set()), set()
    mentioned, read = set(), set()
    for node in ast.walk(defined[own]):
        if isinstance(node, ast.Name):
            mentioned.add((name, node.id))
        elif isinstance(node, ast.Attribute):
            value = node.value
            if isinstance(value, ast.Name) and value.id in imported:
                mentioned.add((imported[value.id], node.attr))
            holder = value.id if isinstance(value, ast.Name) else getattr(value, "attr", None)
            if holder == "config" and node.attr in Config.model_fields:
                read.add(node.attr)
    return mentioned - {place}, read


def reachable(stage: str) -> set[str]:
    todo: list[Place] = [(module_of(stage), "plan"), (module_of(stage), "run")]
    seen, found = set(todo), set[str]()
    while todo:
        mentioned, read = uses(todo.pop())
        found |= read
        todo += mentioned - seen
        seen |= mentioned
    return found


@pytest.mark.parametrize("stage", [*STAGES, *APART])
def test_a_stage_declares_what_it_reads(stage: str) -> None:
    sections = declared_by(stage)[1]
    assert len(set(sections)) == len(sections) and set(sections) == reachable(stage) - READ_BY_ALL


def test_the_walk_sees_what_stands_in_helpers_of_other_modules() -> None:
    assert "data" in reachable("pair") and "evaluate" not in reachable("pair")
