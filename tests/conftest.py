"""A tiny pair, which tests share."""

from __future__ import annotations

import pytest
import torch

from data_gen.models.pair import ModelPair
from tests.tiny import save_pair


@pytest.fixture(scope="session")
def pair_folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return save_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="session")
def pair(pair_folders: tuple[str, str]) -> ModelPair:
    return ModelPair.load(*pair_folders, device="cpu")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)
