"""An artefact: what its files say, that they are all the runtime needs, and what is refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import torch

from selector.actions import Action
from selector.decision import Mode
from selector.export.writer import CARD
from selector.runtime.selector import load_selector
from selector.runtime.tokens import FILE, TokenStatistics
from selector.schema import (
    EARLY_SCALARS,
    FORMAT,
    FULL,
    HIDDEN_STATES,
    LIGHT,
    PAIR,
    InputError,
    sha256,
)
from tests.selector.exported import (
    FALLBACK,
    batch_of,
    early_of,
    export,
    loaded,
    modes_of,
    roots_of,
    scripted,
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
        assert config["features"]["early"] == len(EARLY_SCALARS)
        assert (config["objective"], config["feature_level"], config["verifier"]) == (
            objective,
            level,
            "traversal",
        )
        assert [scalar["name"] for scalar in config["features"]["scalars"]] == [
            scalar.name for scalar in PAIR.scalars
        ]
        assert list(config["features"]["hidden_states"]) == (
            list(HIDDEN_STATES) if level == FULL else []
        )
        assert [Action.of(action) for action in config["actions"]] == list(SPACE)
        assert [Mode.of(mode) for mode in config["modes"]] == modes_of(level)
        selector = load_selector(folder)
        assert (selector.feature_levels, selector.fallback) == ((level,), FALLBACK)
        readme = (folder / "README.md").read_text()
        for name in (
            *(scalar.name for scalar in PAIR.scalars),
            *config["features"]["hidden_states"],
        ):
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
    assert [path.name for path in tmp_path.iterdir()] == ["selector"] and not (
        tmp_path / "selector/stray"
    ).exists()


@pytest.mark.parametrize("level", [LIGHT, FULL])
def test_an_environment_with_nothing_else_will_do(
    artefacts: dict[tuple[str, str], Path], tmp_path: Path, level: str
) -> None:
    """The runtime needs torch and NumPy; it decides as the TorchScript does here."""
    folder = artefacts["regressor", level]
    mode = next(mode for mode in modes_of(level) if mode.feature_levels == (level,))
    batch = batch_of(*roots_of(mode, level, count=1), level)
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
    environment = {**os.environ, "HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
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
    with pytest.raises(InputError) as error:
        load_selector(copy)
    assert "\n" not in str(error.value) and str(copy) in str(error.value)


def test_a_missing_file_is_named(copy: Path) -> None:
    (copy / "selector.pt").unlink()
    with pytest.raises(InputError, match=r"selector.pt: missing"):
        load_selector(copy)
    with pytest.raises(InputError, match="no selector directory"):
        load_selector(copy.parent)


DO_NOT_FIT = [
    # the network has no hidden states
    lambda config: config["modes"][2].update(feature_levels=[FULL]),
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
]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda config: config.update(format="espalier-selector-11"),
            f"espalier-selector-11; this program reads espalier-selector-{FORMAT}: export the "
            "selector again",
        ),
        (
            lambda config: config["features"]["scalars"][4].update(name="matched"),
            r"its scalars are not this program's \(match, matched\): train and export it again",
        ),
        (
            lambda config: config["features"]["scalars"].reverse(),
            r"not this program's \(their order\)",
        ),
        (lambda config: config.update(schema="log"), r"not this program's \(accepted_mean_0.5, "),
        *(
            (change, r"config.json: damaged \(\w+\); export the selector again")
            for change in DO_NOT_FIT
        ),
    ],
)
def test_a_config_of_another_version_or_whose_parts_do_not_fit_is_refused(
    copy: Path, change: Callable[[dict], object], message: str
) -> None:
    """Though its checksum goes with it."""
    config = json.loads((copy / "config.json").read_text())
    change(config)
    resealed(copy, "config.json", json.dumps(config).encode())
    with pytest.raises(InputError, match=message):
        load_selector(copy)


def resealed(folder: Path, name: str, content: bytes) -> None:
    """Other content of a file, with its checksum."""
    path, sums = folder / name, folder / "SHA256SUMS"
    old = sha256(path) if path.exists() else "none"
    path.write_bytes(content)
    sums.write_text(sums.read_text().replace(old, sha256(path)))


WEIGHTS, BODY = "model.safetensors", "network.body."


@pytest.mark.parametrize(
    ("name", "array", "spoil"),
    [
        (WEIGHTS, f"{BODY}mlp.4.bias", lambda values: values[:3]),
        (WEIGHTS, f"{BODY}mlp.2.weight", lambda values: values.T.copy()),
        (WEIGHTS, f"{BODY}mlp.0.bias", lambda values: values * np.float32(np.inf)),
        (WEIGHTS, f"{BODY}mean_F", lambda values: values[:1]),
        (WEIGHTS, f"{BODY}low_F", lambda values: values * np.float32(np.nan)),
        (WEIGHTS, f"{BODY}scale_F", lambda values: 0 * values),
        (FILE, "counts_N", lambda values: values - 20),
        (FILE, "means_K", lambda values: values + np.float32(np.nan)),
        (FILE, "sums_NK", lambda values: values.ravel()),
    ],
)
def test_arrays_that_are_short_of_other_shapes_or_not_finite_are_refused(
    copy: Path, name: str, array: str, spoil: Callable[[np.ndarray], np.ndarray]
) -> None:
    """And a file that is cut off, though its checksum goes with it."""
    statistics, _ = TokenStatistics.fit(
        np.array([[1], [1], [2], [2]]), np.ones((4, 2)), np.arange(4)
    )
    (copy / FILE).write_bytes(safetensors.numpy.save(statistics.to_tensors()))
    load_selector(copy)
    content = (copy / name).read_bytes()
    tensors = safetensors.numpy.load(content)
    resealed(copy, name, safetensors.numpy.save({**tensors, array: spoil(tensors[array])}))
    with pytest.raises(
        InputError, match=rf"{name}: {array} is missing, of another shape or not finite"
    ):
        load_selector(copy)
    resealed(copy, name, content[: len(content) // 2])
    with pytest.raises(InputError, match=f"{name}: damaged"):
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
