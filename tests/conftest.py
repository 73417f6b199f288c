"""A tiny pair, which tests share, and the order of the tests."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
import torch

from data_gen.models.pair import ModelPair
from tests.tiny import save_pair

LONG = (
    "test_data",
    "test_pipeline",
    "test_interrupted",
    "test_logs_stage",
    "test_refusals",
    "test_log",
    "test_train",
    "test_examples",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take long begin first, so that the workers of `make test` end together."""
    items.sort(key=lambda item: LONG.index(item.path.stem) if item.path.stem in LONG else len(LONG))


@pytest.fixture(scope="session")
def pair_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def pair(pair_folders: tuple[str, str]) -> ModelPair:
    return ModelPair.load(*pair_folders, device="cpu")


@pytest.fixture(autouse=True, scope="session")
def _own_cache() -> None:
    """What tests find out about their tiny models does not stay in the user's cache; later test
    runs share it."""
    folder = Path(tempfile.gettempdir()) / f"espalier-cache-{os.getuid()}"
    pytest.MonkeyPatch().setenv("ESPALIER_CACHE", str(folder))


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
    pytest.MonkeyPatch().setenv("OMP_NUM_THREADS", "1")  # of stages in processes of their own
