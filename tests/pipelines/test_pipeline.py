"""The whole pipeline through its real entry point, on a pair that takes seconds to train."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pipelines.cli import main
from selector.runtime import load_selector
from selector.schema import SCHEMA_VERSION
from tests.conftest import save_pair

ROOT = Path(__file__).parents[2]
SMALL_PAIR = [
    "pair.embedded.vocabulary=320",
    "pair.embedded.context=32",
    "pair.embedded.max_files=12",
    *(f"pair.embedded.{role}.{key}" for role in ("target", "draft") for key in ("hidden=32", "intermediate=48")),
    *(f"pair.embedded.{role}.{key}" for role in ("target", "draft") for key in ("heads=2", "steps=12", "batch=4")),
    "pair.embedded.target.layers=2",
]
SMALL = [
    *SMALL_PAIR,
    "prompts.tokens=12",
    "data.roots=64",
    "data.tokens=24",
    "data.trajectories_per_shard=2",
    "latency.lengths=[16,48]",
    "latency.nodes=[1,5,17]",
    "latency.repeats=3",
    "latency.prompts=1",
    "train.epochs=3",
    "train.width=8",
    "train.hidden=[16,8]",
    "evaluate.prompts=3",
    "evaluate.tokens=16",
    "evaluate.bootstrap=100",
]


STOPPING = ("entropy stop", "stopping head (SpecDec++)")


def command(stage: str, *arguments: str, config: str = "demo.yaml") -> list[str]:
    return [sys.executable, "-m", "pipelines.cli", stage, "--config", str(ROOT / "configs" / config), *arguments]


def environment() -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    return {**kept, "PYTHONPATH": str(ROOT)}


def espalier(folder: Path, stage: str, *arguments: str, config: str = "demo.yaml") -> str:
    """Run a stage in a process of its own; its output."""
    todo = command(stage, *arguments, config=config)
    result = subprocess.run(todo, cwd=folder, env=environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout + result.stderr


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("demo")
    return folder, espalier(folder, "demo", *SMALL)


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
    selector = load_selector(tmp_path / "runs" / "settings" / "selector")
    assert selector.verifier == "joint" and "traversal" in selector.verifiers and "specinfer" not in selector.verifiers


def interrupted(folder: Path, stage: str, *arguments: str, once: str) -> None:
    """Start a stage, press Ctrl-C as soon as a file matching `once` is there, and check how it ends."""
    process = subprocess.Popen(
        command(stage, *arguments),
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a background job of a shell ignores SIGINT, and would hand that down
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 120
    while not list((folder / "runs").rglob(once)) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "espalier: interrupted; the same command goes on" in error
    assert "Traceback" not in error


def test_an_interrupted_data_stage_goes_on_and_ends_with_the_same_bytes(demo: tuple[Path, str], tmp_path: Path) -> None:
    traces = demo[0] / "runs" / "demo" / "traces"
    (tmp_path / "runs" / "demo").mkdir(parents=True)
    for part in ("pair", "stages"):
        shutil.copytree(demo[0] / "runs" / "demo" / part, tmp_path / "runs" / "demo" / part)
    (tmp_path / "runs" / "demo" / "stages" / "data.json").unlink()
    interrupted(tmp_path, "data", *SMALL, once="part-*.parquet")
    finished = list((tmp_path / "runs" / "demo" / "traces").rglob("part-*.parquet"))
    assert len(finished) < len(list(traces.rglob("part-*.parquet")))
    espalier(tmp_path, "data", *SMALL)
    for shard in traces.rglob("part-*.parquet"):
        copy = tmp_path / shard.relative_to(demo[0])
        assert copy.read_bytes() == shard.read_bytes()


def test_an_interrupted_training_leaves_the_earlier_one(demo: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(demo[0] / "runs", tmp_path / "runs")
    earlier = tmp_path / "runs" / "demo" / "training"
    before = {path: path.read_bytes() for path in earlier.rglob("*") if path.is_file()}
    endless = [*SMALL, "train.epochs=100000", "train.patience=100000"]
    interrupted(tmp_path, "train", *endless, once="training.partial/*/best.ckpt")
    assert before == {path: path.read_bytes() for path in earlier.rglob("*") if path.is_file()}
    assert "train: reusing" in espalier(tmp_path, "train", *SMALL)


def test_an_interrupted_evaluation_goes_on(demo: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(demo[0] / "runs", tmp_path / "runs")
    run = tmp_path / "runs" / "demo"
    (run / "evaluation.json").unlink()
    longer = [*(option for option in SMALL if not option.startswith("evaluate.prompts")), "evaluate.prompts=8"]
    interrupted(tmp_path, "evaluate", *longer, once="evaluation.partial.jsonl")
    before = (run / "evaluation.partial.jsonl").read_text()
    espalier(tmp_path, "evaluate", *longer)
    assert not (run / "evaluation.partial.jsonl").exists()
    evaluation = json.loads((run / "evaluation.json").read_text())
    assert {entry["prompts"] for entry in evaluation["methods"]} == {8}
    assert before.startswith("{")


def test_an_interrupted_pair_stage_ends_with_the_same_weights(demo: tuple[Path, str], tmp_path: Path) -> None:
    interrupted(tmp_path, "pair", *SMALL, once="pair/models/target/config.json")
    espalier(tmp_path, "pair", *SMALL)
    for role in ("target", "draft"):
        name = Path("runs", "demo", "pair", "models", role, "model.safetensors")
        assert (tmp_path / name).read_bytes() == (demo[0] / name).read_bytes()


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


# ---- bad input: one line that names it, exit code 2, earlier outputs as they were


@pytest.fixture
def spoilt(demo: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the finished run that a test may damage; the working directory."""
    shutil.copytree(demo[0] / "runs", tmp_path / "runs")
    shutil.copytree(demo[0] / "mlruns", tmp_path / "mlruns")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


def refusal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stage: str, *arguments: str) -> str:
    """The one line of a run that ends with exit code 2 and leaves every file as it was."""
    before = {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}
    monkeypatch.setattr(sys, "argv", ["espalier", *command(stage, *arguments)[3:]])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("espalier: "), lines
    assert before == {path: path.read_bytes() for path in Path("runs").rglob("*") if path.is_file()}
    return lines[0]


@pytest.mark.parametrize(
    ("stage", "arguments", "message"),
    [
        ("trian", [], "unknown stage 'trian'; did you mean train?"),
        ("data", ["data.rootz=9"], "unknown key data.rootz; did you mean data.roots?"),
        (
            "data",
            ["data.roots=72"],
            "runs/demo/steps: made from other inputs (data.roots: 64 -> 72)",
        ),
        ("data", ["seed=2"], "runs/demo: the pair stage was run with other inputs (seed: 1 -> 2): run it again"),
        (
            "pair",
            ["seed=2"],
            "pair/models: made from other inputs (seed: 1 -> 2); choose another name= or remove it",
        ),
        ("data", ["data.stride=7"], "choose another name= or remove them"),
        ("pair", ["pair.embedded.target.steps=13"], "pair.embedded.target.steps: 12 -> 13"),
        ("data", ["pair.target=/no/such", "pair.draft=/no/such"], "pair.target: /no/such is neither a directory nor"),
        ("data", ["name=other"], "runs/other/stages/pair.json does not exist: run the pair stage first"),
        ("data", ["pair.device=gpu"], "pair.device: gpu is not available here"),
        ("data", ["data.tokens=4000"], "ask for up to"),
        ("evaluate", ["prompts.test=0.9"], "runs/demo/traces: made from other inputs (prompts.shares"),
        ("evaluate", ["sampling=[{temperature: 0.2}]"], "runs/demo/traces: made from other inputs (sampling"),
        ("export", ["train.verifier=specinfer"], "the train stage was run with other inputs (train.verifier"),
        ("train", ["name=other"], "runs/other/latency.json: no latency profile there"),
        ("evaluate", ["evaluate.prompts=100000"], "100000 are asked for"),
        ("audit", ["audit.styled=[traversal:greedy]"], "traversal is not lossless for style 'greedy'"),
        ("audit", ["audit.topologies=[none.json]"], "audit.topologies: none.json: No such file"),
        ("audit", ["audit.roots=100000", "audit.topologies=[]"], "audit.roots: the validation prompts of"),
        ("data", ["--quick"], "--quick is for the audit, not for data"),
        ("report", ["name=other"], "runs/other/evaluation.json does not exist: run the evaluate stage first"),
        (
            "evaluate",
            ["train.epochs=4"],
            "the train stage was run with other inputs (train.epochs: 3 -> 4): run it again",
        ),
    ],
)
def test_a_mistake_on_the_command_line(
    spoilt: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    arguments: list[str],
    message: str,
) -> None:
    assert message in refusal(capsys, monkeypatch, stage, *SMALL, *arguments)


def test_an_empty_prompt_file(
    spoilt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (spoilt / "empty.jsonl").write_text("")
    assert "empty.jsonl: holds no prompts" in refusal(capsys, monkeypatch, "data", *SMALL, "prompts.file=empty.jsonl")


def test_two_vocabularies(spoilt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = save_pair(spoilt / "a")
    _, draft = save_pair(spoilt / "b", vocabulary=310)
    arguments = [*SMALL, f"pair.target={target}", f"pair.draft={draft}"]
    assert "vocabularies differ" in refusal(capsys, monkeypatch, "data", *arguments)


def test_traces_of_another_pair(
    spoilt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = save_pair(spoilt / "a")
    arguments = [*SMALL, f"pair.target={target}", f"pair.draft={draft}"]
    assert "made from other inputs (pair: " in refusal(capsys, monkeypatch, "data", *arguments)


def test_a_truncated_parquet_file(
    spoilt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = Path("runs/demo/traces/train/part-00000.parquet")
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    shutil.rmtree("runs/demo/training")
    message = f"{shard} is damaged (truncated or changed): remove it and run the data stage again"
    assert message in refusal(capsys, monkeypatch, "train", *SMALL)
    assert message in refusal(capsys, monkeypatch, "data", *SMALL)
    shard.unlink()  # the advice works, and the row comes back the same
    espalier(spoilt, "data", *SMALL)
    assert shard.read_bytes() == content


def test_traces_of_another_schema(
    spoilt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Path("runs/demo/traces/manifest.json")
    manifest.write_text(manifest.read_text().replace(f'"schema_version": {SCHEMA_VERSION}', '"schema_version": 0'))
    shutil.rmtree("runs/demo/training")
    assert f"made from other inputs (schema_version: 0 -> {SCHEMA_VERSION})" in refusal(
        capsys, monkeypatch, "train", *SMALL
    )


@pytest.mark.parametrize("stage", ["train", "evaluate", "export"])
def test_a_latency_profile_of_another_device(
    spoilt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    path = Path("runs/demo/latency.json")
    profile = json.loads(path.read_text())
    profile["device"] = "another machine"
    path.write_text(json.dumps(profile))
    message = refusal(capsys, monkeypatch, stage, *SMALL)
    assert "runs/demo/latency.json was measured on another machine; this is" in message


def test_a_damaged_model(spoilt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    weights = Path("runs/demo/pair/models/draft/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "pair.draft: cannot load runs/demo/pair/models/draft: " in refusal(capsys, monkeypatch, "data", *SMALL)


def test_a_changed_artefact(spoilt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    module = Path("runs/demo/selector/selector.pt")
    content = bytearray(module.read_bytes())
    content[1000] ^= 1
    module.write_bytes(bytes(content))
    assert "selector.pt: its checksum does not match" in refusal(capsys, monkeypatch, "export", *SMALL)


def test_a_damaged_checkpoint(
    spoilt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for checkpoint in Path("runs/demo/training").rglob("best.ckpt"):
        checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    assert "best.ckpt is damaged" in refusal(capsys, monkeypatch, "evaluate", *SMALL)
