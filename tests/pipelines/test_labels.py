"""What the `labels` stage computes from its measurements, and the stage itself on a tiny pair."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from pipelines.config import Config, load_config
from pipelines.labels_results import EXACT, EXPECTED, WAYS, Measured, agreement, allocation, choices, errors, speed
from selector.actions import ActionSpace
from tests.pipelines.test_data import config_file

ACTIONS = len(ActionSpace.default())
TWO = {"verifiers": ["specinfer", "traversal"], "train": {"verifier": "traversal"}}
CONFIG = Config.model_validate({"name": "run", **TWO})


def measured(bias: float = 0.0, roots: int = 10, pool: int = 64) -> Measured:
    """Both procedures draw around the same mean, exact labels with variance 4, averaged ones with variance 1."""
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    result = Measured(ours=[0.1] * roots, theirs=[7.0] * roots, model_seconds=[0.03] * roots)
    for _ in range(roots):
        mean_VA = 3 + draw(2, ACTIONS)
        mean_VA[:, 0] = 1
        result.own_RVPA.append(mean_VA.unsqueeze(1) + 2 * draw(2, 4, ACTIONS))
        for way in WAYS:
            noise = 2 if way == EXACT else 1
            result.pool_RVSA[way].append(mean_VA.unsqueeze(1) + bias + noise * draw(2, pool, ACTIONS))
    seconds = {"specinfer": [0.01], "traversal": [0.02]}
    result.label_seconds = dict.fromkeys(WAYS, seconds)
    return result


def test_agreement_sees_a_bias() -> None:
    """Of 10 roots; a false alarm here means a largest |z| over 4.5 among 233."""
    for row in agreement(CONFIG, measured()):
        _, low, high = row["difference"]
        assert low < 0 < high
        assert row["largest |z|"] < 4.5 and row["actions within 1.96"] > 0.9
    for row in agreement(CONFIG, measured(bias=0.1)):
        assert row["difference"][1] > 0


def test_speed_is_taken_at_equal_variance() -> None:
    for row in speed(CONFIG, measured()):
        # 70 times as fast; 4 trees of variance 4 against 2 supertrees of variance 1, or of variance 4
        assert row["at equal variance"][0] == pytest.approx(70 * 1 / 0.5, rel=0.05)
        assert row["both exact"][0] == pytest.approx(70 * 1 / 2, rel=0.05)
        assert row["passes"] == 16 and row["passes, theirs"] == 1972
        assert row["at equal variance"][1] < row["at equal variance"][0] < row["at equal variance"][2]


def test_errors_fall_with_the_root_of_the_samples() -> None:
    rows = {(row["labels"], row["verifier"]): row for row in errors(CONFIG, measured())}
    assert rows[EXACT, "traversal"]["1"] == pytest.approx(2, rel=0.05)
    assert rows[EXPECTED, "traversal"]["4"] == pytest.approx(0.5, rel=0.05)
    assert rows[EXPECTED, "traversal"]["ms each"] == pytest.approx(50)
    assert rows[EXPECTED, "traversal"]["labelling"] == pytest.approx(0.4)


def test_noisier_labels_choose_worse_trees() -> None:
    rows = {(row["labels"], row["verifier"]): row for row in choices(measured(), ("specinfer", "traversal"))}
    for name in ("specinfer", "traversal"):
        gains = [rows[EXACT, name]["1"], *(rows[EXPECTED, name][samples] for samples in ("1", "8", "32"))]
        assert [gain for gain, *_ in gains] == sorted(gain for gain, *_ in gains)


def test_allocation_gains_where_roots_differ() -> None:
    even = [torch.randn(2, 4000, 3, generator=torch.Generator().manual_seed(n)) for n in range(2)]
    assert allocation(even)["known"] == pytest.approx(1, abs=0.01)
    # deviations 1 and 3: the mean variance is 5, the squared mean deviation 4
    assert allocation([even[0], 3 * even[1]])["known"] == pytest.approx(5 / 4, rel=0.03)


def test_the_stage_writes_its_tables(
    tmp_path: Path,
    pair_folders: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from pipelines.labels import plan, run

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    few = ["labels.roots=2", "labels.samples=2", "labels.pool=16", "labels.vocabularies=[300]", "data.threads=1"]
    config = load_config(config_file(tmp_path, pair_folders), few)
    assert "1,972 passes a root" in plan(config)[0]
    run(config)
    results = json.loads((tmp_path / "runs" / "run" / "labels.json").read_text())
    assert {row["verifier"] for row in results["speed"]} == {"specinfer", "traversal"}
    for row in results["speed"]:
        assert row["roots/s"] > row["roots/s, theirs"]
    assert all(0 < row["ms per supertree"] < 1e4 for row in results["labelling"])
    assert (tmp_path / "runs" / "run" / "labels.png").stat().st_size > 10_000
    capsys.readouterr()
    run(config)
    assert "reusing" in capsys.readouterr().out
