"""Training with Lightning: all epochs, the best one by replay, curves in MLflow."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch

from pipelines.config import Config
from pipelines.train.fitting import MONITOR, fit, module_of
from pipelines.train.judging import monitored
from selector.schema import FULL, LIGHT
from selector.train.module import RootsModule, SelectorModule
from selector.train.tuning import replay_mode
from tests.selector.synthetic import SPACE, WIDTHS, static_mode, texts, timed

EPOCHS = 4
CONFIG = Config.model_validate(
    {"name": "fit", "train": {"epochs": EPOCHS, "batch": 32, "width": 8, "hidden": [16, 8], "learning_rate": 0.01}}
)


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Of a store of its own."""
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.chdir(tmp_path)
    mlflow.set_tracking_uri(uri)
    mlflow.set_experiment("fit")  # another test's would not be in this store
    return mlflow.MlflowClient()


def fitted(folder: Path, objective: str, level: str) -> tuple[SelectorModule, str]:
    """What training gives back, and the run with its curves."""
    splits = {"train": texts(12, seed=1, level=level), "validation": texts(8, seed=2, level=level)}
    module = module_of(CONFIG, objective, level, WIDTHS if level == FULL else [])
    further = (
        None
        if objective == "regressor"
        else {
            name: (timed(data).seconds((LIGHT,)), torch.full((len(data.length_R),), 300.0))
            for name, data in splits.items()
        }
    )
    roots = RootsModule(splits, "traversal", level, 1, CONFIG.train.batch, CONFIG.seed, further)
    module.begin_at(splits["train"], splits["train"].labels("traversal", slice(None), SPACE), roots.rows["train"])
    validation = timed(splits["validation"])
    module.judged = [(validation, monitored(static_mode(validation), module.asked))]
    with mlflow.start_run() as run:
        return fit(CONFIG, module, roots, folder, run.info.run_id), run.info.run_id


@pytest.mark.parametrize(("objective", "level"), [("regressor", LIGHT), ("regressor", FULL), ("policy", LIGHT)])
def test_all_epochs_are_trained_and_the_best_one_by_replay_is_kept(
    tmp_path: Path, client: Any, objective: str, level: str
) -> None:
    before = signal.getsignal(signal.SIGINT)
    kept, run = fitted(tmp_path / "fitted", objective, level)
    assert signal.getsignal(signal.SIGINT) is before
    curves = {
        name: [point.value for point in client.get_metric_history(run, name)]
        for name in (MONITOR, "train/loss", "validation/loss")
    }
    assert [len(curve) for curve in curves.values()] == [EPOCHS] * 3
    assert curves["train/loss"][-1] < curves["train/loss"][0]
    assert [file.name for file in (tmp_path / "fitted").iterdir()] == ["best.ckpt"]
    data = timed(texts(8, seed=2, level=level))
    static = static_mode(data)
    mode = monitored(static, kept.asked)
    mine = replay_mode(data, kept.predictions(data.texts, mode), mode, policy=objective != "regressor")
    ratio = mine.speed / replay_mode(data, {}, static).speed
    assert ratio == pytest.approx(max(curves[MONITOR]), rel=1e-5)
    assert not kept.training and kept.hparams["level"] == level


def test_the_same_seed_trains_the_same_selector(tmp_path: Path, client: Any) -> None:
    first, second = (fitted(tmp_path / name, "regressor", LIGHT)[0].state_dict() for name in ("a", "b"))
    assert all(torch.equal(values, second[name]) for name, values in first.items())
