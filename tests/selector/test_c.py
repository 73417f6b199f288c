"""The decision in C: `selector/export/c/espalier.h`, built with the C compiler alone."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from selector.actions import STYLES
from selector.export.flat import FILE
from selector.plain import PlainSelector
from selector.schema import EARLY_SCALARS, FULL, HIDDEN_STATES, LIGHT, PAIR, SCALARS_KEY
from tests.selector.exported import KINDS, batch_of, early_of, modes_of, roots_of

C = Path(__file__).parents[2] / "selector" / "export" / "c"
F, EARLY = len(PAIR.names), len(EARLY_SCALARS)
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


class CSelector:
    """The header as a shared library. `decide` has the interface of `PlainSelector.decide`."""

    def __init__(self, folder: Path, built: Path) -> None:
        self.library, error = ctypes.CDLL(str(built)), ctypes.create_string_buffer(256)
        self.library.espalier_load.restype = ctypes.c_void_p
        self.address = self.library.espalier_load(str(folder / FILE).encode(), error)
        if self.address is None:
            raise ValueError(error.value.decode())
        self.plain = PlainSelector(folder)

    def decide(self, scalars_BF: np.ndarray, hidden: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        states_BD = np.concatenate([np.zeros((len(scalars_BF), 0)), *hidden], axis=-1)
        scores_BA = np.empty((len(scalars_BF), len(self.plain.actions)), np.float32)
        answers = [
            self.one(*row, scores) for *row, scores in zip(scalars_BF, states_BD.astype("f4"), scores_BA, strict=True)
        ]
        return np.array(answers), scores_BA

    def one(self, scalars: np.ndarray, states: np.ndarray, scores: np.ndarray) -> int:
        """One decision, whose shape must be that of its position."""
        shape, size = (ctypes.c_int32 * 4)(), ctypes.c_size_t
        given = scalars.ctypes, size(len(scalars)), states.ctypes, size(len(states))
        here = ctypes.c_void_p(self.address)
        pointers = [each if isinstance(each, size) else ctypes.c_void_p(each.data) for each in given]
        index = self.library.espalier_decide(here, *pointers, shape, ctypes.c_void_p(scores.ctypes.data))
        if index >= 0:
            action = self.plain.actions[index]
            assert tuple(shape) == numbers_of(action)
        return int(index)


def numbers_of(action: tuple) -> tuple[int, ...]:
    """An action of `PlainSelector` as C has it."""
    if len(action) == 1:
        return 0, *action, 0, 0
    return *action[:3], STYLES.index(action[3]) if len(action) == 4 else 0


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The header's functions in a shared library; built as an engine would build it."""
    return build(tmp_path_factory.mktemp("c") / "espalier.so")


def build(path: Path) -> Path:
    options = ["-O3", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-DESPALIER_API="]
    subprocess.run(["cc", "-std=c99", *options, "-x", "c", str(C / "espalier.h"), "-o", path, "-lm"], check=True)
    return path


def assert_same(c: CSelector, scalars_BF: np.ndarray, hidden: list[np.ndarray]) -> None:
    """The same scores up to rounding, and the same action but where two have the same score."""
    index_B, scores_BA = c.decide(scalars_BF, hidden)
    wanted_B, wanted_BA = c.plain.decide(scalars_BF, hidden)
    np.testing.assert_allclose(scores_BA, wanted_BA, atol=2e-4, rtol=2e-5)
    b = np.arange(len(index_B))
    assert (wanted_BA[b, wanted_B] - wanted_BA[b, index_B]).max() < 1e-4
    assert (index_B == wanted_B).mean() > 0.98


@pytest.mark.parametrize(("objective", "level"), KINDS)
def test_c_decides_as_numpy(artefacts: dict[tuple[str, str], Path], library: Path, objective: str, level: str) -> None:
    """At all roots of texts of every setting with every level's features, and at roots with random ones."""
    c = CSelector(artefacts[objective, level], library)
    for mode in modes_of(level):
        data, rows = roots_of(mode, level)
        whole = batch_of(data, rows, level)
        for batch in (whole, early_of(whole)):
            assert_same(c, batch[SCALARS_KEY].numpy(), [batch[name].numpy() for name in HIDDEN_STATES if name in batch])
    random = np.random.default_rng(5)
    scalars_BF = (random.standard_normal((300, F)) * 10 ** random.uniform(-2, 4, (300, 1))).astype(np.float32)
    scalars_BF[:, [PAIR.index("temperature"), PAIR.index("top_p")]] = random.uniform(0, 2, (300, 2))
    hidden = [random.standard_normal((300, width)).astype(np.float32) for width in c.plain.widths[1:]]
    assert_same(c, scalars_BF, hidden)
    assert_same(c, scalars_BF[:, :EARLY], [])


def test_c_refuses_other_widths_and_numbers_that_are_not_finite(
    artefacts: dict[tuple[str, str], Path], library: Path
) -> None:
    light, full = (CSelector(artefacts["regressor", level], library) for level in (LIGHT, FULL))
    none, ones, scores = np.zeros(0, np.float32), np.ones(F, np.float32), np.empty(len(light.plain.actions), np.float32)
    states = np.ones(sum(full.plain.widths[1:]), np.float32)
    for width in (0, 1, EARLY - 1, EARLY + 1, F - 1):
        assert light.one(ones[:width], none, scores) == -1
    assert full.one(ones, none, scores) == full.one(ones, states[1:], scores) == light.one(ones, states, scores) == -1
    assert min(full.one(ones, states, scores), full.one(ones[:EARLY], none, scores), light.one(ones, none, scores)) >= 0
    for value in (np.nan, np.inf, -np.inf):
        for at in (0, EARLY - 1, F - 1):
            spoilt = ones.copy()
            spoilt[at] = value
            assert light.one(spoilt, none, scores) == -2
        assert full.one(ones, np.full_like(states, value), scores) == -2


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`example.c`, with the compiler's checks of memory and of undefined behaviour where it has them."""
    path = tmp_path_factory.mktemp("c") / "example"
    command = ["cc", "-std=c99", "-g", str(C / "example.c"), "-o", str(path), "-lm"]
    checks = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]
    if subprocess.run([*command, *checks], capture_output=True, check=False).returncode:
        subprocess.run(command, check=True)
    return path


def printed(program: Path, file: Path, rows: list[list[float]]) -> tuple[int, str, str]:
    """Exit code and both outputs for the features of some roots."""
    text = "".join(" ".join(f"{x:.9g}" for x in row) + "\n" for row in rows)
    done = subprocess.run([program, file], input=text, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr.strip()


def test_the_example_prints_the_actions(artefacts: dict[tuple[str, str], Path], program: Path) -> None:
    for level in (LIGHT, FULL):
        folder = artefacts["regressor", level]
        plain, mode = PlainSelector(folder), modes_of(level)[4]
        data, rows = roots_of(mode, level, count=1)
        for batch in (whole := batch_of(data, rows, level), early_of(whole)):
            hidden = [batch[name] for name in HIDDEN_STATES if name in batch]
            code, output, _ = printed(program, folder / FILE, torch.cat([batch[SCALARS_KEY], *hidden], -1).tolist())
            index_B, _ = plain.decide(batch[SCALARS_KEY].numpy(), [each.numpy() for each in hidden])
            shapes = map(numbers_of, map(plain.actions.__getitem__, index_B))
            assert code == 0 and output.splitlines() == [" ".join(map(str, shape)) for shape in shapes]
        assert printed(program, folder / FILE, [[1.0] * 7]) == (2, "", "wrong number of features")
        assert printed(program, folder / FILE, [[float("nan")] * EARLY]) == (2, "", "a number is not finite")


def test_damaged_files_are_refused_and_never_read_out_of_bounds(
    artefacts: dict[tuple[str, str], Path], program: Path, tmp_path: Path
) -> None:
    """Every word of the sizes, many other words, and the file's end; with the right checksum, too."""
    path, random = tmp_path / FILE, np.random.default_rng(3)
    rows = [[1.0] * EARLY, [2.0] * (F + sum(PlainSelector(artefacts["regressor", FULL]).widths[1:]))]
    whole = np.frombuffer((artefacts["regressor", FULL] / FILE).read_bytes(), "<u4")
    damaged = [(at, value) for at in range(2, 14) for value in (0, 1, 77, 2**31 - 1, 2**32 - 1)]
    damaged += [(int(at), int(random.integers(2**32))) for at in random.integers(14, len(whole), 60)]
    seen = set()
    for at, value in damaged:
        words = whole.copy()
        words[at] = value
        path.write_bytes(words.tobytes())
        if value != whole[at]:
            assert printed(program, path, rows)[2] == f"{path}: damaged: export the selector again"
        words[1] = zlib.crc32(words[2:].tobytes())
        path.write_bytes(words.tobytes())
        code, _, error = printed(program, path, rows)
        assert (code, error) == (0, "") or (code == 2 and len(error.splitlines()) == 1), error
        assert code == 0 or error in (
            f"{path}: its parts do not fit: export the selector again",
            f"{path}: another format: export the selector again",
        )
        seen.add(error)
    assert len(seen) == 3
    for size in (0, 3, 8, 12, 4 * len(whole) - 4):
        path.write_bytes(whole.tobytes()[:size])
        assert printed(program, path, rows)[0] == 2
    assert printed(program, tmp_path / "nowhere", rows)[2] == f"{tmp_path / 'nowhere'}: cannot be read"
