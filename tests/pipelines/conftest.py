"""One finished run, which the tests of this folder share and copy before they change it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.pipelines.runs import SMALL, espalier


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("demo")
    return folder, espalier(folder, "demo", *SMALL)
