"""Training with Lightning: all epochs, the best one by replay, curves in MLflow."""

from __future__ import annotations

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch
from scipy import stats

from pipelines.config import Config
from pipelines.train.fitting import MONITOR, fitted, module_of
from pipelines.train.judging import monitored
from selector.schema import FULL, LIGHT, PAIR
from selector.train.module import SelectorModule
from selector.train.tuning import replay_mode
from tests.selector.synthetic import SPACE, WIDTHS, static_mode, texts, timed

EPOCHS = 4
CONFIG = Config.model_validate({"name": "fit", "train": {"epochs": EPOCHS, "batch": 8, "hidden": [16, 8]}})


@pytest.fixture
def client(store: str) -> Any:
    """Of a store of its own."""
    mlflow.set_tracking_uri(store)
    mlflow.set_experiment("fit")  # another test's would not be in this store
    return mlflow.MlflowClient()


def fit(folder: Path, objective: str, level: str) -> tuple[SelectorModule, str]:
    """What training gives back, and the run with its curves."""
    splits = {"train": texts(12, seed=1, level=level), "validation": texts(8, seed=2, level=level)}
    module = module_of(CONFIG, objective, level, WIDTHS if level == FULL else [])
    times = {
        name: (timed(data).seconds((LIGHT,)), torch.full((len(data.length_R),), 300.0)) for name, data in splits.items()
    }
    validation = timed(splits["validation"])
    judged = [(validation, monitored(static_mode(validation), module.asked))]
    with mlflow.start_run() as run:
        own = run.info.run_id
        return fitted(
            CONFIG, module, splits, "traversal", judged, folder, own, times if objective == "policy" else None
        ), own


@pytest.mark.parametrize(("objective", "level"), [("regressor", LIGHT), ("regressor", FULL), ("policy", LIGHT)])
def test_all_epochs_are_trained_and_the_best_one_by_replay_is_kept(
    tmp_path: Path, client: Any, objective: str, level: str
) -> None:
    before = signal.getsignal(signal.SIGINT)
    kept, run = fit(tmp_path / "fitted", objective, level)
    assert signal.getsignal(signal.SIGINT) is before
    curves = {
        name: [point.value for point in client.get_metric_history(run, name)]
        for name in (MONITOR, f"{MONITOR}/T 1 top-p 1", "train/loss", "validation/loss", "learning rate")
    }
    assert [len(curve) for curve in curves.values()] == [EPOCHS] * 5
    assert len(set(curves["learning rate"])) == EPOCHS and curves[MONITOR] == curves[f"{MONITOR}/T 1 top-p 1"]
    assert curves["train/loss"][-1] < curves["train/loss"][0]
    assert [file.name for file in (tmp_path / "fitted").iterdir()] == ["best.ckpt"]
    data = timed(texts(8, seed=2, level=level))
    static = static_mode(data)
    mode = monitored(static, kept.asked)
    mine = replay_mode(data, kept.predictions(data.texts, mode), mode, policy=objective != "regressor")
    ratio = mine.speed / replay_mode(data, {}, static).speed
    assert ratio == pytest.approx(max(curves[MONITOR]), rel=1e-5)
    assert not kept.training and kept.hparams["level"] == level


def test_the_metrics_of_every_epoch_are_those_of_numpy_and_scipy(tmp_path: Path, client: Any) -> None:
    """Their values at the best epoch, by other code; as curves in MLflow."""
    kept, run = fit(tmp_path, "regressor", LIGHT)
    data = texts(8, seed=2)
    labels = timed(data).survivals_RS[~data.unknown_R].double()
    with torch.no_grad():
        log_survivals = kept.network(data.scalars_RF, [], torch.ones(len(data.length_R), 1))
    survivals = log_survivals.exp()[~data.unknown_R].double()
    predicted, labelled = (SPACE.efficiencies(each).numpy() for each in (survivals, labels))
    own, truth = survivals.flatten().numpy(), labels.flatten().numpy()
    bins = np.digitize(own, np.linspace(0, 1, 16)[1:-1])
    distances = [np.abs(own[bins == at].sum() - truth[bins == at].sum()) for at in range(15)]
    expected = {
        "explained_variance": 1 - (labelled - predicted).var(0).sum() / labelled.var(0).sum(),
        "rank_correlation": stats.spearmanr(predicted.mean(-1), labelled.mean(-1)).statistic,
        "calibration_error": sum(distances) / len(own),
    }
    replays = [point.value for point in client.get_metric_history(run, MONITOR)]
    for name, value in expected.items():
        history = client.get_metric_history(run, f"validation/{name}/T 1 top-p 1")
        curve = [point.value for point in sorted(history, key=lambda point: point.step)]
        assert len(curve) == EPOCHS and len(set(curve)) > 1
        assert curve[replays.index(max(replays))] == pytest.approx(value, rel=2e-3), name


def test_a_policys_network_is_that_of_the_paper() -> None:
    """DDTE, app. E: hidden states to 128 numbers each, layers of 512 and 32 with GELU; it sees the context length."""
    made = module_of(CONFIG, "policy", FULL, WIDTHS).eval()
    assert [[layer.in_features, layer.out_features] for layer, _ in made.network.blocks] == [[w, 128] for w in WIDTHS]
    linear, after = made.network.mlp[::3], [type(layer).__name__ for layer in made.network.mlp[1:3]]
    assert [layer.out_features for layer in linear] == [512, 32, len(SPACE)] and after == ["GELU", "Dropout"]
    data = texts(level=FULL)
    is_length_F = torch.tensor([name == "context_length" for name in PAIR.names])
    longer = replace(data, scalars_RF=data.scalars_RF + 50.0 * is_length_F)
    assert not torch.allclose(made.scores(longer), made.scores(data), atol=1e-3)
    regressor = module_of(CONFIG, "regressor", FULL, WIDTHS).eval()
    assert torch.equal(regressor.scores(longer), regressor.scores(data))
