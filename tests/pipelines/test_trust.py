"""Nothing wrong passes silently: damage is refused or mended, and the advice of each message leads on."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlflow
import pytest

from data_gen.verification.base import Verdict
from pipelines.cli import run
from selector.schema import InputError
from tests.pipelines import flips
from tests.pipelines.flips import ROOT, files_of, flip
from tests.pipelines.runs import SMALL, espalier, outcome, patch

DEMO = ROOT / "configs" / "demo.yaml"
KINDS = (  # those of the next test aside; `python -m tests.pipelines.flips` has all
    "pair/checksums.json",
    "selector/config.json",
    "stages/export.json",
    "traces/validation/part-00002.parquet",
)


@pytest.fixture
def copy(demo: tuple[Path, str], empty_store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a finished run, which a test may spoil, and an empty store."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")  # a relative one is kept by MLflow
    shutil.copytree(demo[0] / "runs", tmp_path / "runs")
    shutil.copyfile(empty_store, tmp_path / "mlflow.db")
    return tmp_path


def stage(folder: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    run(name, DEMO, list(SMALL), plan=False)


@pytest.mark.parametrize("name", KINDS)
def test_no_flipped_bit_passes(name: str, copy: Path, demo: tuple[Path, str]) -> None:
    original = demo[0] / "runs" / "demo"
    if not (original / name).exists():
        name = next(str(path) for path in files_of(original) if str(path).startswith(name.rsplit("/", 1)[0]))
    flip(copy / "runs" / "demo" / name, random.Random(name))
    result, why = flips.outcome(copy, original, Path(name), list(SMALL))
    assert result in ("refused", "mended", "without effect"), why


def damage(path: Path, how: str) -> None:
    """One digit of a JSON file, one byte of any other one; or all of it, where `how` is the new content."""
    if how == "a digit":
        text = path.read_text()
        place = next(match.start() for match in re.finditer(r"(?<=\.)[0-8]", text))
        path.write_text(f"{text[:place]}{int(text[place]) + 1}{text[place + 1 :]}")
    elif how == "a byte":
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(bytes(content))
    else:
        path.write_text(how)


CHANGED = "missing, or changed since it was written: run the {} stage again"
LOST = "is damaged: remove it and run the {} stage again"


@pytest.mark.parametrize(
    ("name", "how", "asked", "said", "removed", "again"),
    [
        ("latency.json", "a digit", "train", CHANGED, (), "latency"),
        ("training/regressor-light/best.ckpt", "a byte", "export", CHANGED, (), "train"),
        ("evaluation.json", "a digit", "report", CHANGED, (), "evaluate"),
        ("stages/train.json", "[]", "evaluate", LOST, ("stages/train.json",), "train"),
    ],
)
def test_the_advice_leads_on(
    name: str, how: str, asked: str, said: str, removed: tuple[str, ...], again: str, copy: Path, demo: tuple[Path, str]
) -> None:
    """One line that names the file and the stage to run again; after that the run goes on, and no traces are lost."""
    run_folder = copy / "runs" / "demo"
    traces = {path: path.stat().st_mtime_ns for path in (run_folder / "traces").rglob("*.parquet")}
    shutil.copytree(demo[0] / "mlruns", copy / "mlruns")
    damage(run_folder / name, how)
    code, output = outcome(copy, asked, *SMALL)
    assert (code, output) == (2, f"espalier: runs/demo/{name}{':' * (said == CHANGED)} {said.format(again)}\n")
    for path in removed:
        (run_folder / path).unlink()
    code, output = outcome(copy, again, *SMALL)
    assert code == 0, output
    code, output = outcome(copy, asked, *SMALL)
    if code == 2 and "the evaluate stage was run with other inputs (" in output:  # of the selector before
        espalier(copy, "evaluate", *SMALL)
        code, output = outcome(copy, asked, *SMALL)
    assert code == 0, output
    assert {path: path.stat().st_mtime_ns for path in (run_folder / "traces").rglob("*.parquet")} == traces


def test_a_lost_record_of_the_data_stage_costs_no_traces(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_folder = copy / "runs" / "demo"
    before = {path: path.stat().st_mtime_ns for path in (run_folder / "traces").rglob("*.parquet")}
    for damage in ("{}", "[]", "no JSON", None):
        record = run_folder / "stages" / "data.json"
        record.unlink()
        if damage is not None:
            record.write_text(damage)
        stage(copy, "data", monkeypatch)
        assert json.loads(record.read_text())["finished"]
    assert {path: path.stat().st_mtime_ns for path in (run_folder / "traces").rglob("*.parquet")} == before


def test_an_evaluation_of_another_selector_is_neither_exported_nor_reported(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a new training, until the evaluation has been made again."""
    monkeypatch.chdir(copy)
    other = [*SMALL, "train.epochs=3"]
    run("train", DEMO, other, plan=False)
    report = (copy / "runs" / "demo" / "report.html").read_bytes()
    for name in ("export", "report"):
        with pytest.raises(InputError, match=r"the evaluate stage was run with other inputs .*: run it again"):
            run(name, DEMO, other, plan=False)
    assert (copy / "runs" / "demo" / "report.html").read_bytes() == report
    run("evaluate", DEMO, other, plan=False)
    run("report", DEMO, other, plan=False)
    assert (copy / "runs" / "demo" / "report.html").read_bytes() != report
    (copy / "runs" / "demo" / "evaluation.json").unlink()
    run("export", DEMO, other, plan=False)  # without an evaluation there are no figures to get wrong
    facts = json.loads((copy / "runs" / "demo" / "selector" / "config.json").read_text())
    assert facts["metrics"]["evaluation"] is None


def test_a_copied_store_keeps_to_its_own_folder(copy: Path, demo: tuple[Path, str]) -> None:
    """MLflow's database holds absolute paths: those of the folder that it was copied from."""
    shutil.copytree(demo[0] / "mlruns", copy / "mlruns")
    (copy / "runs" / "demo" / "report.html").unlink()
    espalier(copy, "report", *SMALL)
    client = mlflow.MlflowClient(f"sqlite:///{copy}/mlruns/mlflow.db")
    written, _ = client.search_runs([client.get_experiment_by_name("demo").experiment_id])  # and the pipeline's
    place = Path(written.info.artifact_uri.removeprefix("file://"))
    assert place.is_relative_to(copy) and (place / "report.html").exists()
    (kept,) = (each for each in client.search_experiments() if each.name.startswith("demo, copied from "))
    assert len(client.search_runs([kept.experiment_id])) > 3


def test_a_tracking_server_that_does_not_answer_is_one_line(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    (copy / "runs" / "demo" / "report.html").unlink()
    with pytest.raises(InputError, match=r"http://127.0.0.1:9: MLflow's store fails: ") as refused:
        stage(copy, "report", monkeypatch)
    assert "\n" not in str(refused.value)


def wrong_token() -> None:
    """In the process of a stage: every verifier's extra token is another one than it says, in either decoder."""

    def spoilt(verify: Callable[..., Verdict]) -> Callable[..., Verdict]:
        def change(*arguments: Any) -> Verdict:
            node, token = verify(*arguments)
            return Verdict(node, (token + 1) % 256)

        return change

    for name in ("verification.base.Verifier.verify", "decoding.graph.verify_slots"):
        patch(f"data_gen.{name}", spoilt)


def test_evaluation_stops_where_greedy_text_differs(copy: Path) -> None:
    """A lossy verifier costs exit code 2, and what was measured before stands."""
    before = (copy / "runs" / "demo" / "evaluation.json").read_bytes()
    again = [*SMALL, "evaluate.prompts=2"]
    code, said = outcome(copy, "evaluate", *again, prepare=wrong_token)
    assert code == 2, said
    assert "greedy decoding with trees is not generate()'s: prompt" in said.splitlines()[-1]
    assert (copy / "runs" / "demo" / "evaluation.json").read_bytes() == before
    espalier(copy, "evaluate", *again)
