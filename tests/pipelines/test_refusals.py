"""Bad input is one line that names it and exit code 2; earlier outputs stay as they were."""

from __future__ import annotations

import errno
import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MptConfig

from data_gen.traces import ROWS_VERSION
from pipelines.cli import main
from selector.schema import sha256
from tests.pipelines.runs import DRAFT, SMALL, command, espalier, outcome
from tests.tiny import save_pair


@pytest.fixture
def spoilt(demo: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the finished run that a test may damage; the working directory."""
    shutil.copytree(demo[0] / "runs", tmp_path / "runs")
    shutil.copytree(demo[0] / "mlruns", tmp_path / "mlruns")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


def failure(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stage: str, *arguments: str) -> str:
    """The one line of a run that ends with exit code 2."""
    monkeypatch.setattr(sys, "argv", ["espalier", *command(stage, *arguments)[3:]])
    with pytest.raises(SystemExit) as exit_:
        main()
    assert exit_.value.code == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("espalier: "), lines
    return lines[0]


def refusal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stage: str, *arguments: str) -> str:
    """The one line of a run that ends with exit code 2 and leaves every file as it was."""
    before = contents()
    line = failure(capsys, monkeypatch, stage, *arguments)
    assert before == contents()
    return line


def contents() -> dict[Path, bytes]:
    """All files of all runs. Checksums of a pair are kept for the next run, whatever comes of this one."""
    files = (path for path in Path("runs").rglob("*") if path.is_file() and path.name != "checksums.json")
    return {path: path.read_bytes() for path in files}


def signed(path: Path, stage: str) -> None:
    """Let a stage's record say that it wrote a file as it is now."""
    record = Path("runs/demo/stages", f"{stage}.json")
    values = json.loads(record.read_text())
    values["files"][str(path.relative_to("runs/demo"))] = sha256(path)
    record.write_text(json.dumps(values))


@pytest.mark.parametrize(
    ("stage", "arguments", "message"),
    [
        ("trian", [], "unknown stage 'trian'; did you mean train?"),
        ("labels", [], "unknown stage 'labels'"),
        ("data", ["data.textz=9"], "unknown key data.textz; did you mean data.texts?"),
        (
            "data",
            ["data.texts=48"],
            "runs/demo/traces: made from other inputs (data.texts: 40 -> 48); choose another name= or remove it",
        ),
        ("data", ["seed=2"], "runs/demo/traces: made from other inputs (seed: 1 -> 2); choose another name= or remove"),
        ("data", ["data.features=full"], 'made from other inputs (data.features: "light" -> "full"); choose another'),
        (
            "train",
            ["data.features=full"],
            'runs/demo/traces: made from other inputs (data.features: "light" -> "full")',
        ),
        ("pair", ["sampling=[{temperature: .inf}]"], "temperature: Input should be a finite number"),
        ("data", ["seed=99999999999999999999999"], "seed: Input should be less than"),
        ("pair", ["pair.draft=smollm2"], "draft: the one that comes with Espalier is not for the target /"),
        ("pair", ["pair.draft=distilled"], "runs/demo/distil/draft does not exist: run the distil stage first"),
        ("data", ["pair.target=/no/such", "pair.draft=/no/such"], "pair.target: there is no folder /no/such"),
        ("data", ["pair.device=gpu"], "pair.device: gpu is not available here"),
        ("data", ["data.tokens=4000"], "ask for up to"),
        ("evaluate", ["prompts.test=0.9"], "runs/demo/traces: made from other inputs (prompts.shares"),
        ("evaluate", ["sampling=[{temperature: 0.2}]"], "runs/demo/traces: made from other inputs (sampling"),
        ("export", ["train.verifier=specinfer"], "the train stage was run with other inputs (train.verifier"),
        ("train", ["name=other"], "runs/other/latency.json: no latency profile there"),
        ("evaluate", ["evaluate.prompts=100000"], "100000 are asked for"),
        ("data", ["data.log=none.jsonl"], "none.jsonl: No such file or directory"),
        ("report", ["name=other"], "runs/other/evaluation.json does not exist: run the evaluate stage first"),
        (
            "evaluate",
            ["train.epochs=4"],
            "the train stage was run with other inputs (train.epochs: 2 -> 4): run it again",
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


def test_a_model_that_reads_positions_off_its_cache(
    spoilt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loads, shares the vocabulary and would decode wrong text: refused before any work."""
    target, draft = save_pair(spoilt / "a")
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "d_model": 32, "n_layers": 2, "n_heads": 4}
    config = MptConfig(**sizes, max_position_embeddings=512)  # which its own config would not say
    AutoModelForCausalLM.from_config(config).save_pretrained(target)
    capsys.readouterr()  # how far the saving is
    for stage, dtype in (("pair", "bfloat16"), ("latency", "float32"), ("data", "bfloat16"), ("quick", "float32")):
        arguments = [*SMALL, "name=other", f"pair.target={target}", f"pair.draft={draft}", f"pair.dtype={dtype}"]
        message = failure(capsys, monkeypatch, stage, *arguments)
        assert f"{target}: a pass over a token tree is not what plain passes give: behind 6 tokens" in message


def test_a_weight_that_is_not_finite(
    spoilt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where the checksum was made to fit."""
    for checkpoint in Path("runs/demo/training").rglob("best.ckpt"):
        state = torch.load(checkpoint, weights_only=False)
        next(iter(state["state_dict"].values())).view(-1)[0] = float("inf")
        torch.save(state, checkpoint)
        signed(checkpoint, "train")
    assert "best.ckpt: a weight is not finite: run the train stage again" in refusal(
        capsys, monkeypatch, "evaluate", *SMALL
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "prompts.jsonl: No such file or directory"),
        (b"\xff\xfe", "prompts.jsonl:1: not UTF-8 text"),
        (b'{"text": 5}', "prompts.jsonl:1: `text` is empty or not a string"),
        (b'{"text": " "}', "prompts.jsonl:1: `text` is empty"),
        (b'{"texts": "x"}', "prompts.jsonl:1: expected a JSON object with `text`"),
    ],
)
def test_a_prompt_file_that_does_not_fit(
    spoilt: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    content: bytes | None,
    message: str,
) -> None:
    if content is not None:
        Path("prompts.jsonl").write_bytes(content)
    assert message in refusal(capsys, monkeypatch, "data", *SMALL, "prompts.file=prompts.jsonl")


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


def test_traces_of_another_version(
    spoilt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    manifest = Path("runs/demo/traces/manifest.json")
    manifest.write_text(manifest.read_text().replace(f'"rows_version": {ROWS_VERSION}', '"rows_version": 7'))
    signed(manifest, "data")
    shutil.rmtree("runs/demo/training")
    for stage in ("train", "data"):
        said = refusal(capsys, monkeypatch, stage, *SMALL)
        assert f"traces of version 7; this program reads {ROWS_VERSION}: remove it" in said


@pytest.mark.parametrize("stage", ["train", "evaluate", "export"])
def test_a_latency_profile_of_another_device(
    spoilt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    path = Path("runs/demo/latency.json")
    profile = json.loads(path.read_text())
    profile["device"] = "another machine"
    path.write_text(json.dumps(profile))
    signed(path, "latency")
    message = refusal(capsys, monkeypatch, stage, *SMALL)
    assert "runs/demo/latency.json was measured on another machine; this is" in message


def test_a_damaged_model(spoilt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(DRAFT, "draft")
    weights = Path("draft/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    message = refusal(capsys, monkeypatch, "data", *SMALL, "pair.draft=./draft")
    assert "pair.draft: cannot load ./draft: " in message


def test_a_changed_artefact(spoilt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    module = Path("runs/demo/selector/selector.pt")
    content = bytearray(module.read_bytes())
    content[1000] ^= 1
    module.write_bytes(bytes(content))
    assert "selector.pt was changed or removed since it was written: made anew" in espalier(spoilt, "export", *SMALL)
    assert module.read_bytes() != bytes(content)


def test_a_damaged_checkpoint(
    spoilt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for checkpoint in Path("runs/demo/training").rglob("best.ckpt"):
        checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    assert "best.ckpt: missing, or changed" in refusal(capsys, monkeypatch, "evaluate", *SMALL)
    for checkpoint in Path("runs/demo/training").rglob("best.ckpt"):
        signed(checkpoint, "train")
    assert "best.ckpt is damaged: run the train stage again" in refusal(capsys, monkeypatch, "evaluate", *SMALL)


def test_a_prompt_file_without_enough_sources(
    spoilt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [json.dumps({"text": f"a text of one file, number {n}", "source": "only.txt"}) + "\n" for n in range(20)]
    Path("one.jsonl").write_text("".join(lines))
    message = refusal(capsys, monkeypatch, "data", *SMALL, "prompts.file=one.jsonl")
    assert "one.jsonl: prompts.validation=0.2, prompts.test=0.25: none of the 1 sources falls to " in message


@pytest.mark.parametrize(
    ("stage", "name", "content", "message"),
    [
        ("export", "training/result.json", None, "run the train stage again"),
        ("report", "evaluation.json", None, "run the evaluate stage again"),
        ("evaluate", "stages/train.json", None, "is damaged: remove it and run the train stage again"),
        ("evaluate", "stages/train.json", "{}", "is damaged: remove it and run the train stage again"),
        ("train", "traces/manifest.json", None, "run the data stage again"),
        ("data", "traces/manifest.json", None, "is damaged: remove runs/demo/traces and run the data stage again"),
        ("train", "latency.json", None, "runs/demo/latency.json"),
    ],
)
def test_a_file_that_is_cut_short_or_holds_something_else(
    spoilt: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    stage: str,
    name: str,
    content: str | None,
    message: str,
) -> None:
    path = Path("runs/demo", name)
    path.write_bytes(path.read_bytes()[:-20] if content is None else content.encode())
    said = refusal(capsys, monkeypatch, stage, *SMALL)
    assert str(path) in said and message in said


def test_traces_that_are_removed_are_made_anew_of_other_inputs(
    spoilt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the refusal advises."""
    fewer = [*SMALL, "data.texts=8"]
    assert "choose another name= or remove it" in refusal(capsys, monkeypatch, "data", *fewer)
    shutil.rmtree("runs/demo/traces")
    assert "data: made anew: data.texts: 40 -> 8" in espalier(spoilt, "data", *fewer)
    assert "made from other inputs (data.texts: 8 -> 40" in refusal(capsys, monkeypatch, "train", *SMALL)


@pytest.mark.parametrize("store", ["sqlite:////dev/null/mlflow.db", "nowhere://at/all"])
def test_a_store_of_mlflow_that_cannot_be_used(
    spoilt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, store: str
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    message = refusal(capsys, monkeypatch, "train", *SMALL, "train.epochs=3")
    assert message.startswith(f"espalier: {store}: MLflow's store fails: ")


def test_a_damaged_store_of_mlflow(spoilt: Path) -> None:
    """In a process of its own: this one may have the store open."""
    database = Path("mlruns/mlflow.db")
    database.write_bytes(b"no database" * 1000)
    code, said = outcome(spoilt, "train", *SMALL, "train.epochs=3")
    line = said.strip().splitlines()[-1]
    assert code == 2 and line.startswith("espalier: sqlite:///mlruns/mlflow.db: MLflow's store fails: ")
    assert "Traceback" not in said


def test_a_full_disk(spoilt: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> str:
        raise OSError(errno.ENOSPC, "No space left on device", "runs/demo/some.file")

    monkeypatch.setattr("pipelines.report.stage.read_manifest", full)
    message = refusal(capsys, monkeypatch, "report", *SMALL)
    assert message.startswith("espalier: runs/demo/some.file: cannot be written: No space left on device; make room")
