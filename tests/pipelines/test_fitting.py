"""Training in several processes, against the same in one."""

from __future__ import annotations

from pathlib import Path

import mlflow
import pytest
import pytorch_lightning as pl

from pipelines.config import Config
from pipelines.fitting import fit
from selector.data import TracesModule, shares
from selector.schema import InputError
from tests.selector.synthetic import profile, roots


@pytest.mark.parametrize(("objective", "strategy"), [("policy", "ddp_fork"), ("regressor", "auto")])
def test_two_processes_validate_what_one_does(
    objective: str, strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the parent gets back is the checkpoint, and the metrics of every validation root counted once."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)
    train = {"devices": 2, "strategy": strategy, "epochs": 3, "width": 8, "hidden": [16, 8], "learning_rate": 3e-3}
    config = Config.model_validate({"name": "two", "train": train})
    traces = TracesModule(tmp_path, ["traversal"], profile(), config.train.batch, config.seed).with_roots(
        roots(128), roots(101, seed=5)
    )
    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    mlflow.set_experiment("two")  # another test's would not be in this store
    with mlflow.start_run() as run:
        fitted = fit(config, objective, traces, tmp_path / "fitted", run.info.run_id)
    assert fitted.checkpoint.exists()
    assert len(mlflow.MlflowClient().get_metric_history(run.info.run_id, "train/loss")) == 3
    alone = pl.Trainer(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False)
    metrics = alone.validate(fitted.module, datamodule=traces, verbose=False)[0]
    assert fitted.metrics == pytest.approx(metrics, rel=1e-5)
    assert set(metrics) >= {"validation/loss", "validation/ratio", "validation/worst_5_percent"}


@pytest.mark.parametrize(("count", "processes"), [(101, 2), (8193, 2), (5, 5), (20_000, 3)])
def test_processes_share_out_the_roots_in_equally_many_batches(count: int, processes: int) -> None:
    parts = [shares(count, processes, rank) for rank in range(processes)]
    assert len({len(part) for part in parts}) == 1
    assert sorted(root for part in parts for batch in part for root in batch) == list(range(count))
    assert all(0 < len(batch) <= 4096 for part in parts for batch in part)


def test_more_processes_than_roots_are_refused() -> None:
    with pytest.raises(InputError, match=r"train\.devices: 3 processes for 2 validation roots"):
        shares(2, 3, 0)
