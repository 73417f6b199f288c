"""Which way the arrows run: drawn from the import statements of every module."""

from __future__ import annotations

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
STAGES = ("pair", "latency", "data", "train", "evaluate", "export", "report")
BELOW = tuple(f"pipelines.{room}" for room in ("run", "tracking", "config"))


def modules() -> dict[str, Path]:
    """Every module of the product, by its dotted name."""
    found = {}
    for package in ("selector", "data_gen", "pipelines"):
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


@cache
def imports(name: str) -> set[str]:
    """The product's modules that a module imports, anywhere in it; a package's own `__init__`
    apart."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            found |= {each if each in MODULES else node.module for each in inner.values()}
    return {each for each in found if each in MODULES and each != name}


def test_no_module_imports_itself_by_way_of_others() -> None:
    # its CycleError names the modules
    TopologicalSorter({name: imports(name) for name in MODULES}).prepare()


@pytest.mark.parametrize(
    ("room", "never", "but"),
    [
        ("selector", ("data_gen", "pipelines"), ()),
        ("data_gen", ("pipelines",), ()),
        *((room, ("pipelines.",), BELOW) for room in BELOW),
        # a stage imports only itself, earlier stages and what all share
        *(
            (
                f"pipelines.{stage}",
                ("pipelines.",),
                (*BELOW, *(f"pipelines.{each}" for each in STAGES[: at + 1])),
            )
            for at, stage in enumerate(STAGES)
        ),
    ],
)
def test_rooms_do_not_know_the_rooms_above_them(
    room: str, never: tuple[str, ...], but: tuple[str, ...]
) -> None:
    own = [name for name in MODULES if name == room or name.startswith(f"{room}.")]
    assert own
    for name in own:
        assert not [
            each for each in imports(name) if each.startswith(never) and not each.startswith(but)
        ], name
