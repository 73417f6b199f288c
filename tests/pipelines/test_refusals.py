"""Bad input is one line that names it and exit code 2; earlier outputs stay as they were."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MptConfig

from data_gen.traces import ROWS_VERSION
from pipelines.cli import app
from tests.pipelines.runs import DRAFT, SMALL, command, espalier, failure, outcome, refusal, signed
from tests.tiny import save_pair

OTHER = "runs/demo/traces: made from other inputs ({}); choose another name= or remove it"


@pytest.mark.parametrize(
    ("stage", "arguments", "message"),
    [
        ("trian", [], "unknown stage 'trian'; did you mean train?"),
        ("data", ["data.textz=9"], "unknown key data.textz; did you mean data.texts?"),
        ("data", ["data.texts=48"], OTHER.format("data.texts: 40 -> 48")),
        ("train", ["data.features=full"], 'made from other inputs (data.features: "light" -> "full")'),
        ("evaluate", ["prompts.test=0.9"], "runs/demo/traces: made from other inputs (prompts.shares"),
        ("evaluate", ["sampling=[{temperature: 0.2}]"], "runs/demo/traces: made from other inputs (sampling"),
        ("export", ["train.verifier=specinfer"], "the train stage was run with other inputs (train.verifier"),
        (
            "evaluate",
            ["train.epochs=4"],
            "the train stage was run with other inputs (train.epochs: 2 -> 4): run it again",
        ),
        ("train", ["name=other"], "runs/other/latency.json: no latency profile there"),
        ("report", ["name=other"], "runs/other/evaluation.json does not exist: run the evaluate stage first"),
        ("pair", ["pair.draft=smollm2"], "draft: the one that comes with Espalier is not for the target /"),
        ("pair", ["pair.draft=distilled"], "runs/demo/distil/draft does not exist: run the distil stage first"),
        ("data", ["pair.target=/no/such", "pair.draft=/no/such"], "pair.target: there is no folder /no/such"),
        ("data", ["pair.device=gpu"], "pair.device: gpu is not available here"),
        ("data", ["data.tokens=4000"], "ask for up to"),
        ("evaluate", ["evaluate.prompts=100000"], "100000 are asked for"),
        ("data", ["data.log=none.jsonl"], "none.jsonl: No such file or directory"),
        ("data", ["prompts.file=none.jsonl"], "none.jsonl: No such file or directory"),
    ],
)
def test_a_mistake_on_the_command_line(copy: Path, stage: str, arguments: list[str], message: str) -> None:
    assert message in refusal(stage, *SMALL, *arguments)


@pytest.mark.parametrize(
    ("stage", "name", "content", "message"),
    [
        ("export", "training/result.json", None, "run the train stage again"),
        ("report", "evaluation.json", None, "run the evaluate stage again"),
        ("evaluate", "stages/train.json", "{}", "is damaged: remove it and run the train stage again"),
        ("train", "traces/manifest.json", None, "run the data stage again"),
        ("data", "traces/manifest.json", None, "is damaged: remove runs/demo/traces and run the data stage again"),
        ("train", "latency.json", None, "runs/demo/latency.json"),
        (
            "evaluate",
            "training/regressor-light/best.ckpt",
            None,
            "missing, or changed since it was written: run the train",
        ),
    ],
)
def test_a_file_that_is_cut_short_or_holds_something_else(
    copy: Path, stage: str, name: str, content: str | None, message: str
) -> None:
    path = Path("runs/demo", name)
    path.write_bytes(path.read_bytes()[:-20] if content is None else content.encode())
    said = refusal(stage, *SMALL)
    assert str(path) in said and message in said


def test_what_a_record_says_of_a_file_is_not_all_that_is_checked(copy: Path) -> None:
    """Checksums that were made to fit do not help a profile of another machine, old traces, or damaged weights."""
    profile, manifest = Path("runs/demo/latency.json"), Path("runs/demo/traces/manifest.json")
    weights = list(Path("runs/demo/training").rglob("best.ckpt"))
    before = {path: path.read_bytes() for path in (profile, manifest, *weights)}

    def spoilt(changed: dict[Path, bytes], of: str, stages: tuple[str, ...], message: str) -> None:
        for path, content in changed.items():
            path.write_bytes(content)
            signed(path, of)
        for stage in stages:
            assert message in refusal(stage, *SMALL)
        for path in changed:
            path.write_bytes(before[path])
            signed(path, of)

    elsewhere = json.dumps({**json.loads(before[profile]), "device": "another machine"}).encode()
    message = "runs/demo/latency.json was measured on another machine; this is"
    spoilt({profile: elsewhere}, "latency", ("train", "evaluate", "export"), message)
    infinite = {}
    for path in weights:
        state = torch.load(path, weights_only=False)
        next(iter(state["state_dict"].values())).view(-1)[0] = float("inf")
        torch.save(state, path)
        infinite[path] = path.read_bytes()
    spoilt(infinite, "train", ("evaluate",), "best.ckpt: a weight is not finite: run the train stage again")
    cut = {path: content[:1000] for path, content in before.items() if path in weights}
    spoilt(cut, "train", ("evaluate",), "best.ckpt is damaged: run the train stage again")
    old = before[manifest].replace(f'"rows_version": {ROWS_VERSION}'.encode(), b'"rows_version": 7')
    shutil.rmtree("runs/demo/training")
    for path in weights:
        del before[path]
    spoilt(
        {manifest: old}, "data", ("train", "data"), f"traces of version 7; this program reads {ROWS_VERSION}: remove"
    )


def test_a_model_that_reads_positions_off_its_cache(copy: Path) -> None:
    """It loads, shares the vocabulary and would decode wrong text: refused before any work."""
    target, draft = save_pair(copy / "a")
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "d_model": 32, "n_layers": 2, "n_heads": 4}
    config = MptConfig(**sizes, max_position_embeddings=512)  # which its own config would not say
    AutoModelForCausalLM.from_config(config).save_pretrained(target)
    for stage, dtype in (("pair", "bfloat16"), ("latency", "float32"), ("data", "bfloat16"), ("quick", "float32")):
        arguments = [*SMALL, "name=other", f"pair.target={target}", f"pair.draft={draft}", f"pair.dtype={dtype}"]
        expected = f"{target}: a pass over a token tree is not what plain passes give: behind 6 tokens"
        assert expected in failure(stage, *arguments)


def test_another_pair_has_no_traces_yet_and_two_vocabularies_are_no_pair(copy: Path) -> None:
    target, draft = save_pair(copy / "a")
    assert "made from other inputs (pair: " in refusal("data", *SMALL, f"pair.target={target}", f"pair.draft={draft}")
    _, other = save_pair(copy / "b", vocabulary=310)
    assert "vocabularies differ" in refusal("data", *SMALL, f"pair.target={target}", f"pair.draft={other}")
    shutil.copytree(DRAFT, "draft")
    weights = Path("draft/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "pair.draft: cannot load ./draft: " in refusal("data", *SMALL, "pair.draft=./draft")


def test_a_truncated_shard_and_the_advice_on_it(copy: Path) -> None:
    """The row comes back the same."""
    shard = Path("runs/demo/traces/train/part-00000.parquet")
    content = shard.read_bytes()
    shard.write_bytes(content[:-100])
    shutil.rmtree("runs/demo/training")
    message = f"{shard} is damaged (truncated or changed): remove it and run the data stage again"
    assert message in refusal("train", *SMALL) and message in refusal("data", *SMALL)
    shard.unlink()
    espalier(copy, "data", *SMALL)
    assert shard.read_bytes() == content


def test_a_lost_record_of_the_data_stage_costs_no_traces(copy: Path) -> None:
    shards = list(Path("runs/demo/traces").rglob("*.parquet"))
    before = [path.stat().st_mtime_ns for path in shards]
    Path("runs/demo/stages/data.json").write_text("[]")
    app(command("data", *SMALL)[3:], standalone_mode=False)
    assert json.loads(Path("runs/demo/stages/data.json").read_text())["finished"]
    assert [path.stat().st_mtime_ns for path in shards] == before


@pytest.mark.parametrize("store", ["sqlite:////dev/null/mlflow.db", "nowhere://at/all", "http://127.0.0.1:9"])
def test_a_store_of_mlflow_that_cannot_be_used(copy: Path, monkeypatch: pytest.MonkeyPatch, store: str) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", store)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    assert refusal("train", *SMALL, "train.epochs=3").startswith(f"espalier: {store}: MLflow's store fails: ")


def test_a_damaged_store_of_mlflow(copy: Path) -> None:
    """In a process of its own: this one may have the store open."""
    Path("mlruns/mlflow.db").write_bytes(b"no database" * 1000)
    code, said = outcome(copy, "train", *SMALL, "train.epochs=3")
    assert code == 2 and "Traceback" not in said
    assert said.strip().splitlines()[-1].startswith("espalier: sqlite:///mlruns/mlflow.db: MLflow's store fails: ")
