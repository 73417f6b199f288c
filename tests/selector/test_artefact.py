"""An artefact: what its files say, that they are all the runtime needs, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from selector.actions import Action
from selector.export.writer import CARD
from selector.runtime.selector import load_selector
from selector.schema import (
    FORMAT,
    FULL,
    HIDDEN_STATES,
    LIGHT,
    PAIR,
    TEXT_SCALARS,
    InputError,
    sha256,
)
from tests.checks import one_line, python
from tests.selector.exported import (
    FALLBACK,
    batch_of,
    early_of,
    export,
    loaded,
    roots_of,
    scripted,
    settings_of,
)
from tests.selector.synthetic import SPACE, profile


@pytest.fixture
def copy(artefact: Path, tmp_path: Path) -> Path:
    """One that may be spoilt."""
    return Path(shutil.copytree(artefact, tmp_path / "selector"))


def test_the_config_says_what_an_engine_needs(artefacts: dict[tuple[str, str], Path]) -> None:
    for (objective, level), folder in artefacts.items():
        config = json.loads((folder / "config.json").read_text())
        assert config["format"] == f"espalier-selector-{FORMAT}"
        assert config["features"]["early"] == len(TEXT_SCALARS)
        names = [scalar["name"] for scalar in config["features"]["scalars"]]
        states = list(config["features"]["hidden_states"])
        assert names == list(PAIR.names) and states == list(HIDDEN_STATES if level == FULL else ())
        assert [Action.of(action) for action in config["actions"]] == list(SPACE)
        selector = load_selector(folder)
        assert selector.settings == settings_of(level) and selector.fallback == FALLBACK
        assert (selector.config.objective, selector.feature_levels) == (objective, (level,))
        readme = (folder / "README.md").read_text()
        assert all(f"`{name}`" in readme for name in names + states)
        assert ("target_hidden" in readme) == (level == FULL)


def test_an_earlier_artefact_is_replaced_whole_or_not_at_all(tmp_path: Path) -> None:
    def refuse(_: Path) -> None:
        raise InputError("no")

    export(tmp_path / "selector", "policy")
    (tmp_path / "selector" / "stray").write_text("x")
    with pytest.raises(InputError):
        export(tmp_path / "selector", "regressor", check=refuse)
    assert load_selector(tmp_path / "selector").config.objective == "policy"
    export(tmp_path / "selector", "regressor")
    assert load_selector(tmp_path / "selector").config.objective == "regressor"
    assert [path.name for path in tmp_path.iterdir()] == ["selector"] and not (
        tmp_path / "selector/stray"
    ).exists()


@pytest.mark.parametrize("level", [LIGHT, FULL])
def test_an_environment_with_nothing_else_will_do(
    artefacts: dict[tuple[str, str], Path], tmp_path: Path, level: str
) -> None:
    """The runtime needs torch and NumPy; it decides as the TorchScript does here."""
    folder = artefacts["regressor", level]
    setting = next(setting for setting in settings_of(level) if setting.feature_levels == (level,))
    batch = batch_of(*roots_of(setting, level, count=1), level)
    np.savez(tmp_path / "batch.npz", **{name: values.numpy() for name, values in batch.items()})
    done = python("-c", PROGRAM, folder, tmp_path / "batch.npz")
    with torch.no_grad():
        asked = [scripted(folder)(view)[0].tolist() for view in (batch, early_of(batch))]
    assert done.stdout.split() == [str(a) for both in asked for a in both]
    assert not re.search(r"(?i)warning", done.stderr)


PROGRAM = """
import sys
for name in ("data_gen mlflow numba pandas pipelines pyarrow pydantic pytorch_lightning "
             "safetensors scipy sklearn tokenizers torchmetrics transformers yaml").split():
    sys.modules[name] = None  # as if it were not installed
import numpy, torch
from selector.runtime import load_selector
selector = load_selector(sys.argv[1])
batch = {name: torch.from_numpy(values) for name, values in numpy.load(sys.argv[2]).items()}
early = {"scalars": batch["scalars"][:, : selector.schema.first]}
for view in (batch, early):
    print(*selector.scores(view).argmax(-1).tolist())
"""


def test_a_hub_id_is_read_from_what_is_stored_of_it(artefact: Path, tmp_path: Path) -> None:
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
    done = python("-c", program, HF_HUB_CACHE=str(tmp_path / "hub"), HF_HUB_OFFLINE="1")
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


@pytest.mark.parametrize(
    ("name", "shown"),
    [("org/m", "`org/m`"), ("/home/me/m/", "`m`"), ("x`\n---\n# H\n<b>", "`x --- # H &lt;b&gt;`")],
)
def test_a_users_name_is_code_in_the_card_without_its_place(
    artefact: Path, name: str, shown: str
) -> None:
    config = load_selector(artefact).config
    named = replace(config, pair={**config.pair, "target": name, "draft": name})
    assert f"for the pair {shown} /\n{shown} and" in CARD.render(config=named, of_log=False)
    assert f"the drafter {shown} drafts" in CARD.render(config=named, of_log=True)


@pytest.mark.parametrize(
    "name", ["selector.pt", "config.json", "latency.json", "README.md", "SHA256SUMS"]
)
def test_one_changed_byte_is_refused(copy: Path, name: str) -> None:
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(bytes(content))
    with one_line("", str(copy)):
        load_selector(copy)


def test_a_missing_file_is_named(copy: Path) -> None:
    (copy / "selector.pt").unlink()
    with pytest.raises(InputError, match=r"selector.pt: missing"):
        load_selector(copy)
    with pytest.raises(InputError, match="no selector directory"):
        load_selector(copy.parent)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda config: config.update(format="espalier-selector-11"),
            f"espalier-selector-11; this program reads espalier-selector-{FORMAT}",
        ),
        (
            lambda config: config["features"]["scalars"].reverse(),
            "its scalars are not this program's",
        ),
    ],
)
def test_a_config_of_another_version_is_refused(
    copy: Path, change: Callable[[dict], object], message: str
) -> None:
    path, sums = copy / "config.json", copy / "SHA256SUMS"
    config = json.loads(path.read_text())
    before = sha256(path)
    change(config)
    path.write_text(json.dumps(config))
    sums.write_text(sums.read_text().replace(before, sha256(path)))
    with pytest.raises(InputError, match=rf"config.json: {message}"):
        load_selector(copy)


@pytest.mark.parametrize(
    ("spoilt", "message"),
    [
        ({"pair": "another"}, "measured with another pair"),
        (
            {"verify": {"block": profile().verify["traversal"]}},
            "the latency profile of another has no times for traversal",
        ),
    ],
)
def test_a_profile_that_does_not_go_with_it_is_refused(
    artefact: Path, spoilt: dict, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        load_selector(artefact, latency=replace(profile(), device="another", **spoilt))
