"""The data stage against what happens to long runs: kills, full disks, damaged files, broken models, lost workers."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from data_gen.models.pair import ModelPair
from data_gen.texts.labelled import Work, make_shard
from data_gen.timing import device_name
from data_gen.traces import TraceStore
from pipelines.config import load_config
from pipelines.data import workers
from pipelines.data.recorded import realised
from pipelines.data.shards import predicted_seconds, shards, size_line
from pipelines.data.stage import plan, run
from pipelines.data.stage import seconds as predicted
from pipelines.data.workers import devices
from pipelines.pair.loading import prompts_of, recipe
from pipelines.run import seconds_in_words
from selector.actions import GREEDY, Action, StyledAction, Tree
from selector.latency import LatencyProfile
from selector.schema import InputError
from selector.tables import Table
from tests.pipelines.runs import SERVER

ROOT = Path(__file__).parents[2]
KILLS = 10
SHARDS = 2 * (7 + 2 + 3)  # texts of the three splits under both settings, one a shard
Setting = dict[str, bytes]  # the files of an undisturbed run
CONFIG = {
    "name": "run",
    "pair": {"threads": 1},
    "verifiers": ["specinfer", "traversal"],
    "train": {"verifier": "traversal"},
    "sampling": [{"temperature": 0.7}, {"temperature": 1.0}],
    "prompts": {"tokens": 12},
    "data": {"texts": 12, "tokens": 16, "texts_per_shard": 1, "siblings": 1},
}


def config_file(folder: Path, pair_folders: tuple[str, str]) -> Path:
    """A config with its prompts."""
    path = folder / "config.yaml"
    if not path.exists():
        generator = random.Random(3)
        words = [f"{a}{b}" for a in ("qu", "br", "fo", "ju", "ov", "la") for b in ("ick", "own", "mps", "zy", "er")]
        with (folder / "prompts.jsonl").open("w") as file:
            for number in range(30):
                text = " ".join(generator.choices(words, k=20))
                file.write(json.dumps({"text": text, "kind": "noise", "source": f"s{number}"}) + "\n")
        values = {**CONFIG, "pair": {**CONFIG["pair"], "target": pair_folders[0], "draft": pair_folders[1]}}
        values["prompts"] = {**CONFIG["prompts"], "file": str(folder / "prompts.jsonl")}
        path.write_text(json.dumps(values))  # JSON is YAML
    return path


PARTS = {"writing": "written_by_target", "labelling": "_label", "decoding": "Decoder"}


def break_model(part: str) -> None:
    """The target gives NaN in one pass, when the second shard is at a part of the work; or while one is decoded."""
    from transformers import LlamaForCausalLM

    import data_gen.texts.labelled

    counted, forward = getattr(data_gen.texts.labelled, PARTS[part]), LlamaForCausalLM.forward
    entered = spoilt = 0

    def enter(*arguments: Any) -> Any:
        nonlocal entered
        entered += 1
        return counted(*arguments)

    def broken(self: Any, *arguments: Any, **named: Any) -> Any:
        nonlocal spoilt
        result = forward(self, *arguments, **named)
        if entered == 2 and not spoilt and len(self.model.layers) == 2:  # the target's
            spoilt += 1
            result.logits[..., 7] = float("nan")
        return result

    setattr(data_gen.texts.labelled, PARTS[part], enter)
    LlamaForCausalLM.forward = broken  # type: ignore[method-assign]


def run_stage(folder: Path, overrides: list[str], spoil: str | None, pipe: Any) -> None:
    """In a process of its own: the data stage; what it says is sent, and its exit code."""
    import pipelines.data.stage
    import pipelines.data.workers
    from pipelines.cli import app

    os.chdir(folder)
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    os.environ["PYTHONPATH"] = str(ROOT)  # of Ray's workers
    torch.set_num_threads(1)
    sys.stderr = (folder / "stderr").open("w")
    made = pipelines.data.stage.make_shard
    if spoil == "full disk":  # once the second shard is made

        def make_shard(*arguments: Any) -> Any:
            shard = made(*arguments)
            make_shard.count += 1
            if make_shard.count == 2:
                signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
                resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000))
            return shard

        make_shard.count = 0
        pipelines.data.stage.make_shard = make_shard
    if spoil in PARTS:
        break_model(spoil)
    if spoil == "few retries":  # a new actor takes a minute on a busy machine
        pipelines.data.workers.RETRIES = 1
    pipe.send("started")
    app(["data", "--config", str(folder / "config.yaml"), *overrides])


@pytest.fixture(scope="module")
def start() -> Callable[..., BaseProcess]:
    """Starts the stage from a server that has everything imported already; returns once it is about to begin."""

    def start(folder: Path, *overrides: str, spoil: str | None = None) -> BaseProcess:
        ours, theirs = SERVER.Pipe()
        process = SERVER.Process(target=run_stage, args=(folder, list(overrides), spoil, theirs))
        process.start()
        assert ours.recv() == "started"
        return process

    return start


def shard_count(folder: Path) -> int:
    return len(list((folder / "runs" / "run" / "traces").rglob("*.parquet")))


def finish(process: BaseProcess) -> int:
    process.join()
    assert process.exitcode is not None
    return process.exitcode


def files(folder: Path, name: str = "run") -> dict[str, bytes]:
    """All files of the store."""
    store = folder / "runs" / name / "traces"
    return {str(path.relative_to(store)): path.read_bytes() for path in sorted(store.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def undisturbed(
    tmp_path_factory: pytest.TempPathFactory, pair_folders: tuple[str, str], start: Callable[..., BaseProcess]
) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    config_file(folder, pair_folders)
    assert finish(start(folder)) == 0, (folder / "stderr").read_text()
    return folder


@pytest.fixture(scope="module")
def whole(undisturbed: Path) -> Setting:
    return files(undisturbed)


def test_the_store_is_whole(whole: Setting) -> None:
    assert sum(name.endswith(".parquet") for name in whole) == SHARDS
    assert set(whole) - {"manifest.json"} == set(json.loads(whole["manifest.json"])["shards"])


def test_ten_kills_leave_nothing_behind(
    whole: Setting, tmp_path: Path, pair_folders: tuple[str, str], start: Callable[..., BaseProcess]
) -> None:
    """SIGKILL at ten random moments, with work left; in the end the store is the undisturbed run's, byte for byte."""
    config_file(tmp_path, pair_folders)
    moments = random.Random(4)
    for kill in range(KILLS):
        before = shard_count(tmp_path)
        process = start(tmp_path)
        if kill % 2:  # while MLflow and the stage begin, or once so many shards more are there
            until = time.monotonic() + moments.uniform(0, 1.5)
            while shard_count(tmp_path) == before and time.monotonic() < until:
                time.sleep(0.002)
        else:
            wanted = before + moments.randint(1, 2)
            while shard_count(tmp_path) < wanted and process.is_alive():
                time.sleep(0.002)
            time.sleep(moments.uniform(0, 0.02))
        process.kill()
        assert finish(process) == -signal.SIGKILL
        assert shard_count(tmp_path) < SHARDS
    assert shard_count(tmp_path) >= KILLS // 2  # some died at work, and kept what was finished
    assert finish(start(tmp_path)) == 0, (tmp_path / "stderr").read_text()
    assert files(tmp_path) == whole
    assert {path.name for path in (tmp_path / "mlruns").glob("mlflow.db*")} <= {"mlflow.db"}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        ("full disk", "part-0000[01].parquet.tmp: cannot be written: .*File too large"),
        ("decoding", "prompt .*: .*/target: the model gives numbers that are not finite"),
        ("writing", "prompt .*: .*/target: the model gives numbers that are not finite"),
        ("labelling", "prompt .*: .*/target: the model gives numbers that are not finite"),
    ],
)
def test_a_failure_is_one_line_and_the_same_command_goes_on(
    whole: Setting,
    tmp_path: Path,
    pair_folders: tuple[str, str],
    start: Callable[..., BaseProcess],
    spoil: str,
    message: str,
) -> None:
    config_file(tmp_path, pair_folders)
    assert finish(start(tmp_path, spoil=spoil)) == 2
    said = (tmp_path / "stderr").read_text().strip()
    assert re.fullmatch(f"espalier: .*{message}.*", said), said
    kept = {name: content for name, content in files(tmp_path).items() if name.endswith(".parquet")}
    assert kept and kept.items() <= whole.items()  # what was finished, is there
    assert finish(start(tmp_path)) == 0
    assert files(tmp_path) == whole


@pytest.mark.parametrize("damage", ["cut short", "flipped bit", "gone"])
def test_a_damaged_shard_is_named_and_made_again(
    undisturbed: Path, whole: Setting, start: Callable[..., BaseProcess], damage: str
) -> None:
    folder = undisturbed
    shard = folder / "runs" / "run" / "traces" / "train" / "part-00003.parquet"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(bytes(content[:-20] if damage == "cut short" else content))
    if damage != "gone":
        assert finish(start(folder)) == 2
        said = (folder / "stderr").read_text().strip()
        assert said.startswith(f"espalier: {shard.relative_to(folder)} is damaged") and said.count("\n") == 0
        assert "remove it and run the data stage again" in said
    shard.unlink()
    assert finish(start(folder)) == 0
    assert files(folder) == whole


def test_other_inputs_are_refused_and_named(
    undisturbed: Path, whole: Setting, start: Callable[..., BaseProcess]
) -> None:
    folder = undisturbed
    assert finish(start(folder, "data.siblings=2")) == 2
    said = (folder / "stderr").read_text().strip()
    assert "runs/run/traces: made from other inputs (data.siblings: 1 -> 2); choose another name= or remove it" in said
    assert said.count("\n") == 0
    assert finish(start(folder, "data.workers=3")) == 0  # who makes the rows is no input
    assert files(folder) == whole


def test_processes_write_the_same_bytes_though_one_is_killed(
    whole: Setting, tmp_path: Path, pair_folders: tuple[str, str], start: Callable[..., BaseProcess]
) -> None:
    """The stage ends where a process is killed, and the same command goes on. No process is left behind."""
    config_file(tmp_path, pair_folders)
    driver = start(tmp_path, "data.workers=2")
    begun = psutil.Process(driver.pid)
    killed: list[psutil.Process] = []
    while driver.is_alive() and len(killed) < 2:
        killed = [each for each in begun.children(recursive=True) if _makes_a_shard(each, "spawn_main")]
        time.sleep(0.01)
    killed[0].kill()
    assert finish(driver) == 2
    said = (tmp_path / "stderr").read_text().strip()
    assert said.splitlines()[-1].startswith("espalier: data.workers: a worker was killed")
    assert not any(each.is_running() for each in killed[1:])
    assert finish(start(tmp_path, "data.workers=2")) == 0
    assert files(tmp_path) == whole


@pytest.mark.parametrize(("kills", "workers"), [(2, 1), (1, 2)])
def test_ray_writes_the_same_bytes_though_workers_are_killed(
    whole: Setting,
    tmp_path: Path,
    pair_folders: tuple[str, str],
    start: Callable[..., BaseProcess],
    kills: int,
    workers: int,
) -> None:
    """One worker is killed at work, once the first shard is there. A shard that loses two ends the run here, and the
    same command without Ray goes on."""
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    config_file(tmp_path, pair_folders)
    driver = start(tmp_path, "data.ray=local", f"data.workers={workers}", spoil="few retries")
    killed: set[int] = set()
    while len(killed) < kills and driver.is_alive():
        children = psutil.Process(driver.pid).children(recursive=True) if shard_count(tmp_path) else []
        for child in [each for each in children if each.pid not in killed and _makes_a_shard(each)][:1]:
            killed.add(child.pid)
            child.kill()
        time.sleep(0.01)
    code = finish(driver)
    said = (tmp_path / "stderr").read_text()
    if kills > 1:
        assert code == 2
        assert "espalier: data.ray: a worker was lost more than 1 times over one shard" in said.splitlines()[-1]
        assert finish(start(tmp_path)) == 0
    else:
        assert code == 0, said
    assert files(tmp_path) == whole


def _makes_a_shard(process: psutil.Process, name: str = "ray::Worker.make") -> bool:
    try:
        return name in " ".join(process.cmdline())
    except psutil.Error:
        return False


def test_ray_says_what_it_lacks(tmp_path: Path, pair_folders: tuple[str, str]) -> None:
    pytest.importorskip("ray", reason="the extra `ray` is not installed")
    file = config_file(tmp_path, pair_folders)
    config = load_config(file, ["data.workers=3", "pair.device=cpu"])
    with pytest.raises(InputError, match=r"data.workers: 3 with 1 CPU each; Ray has 2"):
        devices([{"CPU": 2.0}], config)
    assert devices([{"CPU": 2.0}, {"CPU": 1.0}], config) == (3, 0)
    config = load_config(file, ["data.gpus_per_worker=4"])
    assert devices([{"CPU": 64.0, "GPU": 8.0}], config) == (2, 4)
    assert devices([{"CPU": 64.0, "GPU": 6.0}, {"GPU": 2.0}], config) == (1, 4)  # a worker stands on one node
    with pytest.raises(InputError, match=r"data.workers: 1 with 4 GPU each; Ray has 4"):
        devices([{"GPU": 2.0}, {"GPU": 2.0}], config)
    config = load_config(file, ["pair.device=cpu", "pair.threads=8"])
    assert devices([{"CPU": 64.0}], config) == (8, 0)
    config = load_config(file, ["pair.device=cuda:1", "data.ray=local"])
    with pytest.raises(InputError, match=r"pair.device: cuda:1: Ray gives every worker devices of its own"):
        next(workers.ray(config, "", {}))


def test_the_plan_says_texts_bytes_passes_memory_and_time(
    tmp_path: Path, pair_folders: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(config_file(tmp_path, pair_folders), ["data.texts=100"])
    size, passes, memory, missing = plan(config)
    assert size.startswith("2 sampling settings x 100 texts (55 for train, 20 for validation, 25 for test)")
    assert re.match(r"[\d,]+ passes of the target .*, 372 tokens written by .*, 200 texts passed by both", passes)
    assert "half as many rows" in memory
    assert "run the latency stage" in missing
    one = Table([10], [1], [[0.001]])
    seconds = {"token": 0.5, "decoded": 1.0, "root": 2.0}
    here = device_name("auto", "float32", 1)
    profile = LatencyProfile(here, "pair", one, one, {}, {}, 0.0, labelling=seconds)
    (tmp_path / "runs" / "run").mkdir(parents=True)
    (tmp_path / "runs" / "run" / "latency.json").write_text(json.dumps(profile.to_json()))
    tokens = 16 + 15  # labelled ones, and what is left of the last one's look-ahead
    expected = {"written": 2 * 94 * tokens * 0.5, "decoded": 2 * 6 * tokens * 1.0, "labelled": 2 * 100 * 16 * 2.0}
    assert predicted_seconds(config) == expected
    assert predicted(config) == sum(expected.values())
    assert plan(config)[-1] == "its time on one device: written 30%, decoded 4%, labelled 66%"
    profile = LatencyProfile("another machine", "pair", one, one, {}, {}, 0.0, labelling=seconds)
    (tmp_path / "runs" / "run" / "latency.json").write_text(json.dumps(profile.to_json()))
    assert predicted_seconds(config) is None
    assert [seconds_in_words(s) for s in (50, 200, 10_000)] == ["50 seconds", "3.3 minutes", "2.8 hours"]


def test_memory_stays_flat(
    tmp_path: Path,
    pair_folders: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    overrides = ["data.texts=24", "data.tokens=16", "data.texts_per_shard=2"]
    run(load_config(config_file(tmp_path, pair_folders), overrides))
    said = capsys.readouterr().out
    assert re.search(r"roots/s; written \d+%, decoded \d+%, labelled \d+%, writing \d+%; resident set", said)
    first, last = (int(size) for size in re.findall(r"(\d+) MB (?:after the first shard|at the end)", said))
    assert first > 100 and last < 1.2 * first


@pytest.mark.parametrize("features", ["light", "full"])
def test_the_planned_bytes_are_those_of_a_text(
    pair: ModelPair, tmp_path: Path, pair_folders: tuple[str, str], features: str
) -> None:
    """Of a held-out text, all of whose roots have features; beside its names."""
    config = load_config(config_file(tmp_path, pair_folders), ["data.tokens=48", f"data.features={features}"])
    planned = re.search(r"up to (\d+) kB a text", size_line(config))
    assert planned is not None
    (prompt, *_) = prompts_of(config, pair, "test")
    table = make_shard(pair, recipe(config), Work("test", config.sampling[0].build(), ((prompt, 0),))).table
    assert table["roots"].to_pylist() == [48]
    assert table.nbytes / 1e3 == pytest.approx(int(planned[1]), rel=0.04)


CHAINS = Action(1, 2, 0), Action(1, 5, 0), Action(1, 8, 8)
TREES = Action(2, 0, 4), Action(3, 2, 3), Action(4, 1, 2), Action(4, 0, 8)
DIFFERENT = tuple(StyledAction(*action, GREEDY) for action in TREES)


@pytest.mark.parametrize("behaviour", [CHAINS, TREES, DIFFERENT])
def test_what_decoding_accepts_is_what_the_labels_say(
    pair: ModelPair,
    tmp_path: Path,
    pair_folders: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    behaviour: tuple[Tree, ...],
) -> None:
    """Over a hundred steps with every verifier; a token a step more or less would be seen."""
    monkeypatch.chdir(tmp_path)
    options = ["data.texts=90", "data.texts_per_shard=32"]
    options += ["verifiers=[specinfer,traversal,lifted_uniform]", f"data.siblings={1 if behaviour == CHAINS else 4}"]
    config = load_config(config_file(tmp_path, pair_folders), options)
    store = TraceStore(config.folder / "traces", {})
    for name, work in shards(config, pair).items():
        if work.split == "train":
            decoded = replace(work, decoded=True)
            store.write(name, make_shard(pair, replace(recipe(config), behaviour=behaviour), decoded).table)
    rows = realised(config)
    assert {row["verifier"] for row in rows} == {"specinfer", "traversal", "lifted_uniform"}
    for row in rows:
        assert abs(row["z"]) < 4 and row["steps"] > 60, row
        error = abs((row["realised"] - row["expected"]) / row["z"])
        assert row["realised"] > 2 and error < 0.3, row
