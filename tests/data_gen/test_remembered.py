"""What is remembered of models, in any process: for their files, weights and configs as they
are."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data_gen.models.checkpoints import known_weights_of, load_model, weights_of
from data_gen.models.prepack import prepack
from data_gen.models.remembered import recall, remember
from data_gen.models.self_check import check_once
from tests.data_gen.families import model_of


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ESPALIER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folder(tmp_path: Path, pair_folders: tuple[str, str]) -> Path:
    shutil.copytree(pair_folders[0], tmp_path / "target")
    return tmp_path / "target"


def loaded(folder: Path) -> Any:
    """As another process would."""
    return load_model(str(folder), "target", torch.float32, "cpu")


def new_weights(folder: Path) -> None:
    file = folder / "model.safetensors"
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=times)


@pytest.mark.parametrize(
    "change",
    [
        new_weights,
        lambda folder: (folder / "generation_config.json").unlink(),
        lambda folder: (folder / "config.json").touch(),
    ],
)
def test_it_is_forgotten_where_a_file_changes(
    folder: Path, change: Callable[[Path], object]
) -> None:
    """Also where a file keeps its size and its time of writing."""
    model = loaded(folder)
    remember(model, "checked", 40)
    remember(model, "weights", "abc")
    assert (recall(loaded(folder), "checked"), known_weights_of(loaded(folder))) == (40, "abc")
    change(folder)
    again = loaded(folder)
    assert (
        recall(again, "checked") is None and known_weights_of(again) == weights_of(again) != "abc"
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.model.layers[0].mlp.up_proj.weight.detach().mul_(2),
        lambda model: model.model.layers[0].register_parameter(
            "more", torch.nn.Parameter(torch.ones(1))
        ),
        lambda model: model.set_attn_implementation("eager"),
        lambda model: model.to(torch.bfloat16),
        lambda model: setattr(model.config, "rope_theta", 7.0),
    ],
)
def test_it_is_forgotten_where_the_model_in_memory_changes(
    folder: Path, change: Callable[[Any], object]
) -> None:
    model = loaded(folder)
    remember(model, "checked", 40)
    change(model)
    assert recall(model, "checked") is None


def test_prepacking_changes_nothing(folder: Path) -> None:
    model = loaded(folder)
    remember(model, "checked", 40)
    prepack(model)
    assert recall(model, "checked") == 40


def test_a_model_of_unknown_files_is_remembered_in_its_process_alone(cache: Path) -> None:
    model = model_of("Llama")
    remember(model, "checked", 40)
    assert (
        recall(model, "checked") == 40
        and recall(model_of("Llama"), "checked") is None
        and not cache.exists()
    )
    model.lm_head.weight.detach().mul_(2)
    assert recall(model, "checked") is None


def test_a_check_is_repeated_for_longer_texts_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(
        "data_gen.models.self_check.check_model", lambda model, name, longest: asked.append(longest)
    )
    for longest in (40, 30, 41, 41):
        check_once(loaded(folder), "target", longest)
    assert asked == [40, 41]


@pytest.mark.parametrize("damage", ["", "{"])
def test_a_damaged_entry_says_nothing(folder: Path, cache: Path, damage: str) -> None:
    model = loaded(folder)
    remember(model, "checked", 40)
    (entry,) = (cache / "known").iterdir()
    entry.write_text(damage)
    check_once(loaded(folder), "target", 30)
    assert json.loads(entry.read_text())["checked"] == 30


def test_an_unwritable_cache_only_costs_time(folder: Path, cache: Path) -> None:
    cache.write_text("a file, where the folder would be")
    model = loaded(folder)
    assert known_weights_of(model) == weights_of(model)
