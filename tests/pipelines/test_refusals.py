"""Bad input is one line that names it and exit code 2; earlier outputs stay as they were."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MptConfig

from tests.pipelines.runs import DRAFT, SMALL, espalier, failure, refusal
from tests.tiny import save_pair

OTHER = "runs/demo/traces: made from other inputs ({}); choose another name= or remove it"


@pytest.mark.parametrize(
    ("stage", "arguments", "message"),
    [
        ("trian", [], "No such command 'trian'. Did you mean 'train'?"),
        ("train", ["--plam"], "No such option: --plam"),
        ("data", ["data.texts=48"], OTHER.format("data.texts: 40 -> 48")),
        (
            "evaluate",
            ["sampling=[{temperature: 0.2}]"],
            "runs/demo/traces: made from other inputs (sampling",
        ),
        (
            "evaluate",
            ["train.epochs=4"],
            "train stage was run with other inputs (train.epochs: 2 -> 4): run it again",
        ),
        ("train", ["name=other"], "runs/other/latency.json: no latency profile there"),
        (
            "report",
            ["name=other"],
            "runs/other/evaluation.json does not exist: run the evaluate stage first",
        ),
        (
            "pair",
            ["pair.target=none.gguf", "pair.draft=distilled"],  # before a target is converted
            "runs/demo/distil/draft does not exist: run the distil stage first, as by `make distil",
        ),
        (
            "data",
            ["pair.target=/no/such", "pair.draft=/no/such"],
            "pair.target: there is no folder /no/such",
        ),
        ("data", ["pair.device=gpu"], "pair.device: gpu is not available here"),
        ("evaluate", ["evaluate.prompts=100000"], "100000 are asked for"),
    ],
)
def test_a_mistake_on_the_command_line(
    copy: Path, stage: str, arguments: list[str], message: str
) -> None:
    assert message in refusal(stage, *SMALL, *arguments)


def test_a_run_whose_first_stage_fails_leaves_nothing(
    inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (inside / "file").touch()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{inside}/file/mlflow.db")
    assert "MLflow's store fails" in failure("data", *SMALL)
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("stage", "name", "message"),
    [
        ("export", "training/result.json", "run the train stage again"),
        ("report", "evaluation.json", "run the evaluate stage again"),
        ("evaluate", "stages/train.json", "is damaged: remove it and run the train stage again"),
        (
            "data",
            "traces/manifest.json",
            "is damaged: remove runs/demo/traces and run the data stage again",
        ),
        ("train", "latency.json", "runs/demo/latency.json"),
    ],
)
def test_a_file_that_is_cut_short(copy: Path, stage: str, name: str, message: str) -> None:
    path = Path("runs/demo", name)
    path.write_bytes(path.read_bytes()[:-20])
    output = refusal(stage, *SMALL)
    assert str(path) in output and message in output


def test_a_model_that_reads_positions_off_its_cache(copy: Path) -> None:
    """It loads, shares the vocabulary and would decode wrong text: refused before any work, each
    time."""
    target, draft = save_pair(copy / "a")
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "d_model": 32, "n_layers": 2, "n_heads": 4}
    config = MptConfig(**sizes, max_position_embeddings=512)  # which its own config would not say
    AutoModelForCausalLM.from_config(config).save_pretrained(target)
    for stage, dtype in (("pair", "bfloat16"), ("latency", "float32")):
        arguments = [
            *SMALL,
            "name=other",
            f"pair.target={target}",
            f"pair.draft={draft}",
            f"pair.dtype={dtype}",
        ]
        expected = (
            f"{target}: a pass over a token tree is not what plain passes give: behind 6 tokens"
        )
        assert expected in failure(stage, *arguments)


def test_another_pair_has_no_traces_yet_and_two_vocabularies_are_no_pair(copy: Path) -> None:
    target, draft = save_pair(copy / "a")
    assert "made from other inputs (pair: " in failure(
        "data", *SMALL, f"pair.target={target}", f"pair.draft={draft}"
    )
    _, other = save_pair(copy / "b", vocabulary=310)
    assert "vocabularies differ" in refusal(
        "data", *SMALL, f"pair.target={target}", f"pair.draft={other}"
    )
    shutil.copytree(DRAFT, "draft")
    weights = Path("draft/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "pair.draft: cannot load ./draft: " in refusal("data", *SMALL, "pair.draft=./draft")


def test_a_truncated_shard_and_the_advice_on_it(copy: Path) -> None:
    """The row comes back the same, and a lost record costs no traces."""
    shard, *others = sorted(Path("runs/demo/traces").rglob("*.parquet"))
    before = [path.stat().st_mtime_ns for path in others]
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    message = f"{shard} is damaged (truncated or changed): remove it and run the data stage again"
    assert message in refusal("data", *SMALL)
    shard.unlink()
    Path("runs/demo/stages/data.json").write_text("[]")
    espalier(copy, "data", *SMALL)
    assert shard.read_bytes() == content and [path.stat().st_mtime_ns for path in others] == before


def test_a_store_of_mlflow_that_cannot_be_used(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "sqlite:////dev/null/mlflow.db")
    output = refusal("train", *SMALL, "train.epochs=3")
    assert output.startswith("espalier: sqlite:////dev/null/mlflow.db: MLflow's store fails: ")
