"""Which way the arrows run: drawn from the import statements of every module."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("selector", "data_gen", "pipelines")


def modules() -> dict[str, Path]:
    """Every module of the product, by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(name: str) -> set[str]:
    """The product's modules that a module imports, anywhere in it; a package's own `__init__` apart."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[name].read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                inner = f"{node.module}.{alias.name}"
                found.add(inner if inner in MODULES else node.module)
    return {each for each in found if each in MODULES and each != name}


def circle(name: str, path: tuple[str, ...], done: set[str]) -> tuple[str, ...] | None:
    """A way back to a module on the path; None if there is none below `name`."""
    if name in path:
        return (*path[path.index(name) :], name)
    if name in done:
        return None
    for inner in sorted(imports(name)):
        if (found := circle(inner, (*path, name), done)) is not None:
            return found
    done.add(name)
    return None


def test_no_module_imports_itself_by_way_of_others() -> None:
    done: set[str] = set()
    for name in MODULES:
        assert circle(name, (), done) is None


@pytest.mark.parametrize(
    ("room", "never"),
    [
        ("selector", ("data_gen", "pipelines")),
        ("data_gen", ("pipelines",)),
        ("pipelines.run", tuple(f"pipelines.{r}" for r in ("pair", "latency", "data", "train", "evaluate"))),
        ("pipelines.config", ("pipelines.run", "pipelines.data", "pipelines.train", "pipelines.evaluate")),
    ],
)
def test_rooms_do_not_know_the_rooms_above_them(room: str, never: tuple[str, ...]) -> None:
    for name in MODULES:
        if name == room or name.startswith(f"{room}."):
            assert not [each for each in imports(name) if each.startswith(never)], name


STAGES = ("pair", "latency", "data", "train", "evaluate", "export", "report")
BELOW = tuple(f"pipelines.{room}" for room in ("run", "tracking", "config", "statistics"))


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_imports_only_itself_earlier_stages_and_what_all_share(stage: str) -> None:
    allowed = (*BELOW, *(f"pipelines.{earlier}" for earlier in STAGES[: STAGES.index(stage) + 1]))
    own = [name for name in MODULES if name.startswith(f"pipelines.{stage}.")]
    assert own
    for name in own:
        above = [each for each in imports(name) if each.startswith("pipelines") and not each.startswith(allowed)]
        assert not above, name


@pytest.mark.parametrize("room", BELOW)
def test_what_all_stages_share_imports_none_of_them(room: str) -> None:
    for name in MODULES:
        if name == room or name.startswith(f"{room}."):
            found = [each for each in imports(name) if each.startswith("pipelines") and not each.startswith(BELOW)]
            assert not found, name


def test_nothing_in_the_product_imports_a_study() -> None:
    for name in MODULES:
        if not name.startswith("pipelines.studies"):
            assert not [each for each in imports(name) if each.startswith("pipelines.studies")], name
