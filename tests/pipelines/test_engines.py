"""Settings for the engines of today: the best lengths, and the files."""

from __future__ import annotations

import itertools
import json
import math
import shutil
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data_gen.models.sampling import Sampling
from pipelines.cli import main
from pipelines.export.engines import ENGINES, BestLength, Engine, Settings, engine_of
from pipelines.export.lengths import best_lengths
from pipelines.latency.timings import profile_of, read_timings
from selector.latency import LatencyProfile
from selector.schema import InputError
from selector.train.data import Texts
from tests.pipelines.gpus import BATCHES, Seconds, flat, step, stepped, timings
from tests.pipelines.runs import SMALL, command
from tests.selector.synthetic import survivals_of, texts

GOLDEN = Path(__file__).parent / "golden"
ACCEPTED = 0.8  # of every drafted token
GPUS = {"flat": flat, "stepped": stepped}
VERIFIERS = ("specinfer", "traversal")


def profile(seconds: Seconds, folder: Path) -> LatencyProfile:
    path = folder / "timings.csv"
    path.write_text(timings(seconds))
    return profile_of(read_timings(path), "timings.csv", True, "pair", VERIFIERS)


def even(accepted: float = ACCEPTED) -> Texts:
    """Texts in which every drafted token is accepted with one probability; so long that their ends, where the last step
    yields more than is left, hardly count."""
    made = texts(count=4, roots=4000)
    survivals = survivals_of(torch.full((len(made.length_R),), accepted)).half()
    return replace(made, survivals=dict.fromkeys(VERIFIERS, survivals))


def speed(seconds: Seconds, batch: int, length: int, accepted: float = ACCEPTED, passes: int | None = None) -> float:
    """Of a whole batch, by the formula."""
    tokens = (1 - accepted ** (length + 1)) / (1 - accepted)
    return batch * tokens / step(seconds, batch, length + 1, length if passes is None else passes)


HONEST = replace(ENGINES["vllm"], masks=False)  # as model runner V1


@pytest.mark.parametrize("seconds", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("engine", [HONEST, *ENGINES.values()], ids=["honest", *ENGINES])
def test_lengths_are_the_best_of_those_that_the_engine_takes(seconds: Seconds, engine: Engine, tmp_path: Path) -> None:
    """vLLM makes the passes of the longest chain for every batch; SGLang drafts one length. The predictions are what
    the engine really pays."""
    found = best_lengths(engine, even(), ("traversal", "specinfer"), profile(seconds, tmp_path))
    assert [choice.batch for choice in found] == list(BATCHES)
    longest = max(choice.length for choice in found)
    assert (longest != min(choice.length for choice in found)) != engine.one_length  # the best moves with the batch
    for choice in found:
        real = speed(seconds, choice.batch, choice.length, passes=longest if engine.masks else None)
        assert choice.tokens_per_second == pytest.approx(real, rel=2e-3)
        assert choice.gain is not None
        assert choice.gain.value == pytest.approx(real / speed(seconds, choice.batch, engine.default), rel=2e-3)

    def mean(longest: int) -> float:
        lengths = [longest] if engine.one_length else range(longest + 1)
        passes = longest if engine.masks else None
        return statistics.mean(math.log(max(speed(seconds, b, n, passes=passes) for n in lengths)) for b in BATCHES)

    reached = statistics.mean(math.log(choice.tokens_per_second) for choice in found)
    assert reached == pytest.approx(max(map(mean, range(9))), abs=2e-3)


def test_block_labels_are_compared_with_what_the_engine_does_unasked(tmp_path: Path) -> None:
    labels = {"traversal": even(0.9).survivals["traversal"], "specinfer": even(0.6).survivals["specinfer"]}
    own, both = profile(flat, tmp_path), ("traversal", "specinfer")
    first, *_ = best_lengths(HONEST, replace(even(), survivals=labels), both, own)
    expected = speed(flat, 1, first.length, 0.9) / speed(flat, 1, 5, 0.6)
    assert first.gain is not None and first.gain.value == pytest.approx(expected, rel=2e-3)
    assert all(each.gain is None for each in best_lengths(replace(HONEST, default=12), even(), both, own))


def told(lengths: dict[int, int]) -> Settings:
    """With sampled drafts and block verification, by batch size."""
    found = [BestLength(batch, length, 1.0, 1.0, None) for batch, length in lengths.items()]
    return Settings("target", "draft", False, True, Sampling(), found)


SERVED = told({1: 5, 4: 5, 8: 3, 64: 0})
PLAIN = replace(SERVED, block=False, sampling=Sampling(draft_temperature=0.0))


OTHERS = {
    "vllm-plain.json": PLAIN,
    "vllm-head.json": replace(SERVED, head=True),
    "sglang-head.yaml": replace(PLAIN, head=True),
    "sglang-head.steps.json": replace(PLAIN, head=True),
}


@pytest.mark.parametrize("file", OTHERS)
def test_heads_and_greedy_drafts_are_those_of_the_golden_folder(file: str) -> None:
    settings, (engine, _, suffix) = OTHERS[file], file.partition(".")
    found = engine_of(engine.partition("-")[0], settings.head).files(settings)
    assert found[f"temperature-1.{suffix}"] == (GOLDEN / file).read_text()


def test_commands() -> None:
    vllm, sglang, head = ENGINES["vllm"], ENGINES["sglang"], engine_of("sglang", True)
    assert vllm.command(SERVED, Path("a b")) == (
        """vllm serve target --max-num-seqs 64 --speculative-config "$(cat 'a b/temperature-1.json')\""""
    )
    assert sglang.command(SERVED, Path("a")) == "python -m sglang.launch_server --config a/temperature-1.yaml"
    adaptive = " --speculative-adaptive --speculative-adaptive-config a/temperature-1.steps.json"
    assert head.command(replace(SERVED, head=True), Path("a")) == sglang.command(SERVED, Path("a")) + adaptive


@pytest.mark.parametrize(("gpu", "name"), list(itertools.product(GPUS, ENGINES)))
def test_files_are_those_of_the_golden_folder(gpu: str, name: str, tmp_path: Path) -> None:
    """Of texts in which a token in five is rejected, on two GPUs that do not exist."""
    engine, own = ENGINES[name], profile(GPUS[gpu], tmp_path)
    sampling = Sampling(draft_temperature=None if engine.samples else 0.0)
    lengths = best_lengths(engine, even(), engine.verifiers(VERIFIERS), own)
    settings = Settings("T", "D", False, engine.blocks, sampling, lengths)
    assert engine.macros.settings(settings) == (GOLDEN / f"{name}-{gpu}.{engine.suffix}").read_text()


@pytest.mark.parametrize(
    ("name", "setting", "why"),
    [
        ("vllm", {"draft_temperature": 0.5}, "no draft temperature"),
        ("vllm", {"temperature": 0.0, "draft_temperature": 0.3}, "no draft temperature"),
        ("vllm", {"top_p": 0.9}, "follow the temperature alone"),
        ("vllm", {"top_k": 20}, "follow the temperature alone"),
        ("vllm", {"min_p": 0.1, "draft_temperature": 0.0}, "min_p"),
        ("vllm", {}, ""),
        ("vllm", {"draft_temperature": 1.0}, ""),
        ("vllm", {"temperature": 0.0}, ""),
        ("vllm", {"top_p": 0.9, "draft_temperature": 0.0}, ""),
        ("sglang", {}, "draft_temperature: 0"),
        ("sglang", {"draft_temperature": 0.0}, ""),
    ],
)
def test_settings_that_an_engine_serves(name: str, setting: dict[str, float], why: str) -> None:
    found = ENGINES[name].refusal(Sampling(**setting))
    assert why in found and bool(why) == bool(found)


def test_the_runs_verifiers_on_chains() -> None:
    several = ("lifted_uniform", "specinfer")
    assert ENGINES["vllm"].verifiers(several) == ("lifted_uniform", "specinfer")
    assert ENGINES["sglang"].verifiers(several) == ("specinfer", "specinfer")
    assert ENGINES["vllm"].verifiers(("traversal",)) == ("traversal", "traversal")
    with pytest.raises(InputError, match="verifiers: sglang verifies chains as one of naive"):
        ENGINES["sglang"].verifiers(("traversal",))


@pytest.fixture
def finished(demo: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the finished run; the working directory."""
    for name in ("runs", "mlruns"):
        shutil.copytree(demo[0] / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    return tmp_path


def espalier(monkeypatch: pytest.MonkeyPatch, stage: str, *arguments: str) -> int:
    """Run a stage in this process; its exit code."""
    monkeypatch.setattr(sys, "argv", ["espalier", *command(stage, *SMALL, *arguments)[3:]])
    with pytest.raises(SystemExit) as exit_:
        main()
    return int(exit_.value.code or 0)


def test_a_finished_run_gets_settings_for_an_engine(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (finished / "runs/demo/latency.json").read_bytes()
    assert espalier(monkeypatch, "export", "--engine", "vllm") == 2
    assert "no engine's times there: espalier latency --from timings.csv" in capsys.readouterr().err
    (finished / "timings.csv").write_text(timings(stepped))
    assert espalier(monkeypatch, "latency", "--from", "timings.csv") == 0
    assert (finished / "runs/demo/latency.json").read_bytes() == before  # this machine's own
    for name, engine in ENGINES.items():
        assert espalier(monkeypatch, "export", "--engine", name) == 0
        folder = finished / "runs/demo/engines" / name
        page = (folder / "README.md").read_text()
        assert page.count("\n## ") == 2  # sampling settings
        assert page.count("Nothing is written") == (not engine.samples)  # sampled drafts at temperature 1
        served = [path for path in folder.glob(f"*.{engine.suffix}") if ".prediction" not in path.name]
        assert served and all(f"runs/demo/engines/{name}/{path.name}" in page for path in served)
        for path in served:
            rows = json.loads(path.with_suffix(".prediction.json").read_text())
            assert [row["batch"] for row in rows] == list(BATCHES)
            assert all(row["gain"]["value"] > 0 and f"| {row['tokens_per_step']:.2f} |" in page for row in rows)
    capsys.readouterr()
    assert espalier(monkeypatch, "export", "--engine", "vllm") == 0
    assert "reusing" in capsys.readouterr().out


def test_a_flag_of_another_stage_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert espalier(monkeypatch, "train", "--engine", "vllm") == 2
    assert capsys.readouterr().err == "espalier: No such option: --engine\n"
    assert espalier(monkeypatch, "export", "--engine", "other") == 2
    assert "export.engine" in capsys.readouterr().err
