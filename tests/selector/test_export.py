from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from selector.actions import Action
from selector.export import write_artefact
from selector.runtime import Selector, load_selector
from selector.schema import HIDDEN_STATES, InputError
from tests.selector.synthetic import SPACE, module, profile, roots

FALLBACK = Action(1, 3, 0)


def export(folder: Path, objective: str, check: Callable[[Selector], None] = lambda _: None) -> Selector:
    trained = module(objective)
    trained.fit_gain(roots())
    facts = {"pair": {"target": "t", "draft": "d", "fingerprint": profile().pair}, "metrics": {}, "run_id": "none"}
    return write_artefact(folder, trained, roots(), profile(), "traversal", FALLBACK, facts, check)


@pytest.fixture(scope="module")
def artefact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("artefact") / "selector"
    export(folder, "regressor")
    return folder


@pytest.mark.parametrize("objective", ["policy", "regressor"])
def test_the_exported_selector_chooses_as_the_trained_module(tmp_path: Path, objective: str) -> None:
    selector = export(tmp_path / "selector", objective)
    trained = module(objective)
    trained.fit_gain(roots())
    fresh = roots(50, seed=9)
    expected = [SPACE.actions[i] for i in trained.choices(fresh).tolist()]
    assert len(set(expected)) > 1
    one_by_one = [selector.select({n: v[b] for n, v in fresh.features().items()}) for b in range(50)]
    assert one_by_one == expected
    scores = selector.scores(fresh.features())
    assert scores.shape == (50, 233) and [SPACE.actions[i] for i in scores.argmax(-1).tolist()] == expected
    assert selector.scores({n: v[0] for n, v in fresh.features().items()}).shape == (233,)


def test_a_root_without_features_gets_the_fallback(artefact: Path) -> None:
    assert load_selector(artefact).select(None) == FALLBACK


def test_another_machines_profile_changes_the_choice(artefact: Path) -> None:
    features = roots(40, seed=2).features()
    slow_draft = profile(draft=1.0)

    def depths(selector: Selector) -> list[int]:
        actions = [selector.select({n: v[b] for n, v in features.items()}) for b in range(40)]
        return [action.L1 + action.L2 for action in actions]

    here, there = depths(load_selector(artefact)), depths(load_selector(artefact, latency=slow_draft))
    assert sum(there) < sum(here)
    same = load_selector(artefact, latency=artefact / "latency.json")
    assert depths(same) == here


def test_a_profile_of_another_pair_is_refused(artefact: Path) -> None:
    with pytest.raises(InputError, match="measured with another pair"):
        load_selector(artefact, latency=replace(profile(), pair="another"))


def test_a_failed_check_leaves_the_earlier_artefact(tmp_path: Path) -> None:
    def refuse(_: Selector) -> None:
        raise InputError("no")

    export(tmp_path / "selector", "policy")
    with pytest.raises(InputError):
        export(tmp_path / "selector", "regressor", refuse)
    assert load_selector(tmp_path / "selector").config["objective"] == "policy"


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


def test_another_schema_version_is_refused(artefact: Path, tmp_path: Path) -> None:
    from selector.schema import sha256

    copy = tmp_path / "selector"
    shutil.copytree(artefact, copy)
    config = copy / "config.json"
    old = sha256(config)
    config.write_text(config.read_text().replace('"schema_version": 1', '"schema_version": 7'))
    sums = copy / "SHA256SUMS"
    sums.write_text(sums.read_text().replace(old, sha256(config)))
    with pytest.raises(InputError, match="schema version 7; this program reads"):
        load_selector(copy)


def test_an_earlier_artefact_is_replaced_whole(tmp_path: Path) -> None:
    export(tmp_path / "selector", "policy")
    (tmp_path / "selector" / "stray").write_text("x")
    export(tmp_path / "selector", "regressor")
    assert load_selector(tmp_path / "selector").config["objective"] == "regressor"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["selector"]
    assert not (tmp_path / "selector" / "stray").exists()


def test_the_runtime_needs_torch_alone(artefact: Path) -> None:
    """In a process where every other heavy package is missing."""
    program = f"""
import sys
for name in ("transformers", "pytorch_lightning", "mlflow", "pyarrow", "datasets", "torchmetrics", "pandas"):
    sys.modules[name] = None
import torch
from selector.runtime import load_selector
selector = load_selector({str(artefact)!r})
widths = selector.config["features"]["hidden_states"]
features = {{name: torch.zeros(width) for name, width in widths.items()}}
features["scalars"] = torch.full((len(selector.config["features"]["scalars"]),), 50.0)
print(selector.select(features))
"""
    result = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("(")


def test_the_schema_names_the_hidden_states(artefact: Path) -> None:
    assert list(load_selector(artefact).config["features"]["hidden_states"]) == list(HIDDEN_STATES)
