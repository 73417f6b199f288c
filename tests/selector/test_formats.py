"""The decision in NumPy, and what a machine needs for it and for the runtime."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from packaging.requirements import Requirement

from selector.plain import PlainSelector
from selector.schema import FULL, HIDDEN_STATES, LIGHT, SCALARS_KEY
from tests.selector.exported import (
    KINDS,
    SPACE,
    batch_of,
    early_of,
    export,
    loaded,
    modes_of,
    roots_of,
)


@pytest.mark.parametrize(("objective", "level"), KINDS)
@torch.no_grad()
def test_numpy_decides_as_torchscript(artefacts: dict[tuple[str, str], Path], objective: str, level: str) -> None:
    """Under all settings at once, with all features and with the early ones alone."""
    folder = artefacts[objective, level]
    selector, plain = loaded(folder), PlainSelector(folder)
    assert plain.actions == [tuple(action) for action in SPACE]
    for mode in modes_of(level):
        data, rows = roots_of(mode, level, count=2)
        for batch in (batch_of(data, rows, level), early_of(batch_of(data, rows, level))):
            index_B, scores_BA = selector.module(batch)
            hidden = [batch[name].numpy() for name in HIDDEN_STATES if name in batch]
            found_B, found_BA = plain.decide(batch[SCALARS_KEY].numpy(), hidden)
            np.testing.assert_allclose(found_BA, scores_BA.numpy(), atol=1e-3, rtol=1e-5)
            lost_B = scores_BA.amax(-1) - scores_BA.gather(-1, torch.from_numpy(found_B)[:, None])[:, 0]
            assert lost_B.max() < 1e-4
            assert (torch.from_numpy(found_B) == index_B).float().mean() > 0.95


def test_numpy_refuses_what_it_cannot_read(artefact: Path, tmp_path: Path) -> None:
    plain = PlainSelector(artefact)
    with pytest.raises(ValueError, match=r"shapes \[\(7,\)\]"):
        plain.decide(np.zeros((1, 7)))
    with pytest.raises(ValueError, match="not finite"):
        plain.decide(np.full((1, plain.widths[0]), np.nan))
    with pytest.raises(ValueError, match="no selector directory"):
        PlainSelector(tmp_path / "nowhere")
    copy = shutil.copytree(artefact, tmp_path / "copy")
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    with pytest.raises(ValueError, match=r"model\.safetensors: its checksum"):
        PlainSelector(copy)


def closure(*names: str) -> set[str]:
    """Distributions that are installed, and all that they require here."""
    found: set[str] = set()
    todo = list(names)
    while todo:
        name = todo.pop()
        if name in found:
            continue
        try:
            requires = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:  # for another platform
            continue
        found.add(name)
        needed = map(Requirement, requires)
        todo += [each.name for each in needed if each.marker is None or each.marker.evaluate({"extra": ""})]
    return found


def link_packages(folder: Path, names: set[str]) -> None:
    """What these distributions installed, and nothing else, under a folder."""
    folder.mkdir()
    for name in names:
        for file in importlib.metadata.files(name) or []:
            top = file.parts[0]
            if top != ".." and not (folder / top).exists():
                (folder / top).symlink_to(Path(str(importlib.metadata.distribution(name).locate_file(top))).resolve())


@pytest.mark.parametrize(("needs", "program"), [(("torch", "numpy", "numba"), "runtime"), (("numpy",), "plain")])
@pytest.mark.parametrize("level", [LIGHT, FULL])
def test_an_environment_with_nothing_else_will_do(
    artefacts: dict[tuple[str, str], Path], tmp_path: Path, level: str, needs: tuple[str, ...], program: str
) -> None:
    """The runtime needs torch, NumPy and Numba, the plain file NumPy alone; each decides as it does here."""
    folder = artefacts["regressor", level]
    link_packages(tmp_path / "site", closure(*needs))
    here = Path(__file__).parents[2]
    if program == "plain":  # one file, which an engine may copy
        (tmp_path / "site" / "plain.py").symlink_to(here / "selector" / "plain.py")
    else:
        (tmp_path / "site" / "selector").symlink_to(here / "selector")
    mode = next(mode for mode in modes_of(level) if mode.feature_levels == (level,))
    data, rows = roots_of(mode, level, count=1)
    batch = batch_of(data, rows, level)
    np.savez(tmp_path / "batch.npz", **{name: values.numpy() for name, values in batch.items()})
    done = subprocess.run(
        [sys.executable, "-S", "-c", PROGRAMS[program], str(folder), str(tmp_path / "batch.npz")],
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    with torch.no_grad():
        asked = [loaded(folder).module(view)[0].tolist() for view in (batch, early_of(batch))]
    assert done.stdout.split() == [str(a) for both in asked for a in both]
    assert not re.search(r"(?i)warning", done.stderr)


PROGRAMS = {
    "runtime": """
import sys, numpy, torch
from selector.runtime import load_selector
selector = load_selector(sys.argv[1])
batch = {name: torch.from_numpy(values) for name, values in numpy.load(sys.argv[2]).items()}
early = {"scalars": batch["scalars"][:, : selector.schema.first]}
for view in (batch, early):
    print(*selector.scores(view).argmax(-1).tolist())
""",
    "plain": """
import sys, numpy
from plain import PlainSelector
selector = PlainSelector(sys.argv[1])
batch = numpy.load(sys.argv[2])
hidden = [batch[name] for name in selector.config["features"]["hidden_states"]]
print(*selector.decide(batch["scalars"], hidden)[0])
print(*selector.decide(batch["scalars"][:, : selector.early])[0])
""",
}


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
