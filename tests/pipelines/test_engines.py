"""Settings for the engines of today: the best lengths, and the files."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from data_gen.models.sampling import Sampling
from pipelines.cli import app
from pipelines.export.engines import ENGINES, BestLength, EngineSettings, best_lengths
from selector.schema import InputError
from selector.tables import Table
from selector.train.data import Texts
from tests.pipelines.gpus import (
    BATCHES,
    CONTEXT,
    VERIFIERS,
    Seconds,
    flat,
    read,
    step,
    stepped,
    timings,
)
from tests.pipelines.runs import SMALL, command, refusal
from tests.selector.synthetic import survivals_of, texts

GOLDEN = Path(__file__).parent / "golden"
ACCEPTED = 0.8  # of every drafted token
GPUS = {"flat": flat, "stepped": stepped}


def even(accepted: float = ACCEPTED) -> Texts:
    """Texts in which every drafted token is accepted with one probability; so long that their ends,
    where the last step yields more than is left, hardly count."""
    made = texts(count=4, roots=4000)
    survivals = survivals_of(torch.full((len(made.length_R),), accepted)).half()
    return replace(made, survivals=dict.fromkeys(VERIFIERS, survivals))


def speed(
    seconds: Seconds, batch: int, length: int, passes: int, accepted: float = ACCEPTED
) -> float:
    """Of a whole batch, by the formula."""
    tokens = (1 - accepted ** (length + 1)) / (1 - accepted)
    return batch * tokens / step(seconds, batch, length + 1, passes)


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("name", ENGINES)
def test_lengths_are_the_best_of_those_that_the_engine_takes(
    gpu: str, name: str, tmp_path: Path
) -> None:
    """A token in five is rejected, on two GPUs that do not exist. vLLM makes the passes of the
    longest chain for every batch; SGLang drafts one length. The predictions are what the engine
    really pays."""
    seconds, engine = GPUS[gpu], ENGINES[name]
    choices = best_lengths(
        engine, even(), ("traversal", "specinfer"), read(tmp_path, timings(seconds))
    )
    assert [choice.batch for choice in choices] == list(BATCHES)
    longest, default = max(choice.length for choice in choices), engine.default
    # the best moves with the batch
    assert (longest != min(choice.length for choice in choices)) != engine.one_length
    for choice in choices:
        real = speed(seconds, choice.batch, choice.length, longest)
        assert choice.tokens_per_second == pytest.approx(real, rel=2e-3)
        assert choice.gain is not None
        assert choice.gain.value == pytest.approx(
            real / speed(seconds, choice.batch, default, default), rel=2e-3
        )

    def mean(longest: int) -> float:
        lengths = [longest] if engine.one_length else range(longest + 1)
        return statistics.mean(
            math.log(max(speed(seconds, b, n, longest) for n in lengths)) for b in BATCHES
        )

    reached = statistics.mean(math.log(choice.tokens_per_second) for choice in choices)
    assert reached == pytest.approx(max(map(mean, range(9))), abs=2e-3)
    settings = EngineSettings(
        "T",
        "D",
        "draft_model",
        engine.blocks,
        Sampling(draft_temperature=None if engine.samples else 0.0),
        choices,
    )
    assert (
        engine.macros.settings(settings) == (GOLDEN / f"{name}-{gpu}.{engine.suffix}").read_text()
    )


def test_block_labels_are_compared_with_what_the_engine_does_unasked(tmp_path: Path) -> None:
    labels = {
        "traversal": even(0.9).survivals["traversal"],
        "specinfer": even(0.6).survivals["specinfer"],
    }
    timed = read(tmp_path, timings(flat))
    both, vllm = ("traversal", "specinfer"), ENGINES["vllm"]
    first, *others = best_lengths(vllm, replace(even(), survivals=labels), both, timed)
    longest = max(best.length for best in (first, *others))
    expected = speed(flat, 1, first.length, longest, 0.9) / speed(flat, 1, 5, 5, 0.6)
    assert first.gain is not None and first.gain.value == pytest.approx(expected, rel=2e-3)
    assert all(
        best.gain is None for best in best_lengths(replace(vllm, default=12), even(), both, timed)
    )


def test_a_server_without_a_drafter_is_named_where_it_is_as_fast(tmp_path: Path) -> None:
    """One with a drafter takes longer, whatever it does, with eight requests and more, and so with
    five."""
    timed = read(tmp_path, timings(flat))
    plain = []
    for batch in BATCHES:
        with_drafter = timed.at_batch(batch).target.at(CONTEXT, 1)
        plain.append(with_drafter - 10e-3 * (batch >= 8))
    costly = replace(timed, plain=Table([CONTEXT], list(BATCHES), [plain]))
    vllm, verifiers = ENGINES["vllm"], ("traversal", "specinfer")
    for profile, words in (
        (timed, ""),
        (costly, "serve this without a drafter from 5 requests on"),
    ):
        lengths = best_lengths(vllm, even(0.4), verifiers, profile)
        settings = EngineSettings("T", "D", "draft_model", True, Sampling(), lengths)
        assert settings.without_drafter == words
        assert all((best.length == 0) == (best.batch >= 8 and bool(words)) for best in lengths)


def test_an_engine_reads_what_the_golden_folder_holds() -> None:
    """With greedy drafts that are verified token by token."""
    lengths = [
        BestLength(batch, length, 1.0, 1.0, None)
        for batch, length in ((1, 5), (4, 5), (8, 3), (64, 0))
    ]
    settings = EngineSettings(
        "target", "draft", "draft_model", False, Sampling(draft_temperature=0.0), lengths
    )
    vllm, sglang = ENGINES["vllm"], ENGINES["sglang"]
    assert vllm.files(settings)["temperature-1.json"] == (GOLDEN / "vllm-plain.json").read_text()
    assert vllm.command(settings, Path("a b")) == (
        "vllm serve target --max-num-seqs 64 "
        """--speculative-config "$(cat 'a b/temperature-1.json')\""""
    )
    assert (
        sglang.command(settings, Path("a"))
        == "python -m sglang.launch_server --config a/temperature-1.yaml"
    )


@pytest.mark.parametrize(
    ("name", "setting", "why"),
    [
        ("vllm", {"draft_temperature": 0.5}, "no draft temperature"),
        ("vllm", {"top_p": 0.9}, "follow the temperature alone"),
        ("vllm", {"min_p": 0.1, "draft_temperature": 0.0}, "min_p"),
        ("vllm", {}, ""),
        ("vllm", {"draft_temperature": 1.0}, ""),
        ("vllm", {"top_p": 0.9, "draft_temperature": 0.0}, ""),
        ("sglang", {}, "draft_temperature: 0"),
        ("sglang", {"draft_temperature": 0.0}, ""),
    ],
)
def test_settings_that_an_engine_serves(name: str, setting: dict[str, float], why: str) -> None:
    reason = ENGINES[name].refusal(Sampling(**setting))
    assert why in reason and bool(why) == bool(reason)


def test_the_runs_verifiers_on_chains() -> None:
    several = ("lifted_uniform", "specinfer")
    assert ENGINES["vllm"].verifiers(several, 0.7) == ("lifted_uniform", "specinfer")
    assert ENGINES["sglang"].verifiers(several, 0.7) == ("specinfer", "specinfer")
    for name in ("traversal", "lifted_best", "spectr"):
        assert ENGINES["vllm"].verifiers((name,), 0.7) == (name, name)
    with pytest.raises(InputError, match="verifiers: sglang verifies chains as one of naive"):
        ENGINES["sglang"].verifiers(("traversal",), 0.7)
    assert ENGINES["sglang"].verifiers(("traversal",), 0.0) == ("traversal", "traversal"), (
        "greedy chains need no rule"
    )


def run(stage: str, *arguments: str) -> str:
    """What a stage says, in this process."""
    done = CliRunner().invoke(app, command(stage, *SMALL, *arguments)[3:], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.output


def test_a_finished_run_gets_settings_for_an_engine(copy: Path) -> None:
    before = (copy / "runs/demo/latency.json").read_bytes()
    wanted = "no engine's times there: espalier latency --from timings.csv"
    assert wanted in refusal("export", *SMALL, "--engine", "vllm")
    (copy / "timings.csv").write_text(timings(stepped))
    run("latency", "--from", "timings.csv")
    assert (copy / "runs/demo/latency.json").read_bytes() == before  # this machine's own
    for name, engine in ENGINES.items():
        run("export", "--engine", name)
        folder = copy / "runs/demo/engines" / name
        page = (folder / "README.md").read_text()
        assert page.count("\n## ") == 2  # sampling settings
        # sampled drafts at temperature 1
        assert page.count("Nothing is written") == (not engine.samples)
        served = [
            path for path in folder.glob(f"*.{engine.suffix}") if ".prediction" not in path.name
        ]
        assert served and all(f"runs/demo/engines/{name}/{path.name}" in page for path in served)
        for path in served:
            rows = json.loads(path.with_suffix(".prediction.json").read_text())
            assert [row["batch"] for row in rows] == list(BATCHES)
            assert all(
                row["gain"]["value"] > 0 and f"| {row['tokens_per_step']:.2f} |" in page
                for row in rows
            )
    assert "reusing" in run("export", "--engine", "vllm")


def test_a_flag_of_another_stage_is_named(inside: Path) -> None:
    assert refusal("train", "--engine", "vllm") == "espalier: No such option: --engine"
    assert "export.engine" in refusal("export", "--engine", "other")
