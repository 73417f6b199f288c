from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from selector.actions import Action
from selector.decision import Mode
from selector.runtime.selector import load_selector
from selector.schema import EARLY_SCALARS, FULL, HIDDEN_STATES, PAIR, InputError, sha256
from tests.selector.exported import (
    FALLBACK,
    export,
    modes_of,
)
from tests.selector.synthetic import SPACE


def test_the_config_says_what_an_engine_needs(artefacts: dict[tuple[str, str], Path]) -> None:
    for (objective, level), folder in artefacts.items():
        config = json.loads((folder / "config.json").read_text())
        assert config["format"] == "espalier-selector-12"
        assert config["features"]["early"] == len(EARLY_SCALARS)
        assert (config["objective"], config["feature_level"], config["verifier"]) == (objective, level, "traversal")
        assert [scalar["name"] for scalar in config["features"]["scalars"]] == [scalar.name for scalar in PAIR.scalars]
        assert list(config["features"]["hidden_states"]) == (list(HIDDEN_STATES) if level == FULL else [])
        assert [Action.of(action) for action in config["actions"]] == list(SPACE)
        assert [Mode.of(mode) for mode in config["modes"]] == modes_of(level)
        selector = load_selector(folder)
        assert (selector.feature_levels, selector.fallback) == ((level,), FALLBACK)
        readme = (folder / "README.md").read_text()
        for name in (*(scalar.name for scalar in PAIR.scalars), *config["features"]["hidden_states"]):
            assert f"`{name}`" in readme
        assert not re.search(r"target_hidden", readme) or level == FULL


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
    assert [path.name for path in tmp_path.iterdir()] == ["selector"] and not (tmp_path / "selector/stray").exists()


@pytest.mark.parametrize("name", ["selector.pt", "config.json", "latency.json", "README.md", "SHA256SUMS"])
def test_one_changed_byte_is_refused(artefact: Path, tmp_path: Path, name: str) -> None:
    copy = tmp_path / "selector"
    shutil.copytree(artefact, copy)
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 1
    (copy / name).write_bytes(bytes(content))
    with pytest.raises(InputError) as error:
        load_selector(copy)
    assert "\n" not in str(error.value) and str(copy) in str(error.value)


def test_a_missing_file_is_named(artefact: Path, tmp_path: Path) -> None:
    copy = tmp_path / "selector"
    shutil.copytree(artefact, copy)
    (copy / "selector.pt").unlink()
    with pytest.raises(InputError, match=r"selector.pt: missing"):
        load_selector(copy)
    with pytest.raises(InputError, match="no selector directory"):
        load_selector(tmp_path)


def changed(artefact: Path, copy: Path, change: Callable[[dict], object]) -> Path:
    """A copy with another config, and the checksum that goes with it."""
    shutil.copytree(artefact, copy)
    path, sums = copy / "config.json", copy / "SHA256SUMS"
    old, config = sha256(path), json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))
    sums.write_text(sums.read_text().replace(old, sha256(path)))
    return copy


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda config: config.update(format="espalier-selector-11"),
            "config.json: espalier-selector-11; this program reads espalier-selector-12: export the selector again",
        ),
        (
            lambda config: config["features"]["scalars"][4].update(name="matched"),
            r"its scalars are not this program's \(match, matched\): train and export it again",
        ),
        (lambda config: config["features"]["scalars"].reverse(), r"not this program's \(their order\)"),
        (lambda config: config.update(schema="log"), r"not this program's \(accepted_mean_0.5, "),
    ],
)
def test_another_version_is_refused(
    artefact: Path, tmp_path: Path, change: Callable[[dict], object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        load_selector(changed(artefact, tmp_path / "selector", change))


@pytest.mark.parametrize(
    "change",
    [
        lambda config: config["modes"][2].update(feature_levels=[FULL]),  # the network has no hidden states
        lambda config: config["modes"][1].update(rule=[5, 3]),  # no such lookup
        lambda config: config["modes"][2].update(allowed=[0, 453]),
        lambda config: config["modes"][2].update(action=[8]),  # a lookup everywhere
        lambda config: config["modes"][0]["mean_efficiency"].append(1.0),
        lambda config: config.update(fallback=[8]),
        lambda config: config["actions"].pop(),
        lambda config: config["space"].update(lookups=[2, 4, 8]),
        lambda config: config["space"].update(lookups=[4, 2, 8, 16]),
        lambda config: config.pop("space"),
        lambda config: config["modes"][2].update(level="drafter"),  # a pair's selector has no levels
        lambda config: config["features"].update(early=3),
        lambda config: config["features"]["scalars"][3].update(lowest=None),
    ],
)
def test_a_config_whose_parts_do_not_fit_is_refused(
    artefact: Path, tmp_path: Path, change: Callable[[dict], object]
) -> None:
    with pytest.raises(InputError, match=r"config.json: damaged \(\w+\); export the selector again"):
        load_selector(changed(artefact, tmp_path / "selector", change))
