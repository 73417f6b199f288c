from __future__ import annotations

from pathlib import Path

import pytest

from selector.schema import LIGHT
from tests.selector.exported import KINDS, export


@pytest.fixture(scope="session")
def artefacts(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Path]:
    folder = tmp_path_factory.mktemp("artefacts")
    for kind in KINDS:
        export(folder / "-".join(kind), *kind)
    return {kind: folder / "-".join(kind) for kind in KINDS}


@pytest.fixture(scope="session")
def artefact(artefacts: dict[tuple[str, str], Path]) -> Path:
    return artefacts["regressor", LIGHT]
