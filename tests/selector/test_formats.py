"""What a machine needs for the runtime, where an artefact is read from, and its card."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from selector.schema import FULL, LIGHT
from tests.selector.exported import (
    batch_of,
    early_of,
    export,
    loaded,
    modes_of,
    roots_of,
    scripted,
)


@pytest.mark.parametrize("level", [LIGHT, FULL])
def test_an_environment_with_nothing_else_will_do(
    artefacts: dict[tuple[str, str], Path], tmp_path: Path, level: str
) -> None:
    """The runtime needs torch and NumPy; it decides as the TorchScript does here."""
    folder = artefacts["regressor", level]
    mode = next(mode for mode in modes_of(level) if mode.feature_levels == (level,))
    data, rows = roots_of(mode, level, count=1)
    batch = batch_of(data, rows, level)
    np.savez(tmp_path / "batch.npz", **{name: values.numpy() for name, values in batch.items()})
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(folder), str(tmp_path / "batch.npz")],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        asked = [scripted(folder)(view)[0].tolist() for view in (batch, early_of(batch))]
    assert done.stdout.split() == [str(a) for both in asked for a in both]
    assert not re.search(r"(?i)warning", done.stderr)


PROGRAM = """
import sys
for name in ("data_gen mlflow numba pandas pipelines pyarrow pydantic pytorch_lightning safetensors scipy sklearn "
             "tokenizers torchmetrics transformers yaml").split():
    sys.modules[name] = None  # as if it were not installed
import numpy, torch
from selector.runtime import load_selector
selector = load_selector(sys.argv[1])
batch = {name: torch.from_numpy(values) for name, values in numpy.load(sys.argv[2]).items()}
early = {"scalars": batch["scalars"][:, : selector.schema.first]}
for view in (batch, early):
    print(*selector.scores(view).argmax(-1).tolist())
"""


def test_a_hub_id_is_read_from_what_is_stored_of_it(
    artefact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library's own store, filled as a download fills it; no network."""
    store = tmp_path / "hub" / "models--org--selector"
    shutil.copytree(artefact, store / "snapshots" / "abc")
    (store / "refs").mkdir()
    (store / "refs" / "main").write_text("abc")
    program = (
        "from selector.runtime import load_selector\n"
        "print(load_selector('org/selector').verifier)\n"
        "try: load_selector('org/another')\n"
        "except ValueError as error: print(error)\n"
    )
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    first, second = done.stdout.splitlines()[:2]
    assert first == loaded(artefact).verifier
    assert second.startswith("org/another: no such directory, and the hub does not give it")


def test_the_card_has_what_was_measured(tmp_path: Path) -> None:
    row = {"temperature": 0.2, "top_p": 1.0, "wall_ratio": 1.2345, "wall_interval_95": [1.1, 1.3]}
    evaluation = {"by_setting": [{**row, "replay_ratio": 1.25, "replay_error": 0.01}]}
    export(tmp_path / "selector", evaluation=evaluation)
    card = (tmp_path / "selector" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: espalier\n")
    assert "| 0.2 | 1 | 1.234 [1.100, 1.300] | 1.250 ±0.010 |" in card
    # with that key vLLM would take the folder for a draft model
    assert "speculators_config" not in (tmp_path / "selector" / "config.json").read_text()
