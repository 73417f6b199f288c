"""What MLflow holds after a whole pipeline: runs, networks to compare, data sets, and the
registered selector."""

from __future__ import annotations

import ast
import json
import shutil
import statistics
from pathlib import Path
from typing import Any

import mlflow
import pytest
import torch

from pipelines.export.stage import alias_of
from pipelines.train.result import RESULT
from selector.runtime.selector import load_selector
from tests.checks import one_line, python
from tests.pipelines.runs import (
    STAGES,
    TEXTS,
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
    assert set(runs) == {*STAGES[1:], *networks}
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    for name in networks:
        parent = runs[name].data.tags["mlflow.parentRunId"]
        assert parent == runs["train"].info.run_id
    assert runs["train"].data.params["data.texts"] == str(TEXTS)
    policy = runs["train-policy-light"]
    for curve in ("train/loss", "validation/loss", "validation/replay/T 0 top-p 1"):
        assert len(client.get_metric_history(policy.info.run_id, curve)) == 2
    artefacts = {}
    for name, run in runs.items():
        artefacts[name] = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert "report.html" in artefacts["report"]
    assert {"provenance.json", "manifest.json"} <= artefacts["data"]


def test_mlflow_compares_networks_and_says_what_is_exported(demo: tuple[Path, str]) -> None:
    """Each number for every sampling setting, and as a mean over them."""
    metrics = {name: run.data.metrics for name, run in runs_of(demo)[1].items()}
    path = demo[0] / "runs" / "demo" / "training" / "result.json"
    result = RESULT.validate_json(path.read_bytes())
    rows = evaluation_of(demo[0])["summary"]["by_setting"]
    cases = [f"T {row['temperature']:g} top-p {row['top_p']:g}" for row in rows]

    def by_case(network: dict[str, float], name: str) -> list[float]:
        return [network[f"{name}/{case}"] for case in cases]

    for name in ("policy-light", "regressor-light"):
        network = metrics[f"train-{name}"]
        selector = result.selectors[name]
        ratios = [case.network_ratio.value for case in selector.cases]
        assert by_case(network, "replayed_ratio") == ratios
        assert network["replayed_ratio"] == pytest.approx(statistics.mean(ratios))
        kept = network["kept_ratio"]
        assert kept == selector.kept.value
        assert kept == pytest.approx(statistics.mean(by_case(network, "kept_ratio")))
        of_last_epoch = statistics.mean(by_case(network, "validation/replay"))
        assert network["validation/replay"] == pytest.approx(of_last_epoch, rel=1e-5)
    exported = [row["replay_ratio"] for row in rows]
    assert by_case(metrics["evaluate"], "exported_ratio") == exported
    assert metrics["train"].items() <= metrics[f"train-{result.chosen}"].items()


def test_mlflow_lists_the_traces_as_data_sets(demo: tuple[Path, str]) -> None:
    digests = {}
    for name, run in runs_of(demo)[1].items():
        datasets = [entry.dataset for entry in run.inputs.dataset_inputs]
        digests[name] = {dataset.name: dataset.digest for dataset in datasets}
    splits = [f"traces {split}" for split in ("train", "validation", "test")]
    assert list(digests["data"]) == splits
    assert digests["train-policy-light"].items() <= digests["data"].items()
    assert list(digests["train-policy-light"]) == splits[:2]


def test_the_export_is_a_version_of_a_registered_model(demo: tuple[Path, str]) -> None:
    (version,) = versions(demo[0])
    selector = load_selector(demo[0] / "runs" / "demo" / "selector")
    summary = evaluation_of(demo[0])["summary"]
    facts = selector.config
    assert facts.metrics["evaluation"] == summary
    # no commits of the hub
    assert facts.pair["revisions"] == {"target": None, "draft": None}
    tags = {
        "pair": facts.pair["fingerprint"],
        "verifier": selector.verifier,
        "objective": facts.objective,
    }
    for row in summary["by_setting"]:
        case = f"T {row['temperature']:g} top-p {row['top_p']:g}"
        tags[f"exported_ratio/{case}"] = f"{row['replay_ratio']:.3f}"
    assert tags.items() <= version.tags.items()
    assert version.description.startswith(repr(selector))


LOADED = """
import mlflow, sys
from selector.runtime import load_selector
other = mlflow.pyfunc.load_model(sys.argv[1])
for uri in ("models:/espalier-selector/1", "models:/espalier-selector@demo"):
    model, selector = mlflow.pyfunc.load_model(uri), load_selector(uri)
    example = model.input_example
    early = list(example.columns[: selector.schema.first])
    for columns in (list(example.columns), early):
        print(model.predict(example[columns]).to_dict("list"))
    print(model.metadata.signature.inputs.input_names() == list(selector.schema.names))
    print(selector)
print(other.predict(example).to_dict("list"))
for wrong in (example[early[:20]], {"scalars": example[early].to_numpy()}):
    try: model.predict(wrong)
    except mlflow.MlflowException as error: print(error)
try: load_selector("models:/espalier-selector/9")
except ValueError as error: print(error)
"""


def test_a_registered_version_loads(demo: tuple[Path, str], tmp_path: Path) -> None:
    """In a process that knows the store alone: by MLflow, whose model holds its code, and by
    `load_selector`. There it runs beside another version, whose code is another."""
    uri = f"sqlite:///{demo[0]}/mlruns/mlflow.db"
    (logged,) = (demo[0] / "mlruns").rglob("registered.py")
    other = shutil.copytree(logged.parent, tmp_path / "other")
    code = (other / logged.name).read_text()
    assert "return pd.DataFrame(chosen" in code
    (other / logged.name).write_text(code.replace("DataFrame(chosen", "DataFrame(chosen[:1]"))
    done = python("-W", "ignore", "-c", LOADED, str(other), MLFLOW_TRACKING_URI=uri)
    lines = done.stdout.splitlines()
    folder = demo[0] / "runs" / "demo" / "selector"
    selector = load_selector(folder)
    scalars = torch.tensor(list(zip(*selector.config.ranges, strict=True)))
    for line, seen in zip(lines[:2], (scalars, scalars[:, : selector.schema.first]), strict=True):
        rows = [selector.actions[at] for at in selector.scores({"scalars": seen}).argmax(-1)]
        assert line == str(
            {
                name: [json.loads(json.dumps(row[at])) for row in rows]
                for at, name in enumerate(("K", "L1", "L2", "style"))
            }
        )
    assert lines[2:4] == ["True", repr(selector)] and lines[4:8] == lines[:4]
    whole = ast.literal_eval(lines[0])
    assert lines[8] == str({name: values[:1] for name, values in whole.items()})
    count = selector.schema.first
    names = selector.schema.names
    for line, given in zip(lines[9:11], (20, 0), strict=True):
        assert line.startswith(
            f"{count - given} of {count} columns are missing, the first one is {names[given]}: "
        )
    assert lines[11].startswith(
        "models:/espalier-selector/9: MLflow does not give it (is MLFLOW_TRACKING_URI set?): "
    )


@pytest.mark.parametrize("uri", [None, "sqlite:///elsewhere.db"])
def test_a_registered_version_without_a_store_leaves_none(
    uri: str | None, inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr("mlflow.tracking._tracking_service.utils._tracking_uri", uri)
    with one_line("", "models:/espalier-selector@demo: MLflow does not give it"):
        load_selector("models:/espalier-selector@demo")
    assert list(inside.iterdir()) == []


def test_two_first_runs_at_once_share_a_new_store(tmp_path: Path) -> None:
    log, _ = small(tmp_path)
    line = ["logs", str(log), "train.epochs=1", "train.hidden=[8]", "--name"]
    runs = [started(tmp_path, tmp_path / f"{name}.txt", *line, name, config="") for name in "ab"]
    assert [run.join() or run.exitcode for run in runs] == [0, 0]
    client = mlflow.MlflowClient(f"sqlite:///{tmp_path}/mlruns/mlflow.db")
    assert {experiment.name for experiment in client.search_experiments()} >= {"a", "b"}


def test_an_alias_is_one_that_mlflow_takes() -> None:
    assert [alias_of(name) for name in ("demo", "a.b", "v2", "Latest")] == [
        "demo",
        "a-b",
        "run-v2",
        "run-Latest",
    ]
