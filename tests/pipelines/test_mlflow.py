"""What MLflow holds after a whole pipeline: runs, networks to compare, data sets, and the
registered selector."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch

from pipelines.export.stage import alias_of
from selector.runtime.selector import load_selector
from tests.pipelines.runs import (
    SMALL,
    STAGES,
    TEXTS,
    environment,
    espalier,
    evaluation_of,
    started,
    versions,
)
from tests.pipelines.small_logs import small


def runs_of(demo: tuple[Path, str]) -> tuple[Any, dict[str, Any]]:
    """A client of the demo's store, and its runs by name."""
    client = mlflow.MlflowClient(f"sqlite:///{demo[0]}/mlruns/mlflow.db")
    experiment = client.get_experiment_by_name("demo")
    return client, {
        run.info.run_name: run for run in client.search_runs([experiment.experiment_id])
    }


def test_mlflow_holds_parameters_curves_and_the_report(demo: tuple[Path, str]) -> None:
    client, runs = runs_of(demo)
    networks = ("train-policy-light", "train-regressor-light")
    assert set(runs) == {"demo", *STAGES[1:], *networks}
    below = {name: run.data.tags.get("mlflow.parentRunId") for name, run in runs.items()}
    ids = {name: run.info.run_id for name, run in runs.items()}
    assert below == {
        "demo": None,
        **dict.fromkeys(STAGES[1:], ids["demo"]),
        **dict.fromkeys(networks, ids["train"]),
    }
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert all(
        {"stage", "pair", "commit", "machine"} <= set(run.data.tags) for run in runs.values()
    )
    assert runs["train"].data.params["data.texts"] == str(TEXTS)
    policy = runs["train-policy-light"]
    for curve in ("train/loss", "validation/loss", "validation/replay/T 0 top-p 1"):
        assert len(client.get_metric_history(policy.info.run_id, curve)) == 2
    for run in (runs["report"], runs["demo"]):
        assert "report.html" in {file.path for file in client.list_artifacts(run.info.run_id)}
    assert {"config.yaml", "provenance.json", "manifest.json"} <= {
        file.path for file in client.list_artifacts(runs["data"].info.run_id)
    }


def test_mlflow_compares_networks_and_says_what_is_exported(demo: tuple[Path, str]) -> None:
    """Each number for every sampling setting, and as a mean over them; in the pipeline's run,
    too."""
    metrics = {name: run.data.metrics for name, run in runs_of(demo)[1].items()}
    result = json.loads((demo[0] / "runs" / "demo" / "training" / "result.json").read_text())
    rows = evaluation_of(demo[0])["summary"]["by_setting"]
    places = [f"T {row['temperature']:g} top-p {row['top_p']:g}" for row in rows]
    for name in ("policy-light", "regressor-light"):
        own, modes = metrics[f"train-{name}"], result["selectors"][name]["modes"]
        assert [own[f"replayed_ratio/{place}"] for place in places] == [
            mode["replay"]["value"] for mode in modes
        ]
        assert own["replayed_ratio"] == pytest.approx(
            sum(mode["replay"]["value"] for mode in modes) / 2
        )
        assert own["kept_ratio"] == result["selectors"][name]["metrics"]["validation/replay_gated"]
        assert own["kept_ratio"] == pytest.approx(
            sum(own[f"kept_ratio/{place}"] for place in places) / 2
        )
        judged = (
            own[f"validation/replay{place}"] for place in ("", *(f"/{place}" for place in places))
        )
        mean, *each = judged  # of the last epoch
        assert mean == pytest.approx(sum(each) / 2, rel=1e-5)
    assert [metrics["demo"][f"exported_ratio/{place}"] for place in places] == [
        row["replay_ratio"] for row in rows
    ]
    assert metrics["demo"] == metrics["train"] | metrics["evaluate"]
    assert not [
        name for name in metrics["evaluate"] if name.startswith("ratio_vs") and "/T " not in name
    ]


def test_mlflow_lists_the_traces_as_data_sets(demo: tuple[Path, str]) -> None:
    inputs = {
        name: {data.dataset.name: data.dataset for data in run.inputs.dataset_inputs}
        for name, run in runs_of(demo)[1].items()
    }
    splits = [f"traces {split}" for split in ("train", "validation", "test")]
    assert list(inputs["data"]) == splits and list(inputs["train-policy-light"]) == splits[:2]
    manifest = json.loads((demo[0] / "runs" / "demo" / "traces" / "manifest.json").read_text())
    sizes = [json.loads(inputs["data"][name].profile)["num_rows"] for name in splits]
    assert sum(sizes) == sum(shard["rows"] for shard in manifest["shards"].values())
    assert inputs["train-policy-light"][splits[0]].digest == inputs["data"][splits[0]].digest


def test_the_export_is_a_version_of_a_registered_model(demo: tuple[Path, str]) -> None:
    (version,) = versions(demo[0])
    selector = load_selector(demo[0] / "runs" / "demo" / "selector")
    summary = evaluation_of(demo[0])["summary"]
    assert selector.config.metrics["evaluation"] == summary
    assert version.tags["pair"] == selector.config.pair["fingerprint"]
    # no commits of the hub
    assert selector.config.pair["revisions"] == {"target": None, "draft": None}
    assert (version.tags["verifier"], version.tags["objective"]) == (
        selector.verifier,
        selector.config.objective,
    )
    for row in summary["by_setting"]:
        place = f"T {row['temperature']:g} top-p {row['top_p']:g}"
        assert (
            version.tags[f"exported_ratio/{place}"]
            == f"{row['replay_ratio']:.3f} ±{row['replay_error']:.3f}"
        )
    assert version.description.startswith(repr(selector))


LOADED = """
import mlflow, numpy, pandas
from selector.runtime import load_selector
for uri in ("models:/espalier-selector/1", "models:/espalier-selector@demo"):
    model, selector = mlflow.pyfunc.load_model(uri), load_selector(uri)
    example = model.input_example
    early = list(example.columns[: selector.schema.first])
    for columns in (list(example.columns), early):
        print(model.predict(example[columns]).to_dict("list"))
    print(model.metadata.signature.inputs.input_names() == list(selector.schema.names))
    print(selector)
try: model.predict(example[early[:31]])
except mlflow.MlflowException as error:
    print("required" in str(error) or "missing" in str(error).lower())
try: load_selector("models:/espalier-selector/9")
except ValueError as error: print(error)
"""


def test_a_registered_version_loads(demo: tuple[Path, str]) -> None:
    """In a process that knows the store alone: by MLflow, whose model holds its code, and by
    `load_selector`."""
    variables = {**environment(), "MLFLOW_TRACKING_URI": f"sqlite:///{demo[0]}/mlruns/mlflow.db"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", LOADED],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = done.stdout.splitlines()
    folder = demo[0] / "runs" / "demo" / "selector"
    selector = load_selector(folder)
    scalars = torch.tensor(list(zip(*selector.config.ranges, strict=True)))
    for line, seen in zip(found[:2], (scalars, scalars[:, : selector.schema.first]), strict=True):
        rows = [selector.actions[at] for at in selector.scores({"scalars": seen}).argmax(-1)]
        assert line == str(
            {name: [row[at] for row in rows] for at, name in enumerate(("K", "L1", "L2", "style"))}
        )
    assert found[2:4] == ["True", repr(selector)] and found[4:8] == found[:4]
    assert found[8] == "True"
    assert found[9].startswith(
        "models:/espalier-selector/9: MLflow does not give it (is MLFLOW_TRACKING_URI set?): "
    )


def test_a_copied_store_keeps_to_its_own_folder(copy: Path) -> None:
    """MLflow's database holds absolute paths: those of the folder that it was copied from."""
    (copy / "runs" / "demo" / "report.html").unlink()
    espalier(copy, "report", *SMALL)
    client = mlflow.MlflowClient(f"sqlite:///{copy}/mlruns/mlflow.db")
    # and the pipeline's
    written, _ = client.search_runs([client.get_experiment_by_name("demo").experiment_id])
    place = Path(written.info.artifact_uri.removeprefix("file://"))
    assert place.is_relative_to(copy) and (place / "report.html").exists()
    (kept,) = (
        each for each in client.search_experiments() if each.name.startswith("demo, copied from ")
    )
    assert len(client.search_runs([kept.experiment_id])) > 3


def test_two_first_runs_at_once_share_a_new_store(tmp_path: Path) -> None:
    log, _ = small(tmp_path)
    line = ["logs", str(log), "train.epochs=1", "train.hidden=[8]", "--name"]
    runs = [started(tmp_path, tmp_path / f"{name}.txt", *line, name, config="") for name in "ab"]
    assert [run.join() or run.exitcode for run in runs] == [0, 0]
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlruns/mlflow.db")
    assert {each.name for each in client.search_experiments()} >= {"a", "b"}


def test_an_alias_is_one_that_mlflow_takes() -> None:
    assert [alias_of(name) for name in ("demo", "a.b", "v2", "Latest")] == [
        "demo",
        "a-b",
        "run-v2",
        "run-Latest",
    ]
