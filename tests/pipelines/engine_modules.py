"""Single modules of installed engines, without their packages' `__init__`, which need a GPU or take minutes."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def bare(monkeypatch: pytest.MonkeyPatch, package: str, stubs: dict[str, dict[str, Any]]) -> None:
    """Makes the modules of a package importable one by one, until the test ends; skips where it is not installed.

    Args:
        stubs: modules of ours that stand in for the engine's, by name, with what they hold.
    """
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        pytest.skip(f"{package} is not installed")
    root = Path(next(iter(spec.submodule_search_locations)))
    ours = f"data_gen.engines.{package}"
    for name in [each for each in sys.modules if each.partition(".")[0] == package or each.startswith(ours)]:
        monkeypatch.delitem(sys.modules, name)
    for name, held in stubs.items():
        stub = ModuleType(name)
        vars(stub).update(held)
        monkeypatch.setitem(sys.modules, name, stub)
    folders = [root, *(path for path in root.rglob("*") if path.is_dir() and (path / "__init__.py").exists())]
    for folder in folders:
        name = ".".join((package, *folder.relative_to(root).parts))
        if name not in stubs:
            module = ModuleType(name)
            module.__path__ = [str(folder)]
            monkeypatch.setitem(sys.modules, name, module)
