"""The other files that decide: NumPy, the compiled package, C++; and what a machine needs for them."""

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

from selector.export.compiled import PACKAGE, run_package
from selector.plain import PlainSelector
from selector.runtime.selector import load_selector
from selector.schema import EARLY_SCALARS, FULL, HIDDEN_STATES, LIGHT, PAIR, SCALARS_KEY
from tests.selector.exported import (
    KINDS,
    MODES,
    SPACE,
    batch_of,
    early_of,
    export,
    loaded,
    modes_of,
    roots_of,
)

CPP = Path(__file__).parents[2] / "selector" / "export" / "cpp"
COMPILER = pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")


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


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artefact with its package."""
    folder = tmp_path_factory.mktemp("compiled") / "selector"
    export(folder, "regressor", LIGHT, compiled=True)
    return folder


@COMPILER
@torch.no_grad()
def test_the_compiled_package_decides_as_torchscript(compiled: Path) -> None:
    """In batches of any size, and for scalars that are far outside of their range in training."""
    selector = load_selector(compiled)
    ask = run_package(compiled / PACKAGE, selector.widths)
    for mode in MODES:
        data, rows = roots_of(mode, LIGHT, count=1)
        whole = batch_of(data, rows, LIGHT)
        far = whole[SCALARS_KEY] + 1e3 * torch.tensor([name.startswith("source") for name in PAIR.names])
        for batch in (whole, early_of(whole), {SCALARS_KEY: whole[SCALARS_KEY][:1]}, {SCALARS_KEY: far}):
            index_B, scores_BA = selector.module(batch)
            found_B, found_BA = ask(batch)
            assert torch.allclose(found_BA, scores_BA, atol=1e-3, rtol=1e-5)
            assert (scores_BA.amax(-1) - scores_BA.gather(-1, found_B[:, None])[:, 0]).max() < 1e-4
            assert (found_B == index_B).float().mean() >= 0.9


@COMPILER
@torch.no_grad()
def test_the_compiled_package_marks_roots_that_are_not_finite(compiled: Path) -> None:
    """For callers without `espalier.h`: the positions of other roots in the batch stay."""
    package = torch._inductor.aoti_load_package(str(compiled / PACKAGE))
    data, rows = roots_of(MODES[2], LIGHT, count=1)
    scalars_BF = batch_of(data, rows, LIGHT)[SCALARS_KEY]
    passed_B = torch.ones(len(scalars_BF))
    shapes_B3, index_B, _ = package(scalars_BF, passed_B, [])
    for at, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        spoilt_BF = scalars_BF.clone()
        spoilt_BF[at, 3 * at] = value
        found_B3, found_B, _ = package(spoilt_BF, passed_B, [])
        others = torch.arange(len(rows)) != at
        assert found_B3[at].tolist() == [-1, -1, -1] and found_B[at] == -1
        assert torch.equal(found_B3[others], shapes_B3[others]) and torch.equal(found_B[others], index_B[others])


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`example.cpp`, built as its first lines say."""
    folder = tmp_path_factory.mktemp("cpp")
    for file in CPP.iterdir():
        shutil.copy(file, folder)
    written = (CPP / "example.cpp").read_text()
    (build,) = re.findall(r"^//     (T=.*? -o example)$", written, flags=re.MULTILINE | re.DOTALL)
    build = build.replace("//", "").replace("$(python ", f"$({sys.executable} ")
    subprocess.run(["sh", "-ec", build], cwd=folder, check=True)
    return folder / "example"


def printed(program: Path, package: Path, rows: list[list[float]], passed: bool) -> tuple[int, str, str]:
    """Exit code and both outputs of the program for the scalars of some roots."""
    text = "\n".join(" ".join(f"{x:.9g}" for x in row) for row in rows)
    todo = [program, package, "passed" if passed else "early"]
    done = subprocess.run(todo, input=text, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr.strip()


@COMPILER
def test_cpp_prints_the_same_actions(compiled: Path, program: Path) -> None:
    """With all scalars, and with the early ones alone."""
    ask = run_package(compiled / PACKAGE, load_selector(compiled).widths)
    for mode in MODES[2:4]:
        data, rows = roots_of(mode, LIGHT, count=2)
        whole = batch_of(data, rows, LIGHT)
        for batch in (whole, early_of(whole)):
            code, output, _ = printed(program, compiled / PACKAGE, batch[SCALARS_KEY].tolist(), batch is whole)
            actions = [SPACE.actions[a] for a in ask(batch)[0].tolist()]
            expected = [tuple(a) if len(a) == 3 else (0, *a, 0) for a in map(tuple, actions)]
            assert code == 0 and [tuple(map(int, line.split())) for line in output.splitlines()] == expected


@COMPILER
def test_cpp_refuses_what_the_compiled_code_would_misread(compiled: Path, program: Path) -> None:
    F, early = len(PAIR.names), len(EARLY_SCALARS)
    for width, passed, needed in [
        *((width, True, F) for width in (early, 31, 20, F + 1)),
        *((width, False, early) for width in (31, 20, early - 1, F + 1)),
    ]:
        code, output, error = printed(program, compiled / PACKAGE, [[1.0] * width], passed)
        assert (code, output) == (2, "")
        assert error == f"scalars: CPUFloatType [1, {width}]; float32 [1, {needed}] on the CPU is needed"
    for width, passed in ((F, True), (F, False), (early, False)):
        for value in (float("nan"), float("inf")):
            rows = [[1.0] * width, [1.0] * (width - 1) + [value]]
            assert printed(program, compiled / PACKAGE, rows, passed) == (2, "", "scalars: a number is not finite")


@COMPILER
def test_cpp_names_missing_hidden_states(tmp_path: Path, program: Path) -> None:
    """The early scalars suffice until the draft has passed the root."""
    package = tmp_path / "selector" / PACKAGE
    export(package.parent, "regressor", FULL, compiled=True)
    assert printed(program, package, [[1.0] * len(EARLY_SCALARS)], passed=False)[0] == 0
    missing = "0 hidden states are given; the selector reads 3"
    assert printed(program, package, [[1.0] * len(PAIR.names)], passed=True) == (2, "", missing)


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
