"""Which way the arrows run: drawn from the import statements of every module."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from pipelines.cli import STAGES

ROOT = Path(__file__).parent.parent
SHARED = tuple(f"pipelines.{name}" for name in ("run", "plans", "terminal", "tracking", "config"))
# what the modules of a room may import of the product
ALLOWED = {
    "selector": ("selector",),
    "data_gen": ("data_gen", "selector"),
    **dict.fromkeys(SHARED, (*SHARED, "data_gen", "selector")),
}
for number, stage in enumerate(STAGES, 1):
    earlier = [f"pipelines.{name}" for name in STAGES[:number]]
    ALLOWED[f"pipelines.{stage}"] = (*earlier, *SHARED, "data_gen", "selector")


def modules() -> dict[str, Path]:
    """Every module of the product, by its dotted name."""
    paths = {}
    for package in ("selector", "data_gen", "pipelines"):
        for path in (ROOT / package).rglob("*.py"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            paths[name.removesuffix(".__init__")] = path
    return paths


MODULES = modules()


@cache
def imports(name: str) -> set[str]:
    """The product's modules that a module imports, anywhere in it."""
    imported = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                imported.add(inner if inner in MODULES else node.module)
    return (imported & set(MODULES)) - {name}


def inside(name: str, rooms: tuple[str, ...]) -> bool:
    return any(name == room or name.startswith(f"{room}.") for room in rooms)


def test_no_module_imports_itself_by_way_of_others() -> None:
    # its CycleError names the modules
    TopologicalSorter({name: imports(name) for name in MODULES}).prepare()


@pytest.mark.parametrize("room", ALLOWED)
def test_rooms_do_not_know_the_rooms_above_them(room: str) -> None:
    names = [name for name in MODULES if inside(name, (room,))]
    assert names
    for name in names:
        assert not [other for other in imports(name) if not inside(other, ALLOWED[room])], name
