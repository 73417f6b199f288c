"""The whole pipeline, from the pair to the registered selector."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from selector.modes import SURE
from selector.runtime import load_selector
from tests.pipelines.runs import SMALL, espalier

STOPPING = ("entropy stop", "stopping head (SpecDec++)")


def test_the_demo_ends_with_a_table_a_report_and_a_selector(demo: tuple[Path, str]) -> None:
    folder, output = demo
    run = folder / "runs" / "demo"
    assert "ratio to best static" in output
    assert str(run / "report.html") in output and str(run / "selector") in output
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert {"ratio_vs_best_static_delayed", "ratio_vs_static_traversal_wall", "selector_time_share"} <= set(
        evaluation["summary"]
    )
    keys = {"method", "verifier", "temperature", "top_p", "tokens_per_second", "block_efficiency", "interval_95"}
    keys |= {"tokens", "prompts"}
    for entry in evaluation["methods"]:
        assert keys <= set(entry)
        low, high = entry["interval_95"]
        assert 0 < low <= entry["tokens_per_second"] <= high
        assert 1 <= entry["block_efficiency"] <= 17
        if entry["method"] == "autoregressive":
            assert entry["block_efficiency"] == 1
    assert {"oracle_ratio", "gap_closed"} <= set(evaluation["summary"])
    names = {entry["method"] for entry in evaluation["methods"]}
    expected = {"autoregressive", "selector", "best static", "best static by kind", "static traversal at the root"}
    assert {*expected, "assisted generation", "assisted generation, constant", *STOPPING} <= names
    assert len(names & {f"static {verifier}" for verifier in ("traversal", "specinfer", "lifted_uniform")}) >= 1
    report = (run / "report.html").read_text()
    assert report.count("data:image/png;base64,") == 4
    for title in ("Block efficiency by tree", "Predicted against realised", "How often each action", "Throughput"):
        assert title in report


def test_provenance_stands_beside_every_output(demo: tuple[Path, str]) -> None:
    for stage in ("pair", "latency", "data", "train", "evaluate", "export", "report"):
        record = json.loads((demo[0] / "runs" / "demo" / "stages" / f"{stage}.json").read_text())
        assert record["finished"]
        assert record["provenance"]["config"]["data"]["roots"] == 64
        assert "torch" in record["provenance"]["packages"]


def test_mlflow_holds_parameters_curves_and_the_report(demo: tuple[Path, str]) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{demo[0]}/mlruns/mlflow.db")
    experiment = client.get_experiment_by_name("demo")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert set(runs) >= {"pair", "latency", "data", "train", "train-policy", "train-regressor", "evaluate", "report"}
    assert len(runs["train"].data.params["data.fingerprint"]) == 16
    policy = runs["train-policy"]
    assert policy.data.params["objective"] == "policy"
    assert len(client.get_metric_history(policy.info.run_id, "train/loss")) == 3
    assert len(client.get_metric_history(policy.info.run_id, "validation/ratio")) >= 3
    chosen = runs[f"train-{runs['train'].data.tags['chosen']}"]
    for run in (runs["report"], chosen):  # parameters, curves and the report stand in one run too
        assert "report.html" in {file.path for file in client.list_artifacts(run.info.run_id)}
    assert {"config.yaml", "provenance.json", "manifest.json"} <= {
        file.path for file in client.list_artifacts(runs["data"].info.run_id)
    }


def versions(folder: Path, model: str = "espalier-selector") -> list:
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{folder}/mlruns/mlflow.db").search_model_versions(f"name = '{model}'")


def test_the_export_is_a_version_of_a_registered_model(demo: tuple[Path, str]) -> None:
    (version,) = versions(demo[0])
    selector = load_selector(demo[0] / "runs" / "demo" / "selector")
    summary = json.loads((demo[0] / "runs" / "demo" / "evaluation.json").read_text())["summary"]
    assert version.tags["pair"] == selector.config["pair"]["fingerprint"]
    assert (version.tags["verifier"], version.tags["objective"]) == (selector.verifier, selector.config["objective"])
    assert float(version.tags["ratio_vs_autoregressive"]) == pytest.approx(summary["ratio_vs_autoregressive"], abs=1e-4)


def test_datasets_reads_the_traces(demo: tuple[Path, str], tmp_path: Path) -> None:
    from datasets import load_dataset

    traces = demo[0] / "runs" / "demo" / "traces"
    files = {split: str(traces / split / "*.parquet") for split in ("train", "validation")}
    data = load_dataset("parquet", data_files=files, cache_dir=str(tmp_path))
    row = data["train"][0]
    assert len(row["traversal.mean"]) == len(row["specinfer.realised"]) == 233
    assert {row["root_kind"] for split in data.values() for row in split} == {"step", "stride"}
    prompts = {split: {row["prompt"].split(":")[1] for row in data[split]} for split in data}
    assert prompts["train"].isdisjoint(prompts["validation"])


def test_the_exported_selector_decodes(demo: tuple[Path, str]) -> None:
    from data_gen.decoding import Decoder
    from data_gen.models import ModelPair
    from data_gen.sampling import Sampling
    from data_gen.verification import get_verifier

    run = demo[0] / "runs" / "demo"
    pair = ModelPair.load(str(run / "pair" / "models" / "target"), str(run / "pair" / "models" / "draft"), device="cpu")
    selector = load_selector(run / "selector")
    prompt = pair.tokenizer("def function(argument):\n")["input_ids"]
    expected = pair.target.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)[0, len(prompt) :]
    decoder = Decoder(pair, Sampling(0), get_verifier(selector.verifier), selector)
    assert decoder.decode(prompt, 20, torch.Generator().manual_seed(0)).tokens == expected.tolist()


def test_a_second_run_reuses_everything_and_says_so(demo: tuple[Path, str]) -> None:
    before = {path: path.stat().st_mtime_ns for path in (demo[0] / "runs").rglob("*") if path.is_file()}
    output = espalier(demo[0], "demo", *SMALL)
    for stage in ("pair", "latency", "data", "train", "evaluate", "export", "report"):
        assert f"{stage}: reusing" in output
    assert len(versions(demo[0])) == 1
    assert before == {path: path.stat().st_mtime_ns for path in (demo[0] / "runs").rglob("*") if path.is_file()}


def test_every_stage_has_a_plan_that_does_nothing(tmp_path: Path) -> None:
    output = espalier(tmp_path, "demo", "--plan")
    assert "data: about 1200 roots" in output and "MB" in output
    assert output.count("\n") >= 8
    assert list(tmp_path.iterdir()) == []


def test_the_full_config_runs(tmp_path: Path) -> None:
    few = ("verifiers=[traversal,lifted_uniform]", "train.objectives=[regressor]", "data.samples=2")
    less = ("evaluate.prompts=2", "evaluate.tokens=8", "evaluate.assisted=false")
    espalier(tmp_path, "demo", *SMALL, *few, *less, config="full.yaml")
    evaluation = json.loads((tmp_path / "runs" / "full" / "evaluation.json").read_text())
    assert len({(entry["temperature"], entry["top_p"]) for entry in evaluation["methods"]}) == 8


def test_the_settings_config_runs_on_the_demos_pair(demo: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(demo[0] / "runs" / "demo" / "pair", tmp_path / "runs" / "demo" / "pair")
    few = (
        "sampling=[{temperature: 1.0, top_p: 0.9}]",
        "data.roots=32",
        "evaluate.prompts=2",
        "evaluate.assisted=false",
        "train.others=[specinfer]",
        "verifiers=[specinfer,traversal,lifted_uniform]",
    )
    small = [option for option in SMALL if not option.startswith("pair")]
    output = espalier(tmp_path, "demo", *small, *few, config="settings.yaml")
    assert "Held-out prompts, predicted time, synthetic gpu_like_1/20" in output
    evaluation = json.loads((tmp_path / "runs" / "settings" / "evaluation.json").read_text())
    assert {entry["clock"] for entry in evaluation["methods"]} == {"wall", "gpu_like_1/5", "gpu_like_1/20"}
    for rival in ("static_traversal", "best_static_delayed"):
        assert evaluation["summary"][f"ratio_vs_{rival}_gpu_like"] > 0
    for clock in ("", "_gpu_like_1/5", "_gpu_like_1/20"):
        assert evaluation["summary"][f"ratio_specinfer_vs_its_static{clock}"] > 0
    made = {(entry["clock"], entry["verifier"]): entry for entry in evaluation["decisions"]}
    assert set(made) == {
        (clock, verifier) for clock in ("wall", "gpu_like_1/5", "gpu_like_1/20") for verifier in ("joint", "specinfer")
    }
    for entry in made.values():
        assert [(way["at_root"], way["on_trunk"]) for way in entry["ways"]].count((False, False)) == 1
        assert len(entry["ways"]) == (3 if entry["objective"] == "regressor" else 2)
        for way in entry["ways"]:  # tried in decoding: what decides and surely pays, by the traces
            promising = way["error"] is not None and way["ratio"] - SURE * way["error"] > 1
            assert (way["decoded"] is not None) == promising
    selector = load_selector(tmp_path / "runs" / "settings" / "selector")
    assert selector.verifier == "joint" and "traversal" in selector.verifiers and "specinfer" not in selector.verifiers


def test_a_store_without_a_registry_is_one_line(
    demo: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import mlflow

    from pipelines.config import Config
    from pipelines.registry import register
    from pipelines.stage import Stage

    monkeypatch.setenv("MLFLOW_REGISTRY_URI", "nowhere://")
    mlflow.set_tracking_uri(f"sqlite:///{demo[0]}/mlruns/mlflow.db")
    with mlflow.start_run(experiment_id=mlflow.set_experiment("none").experiment_id):
        selector = load_selector(demo[0] / "runs" / "demo" / "selector")
        register(Stage("export", Config(name="demo", mlflow_model="other"), {}, ()), mlflow, selector, "selector")
    monkeypatch.delenv("MLFLOW_REGISTRY_URI")
    (line,) = capsys.readouterr().out.strip().splitlines()
    assert line.startswith("export: warning: not registered as other: ")
    assert not versions(demo[0], "other")
