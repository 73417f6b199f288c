"""Tables for the engines of today: the best lengths, and the files."""

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
import transformers
import yaml

from pipelines.cli import main
from pipelines.config import Config, SamplingSetting
from pipelines.export.chains import BestLength, _Files, best_lengths, chain_verifiers, ranges_of, refusal
from pipelines.export.engines import ENGINES, Engine, Range, Served, samples
from pipelines.export.rules import RULES, Rule, tuned
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


def planned(seconds: Seconds, folder: Path, engine: Engine = HONEST, accepted: float = ACCEPTED) -> list[BestLength]:
    return best_lengths(even(accepted), ("traversal", "specinfer"), profile(seconds, folder), engine)


@pytest.mark.parametrize("seconds", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("accepted", [0.8, 0.95])
def test_a_planted_optimum_is_found_at_every_batch_size(seconds: Seconds, accepted: float, tmp_path: Path) -> None:
    found = planned(seconds, tmp_path, accepted=accepted)
    assert [choice.batch for choice in found] == list(BATCHES)
    rounded = float(torch.tensor(accepted).half())
    for choice in found:
        by_length = [speed(seconds, choice.batch, length, rounded) for length in range(9)]
        assert by_length[choice.length] == pytest.approx(max(by_length), rel=2e-3)
        assert choice.tokens_per_second == pytest.approx(by_length[choice.length], rel=2e-3)
    assert len({choice.length for choice in found}) > 1  # the optimum moves with the batch


@pytest.mark.parametrize("seconds", GPUS.values(), ids=GPUS)
@pytest.mark.parametrize("name", ENGINES)
def test_predictions_are_what_the_engine_really_pays(seconds: Seconds, name: str, tmp_path: Path) -> None:
    """vLLM makes the passes of the longest chain for every batch; SGLang drafts one length. No other table that the
    engine takes is better over all batch sizes."""
    engine = ENGINES[name]
    found = planned(seconds, tmp_path, engine)
    longest = max(choice.length for choice in found)
    paid = longest if engine.masks else None
    for choice in found:
        real = speed(seconds, choice.batch, choice.length, passes=paid)
        assert choice.tokens_per_second == pytest.approx(real, rel=2e-3)
        assert choice.gain is not None
        assert choice.gain.value == pytest.approx(real / speed(seconds, choice.batch, engine.default), rel=2e-3)

    def mean(longest: int) -> float:
        passes = longest if engine.masks else None
        best = [max(speed(seconds, b, n, passes=passes) for n in engine.lengths(longest)) for b in BATCHES[1:]]
        first = engine.lengths(longest) if not engine.first_is_longest else [longest]
        best.append(max(speed(seconds, BATCHES[0], n, passes=passes) for n in first))
        return statistics.mean(map(math.log, best))

    reached = statistics.mean(math.log(choice.tokens_per_second) for choice in found)
    assert reached == pytest.approx(max(map(mean, range(9))), abs=2e-3)


def test_block_labels_are_compared_with_what_the_engine_does_unasked(tmp_path: Path) -> None:
    labels = {"traversal": even(0.9).survivals["traversal"], "specinfer": even(0.6).survivals["specinfer"]}
    mixed = replace(even(), survivals=labels)
    first, *_ = best_lengths(mixed, ("traversal", "specinfer"), profile(flat, tmp_path), HONEST)
    expected = speed(flat, 1, first.length, 0.9) / speed(flat, 1, 5, 0.6)
    assert first.gain is not None and first.gain.value == pytest.approx(expected, rel=2e-3)


def test_a_default_that_was_not_timed_has_no_gain(tmp_path: Path) -> None:
    assert all(choice.gain is None for choice in planned(flat, tmp_path, replace(HONEST, default=12)))


def test_larger_batches_draft_no_longer_chains_where_an_engine_forbids_it(tmp_path: Path) -> None:
    """Here drafting is dear for one request and cheap for eight."""
    rows = ["batch,context,verified,passes,seconds"]
    for batch, draft in ((1, 0.02), (8, 0.001)):
        rows += [f"{batch},512,{length + 1},{length},{0.02 + length * draft}" for length in range(9)]
        rows.append(f"{batch},512,0,1,{draft}")
    path = tmp_path / "timings.csv"
    path.write_text("\n".join(rows) + "\n")
    made = profile_of(read_timings(path), "timings.csv", True, "pair", VERIFIERS)
    free, tied = (
        best_lengths(even(), ("traversal", "traversal"), made, replace(HONEST, first_is_longest=tied))
        for tied in (False, True)
    )
    assert free[1].length > free[0].length
    assert free[0].length <= tied[0].length and tied[1].length <= tied[0].length


def test_sizes_between_timed_ones_take_the_length_of_the_larger_one() -> None:
    choices = [BestLength(batch, length, 1.0, 1.0, None) for batch, length in ((1, 5), (4, 5), (8, 3), (64, 0))]
    assert ranges_of(choices) == [Range(1, 4, 5), Range(5, 8, 3), Range(9, 64, 0)]


SERVED = Served("target", "draft", True, True, [Range(1, 4, 5), Range(5, 8, 3), Range(9, 64, 0)])


def test_what_vllm_reads() -> None:
    written = ENGINES["vllm"].settings(SERVED)
    assert written["num_speculative_tokens_per_batch_size"] == [[1, 4, 5], [5, 8, 3], [9, 64, 0]]
    assert (written["num_speculative_tokens"], written["method"]) == (5, "draft_model")
    assert (written["rejection_sample_method"], written["draft_sample_method"]) == ("block", "probabilistic")
    plain = ENGINES["vllm"].settings(replace(SERVED, block=False, sampled=False))
    assert (plain["rejection_sample_method"], plain["draft_sample_method"]) == ("standard", "greedy")
    assert ENGINES["vllm"].command(SERVED, "a.json") == (
        'vllm serve target --max-num-seqs 64 --speculative-config "$(cat a.json)"'
    )


def test_what_sglang_reads() -> None:
    written = ENGINES["sglang"].settings(replace(SERVED, block=False, sampled=False, ranges=[Range(1, 64, 5)]))
    assert written["speculative-algorithm"] == "STANDALONE" and written["speculative-eagle-topk"] == 1
    assert (written["speculative-num-steps"], written["speculative-num-draft-tokens"]) == (5, 6)
    assert ENGINES["sglang"].command(SERVED, "a.yaml") == "python -m sglang.launch_server --config a.yaml"


def test_what_tensorrt_llm_reads() -> None:
    config = ENGINES["tensorrt-llm"].settings(SERVED)["speculative_config"]
    schedule = config["draft_len_schedule"]
    assert schedule[1] == config["max_draft_len"] == max(schedule.values())
    for batch in range(1, 65):
        wanted = next(each.length for each in SERVED.ranges if batch <= each.last)
        assert schedule[min(size for size in schedule if size >= batch)] == wanted
    assert config["use_rejection_sampling"]
    greedy = ENGINES["tensorrt-llm"].settings(replace(SERVED, sampled=False))
    assert "use_rejection_sampling" not in greedy["speculative_config"]


@pytest.mark.parametrize(("gpu", "name"), list(itertools.product(GPUS, ENGINES)))
def test_files_are_those_of_the_golden_folder(gpu: str, name: str, tmp_path: Path) -> None:
    """Of texts in which a token in five is rejected, on two GPUs that do not exist."""
    engine = ENGINES[name]
    own = profile(GPUS[gpu], tmp_path)
    setting = SamplingSetting(draft_temperature=None if engine.samples else 0.0)
    verifiers = ("traversal" if engine.blocks else "specinfer", "specinfer")
    reason, _ = _Files(even(), verifiers, own, ("T", "D"), tmp_path, tmp_path).of(engine, setting)
    (written,) = (path for path in tmp_path.glob(f"temperature-*.{engine.suffix}") if ".prediction" not in path.name)
    assert not reason and written.read_text() == (GOLDEN / f"{name}-{gpu}.{engine.suffix}").read_text()


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"draft_temperature": 0.5}, "no draft temperature"),
        ({"temperature": 0.0, "draft_temperature": 0.3}, "no draft temperature"),
        ({"top_p": 0.9}, "follow the temperature alone"),
        ({"top_k": 20}, "follow the temperature alone"),
        ({"min_p": 0.1, "draft_temperature": 0.0}, "min_p"),
        ({}, ""),
        ({"draft_temperature": 1.0}, ""),
        ({"temperature": 0.0}, ""),
        ({"top_p": 0.9, "draft_temperature": 0.0}, ""),
    ],
)
def test_settings_that_an_engine_serves(setting: dict[str, float], why: str) -> None:
    assert why in refusal(ENGINES["vllm"], SamplingSetting(**setting))
    assert bool(why) == bool(refusal(ENGINES["vllm"], SamplingSetting(**setting)))


def test_sglang_serves_greedy_drafts_alone() -> None:
    assert "draft_temperature: 0" in refusal(ENGINES["sglang"], SamplingSetting())
    assert samples(SamplingSetting()) and not samples(SamplingSetting(draft_temperature=0.0))
    assert not refusal(ENGINES["sglang"], SamplingSetting(draft_temperature=0.0))


def test_the_runs_verifiers_on_chains() -> None:
    several = ("lifted_uniform", "specinfer")
    assert chain_verifiers(ENGINES["vllm"], several, "vllm") == ("lifted_uniform", "specinfer")
    assert chain_verifiers(ENGINES["tensorrt-llm"], several, "tensorrt-llm") == ("specinfer", "specinfer")
    assert chain_verifiers(ENGINES["vllm"], ("traversal",), "vllm") == ("traversal", "traversal")
    with pytest.raises(InputError, match="verifiers: tensorrt-llm verifies chains as one of naive"):
        chain_verifiers(ENGINES["tensorrt-llm"], ("traversal",), "tensorrt-llm")


def repeating(texts: Texts, foretold: int) -> Texts:
    """Fifty roots with a match of 10 tokens, after which a lookup is right so far, then fifty with a match of 9 tokens,
    after which it never is, and so on."""
    scalars_RF = texts.scalars_RF.clone()
    long_R = torch.arange(len(scalars_RF)) // 50 % 2 == 0
    scalars_RF[:, texts.schema.index("match")] = 9 + long_R.float()
    return replace(texts, scalars_RF=scalars_RF, foretold_R=long_R * foretold)


def test_the_rule_copies_where_lookups_are_right_and_drafts_elsewhere(tmp_path: Path) -> None:
    times = profile(flat, tmp_path).at_batch(1)
    found = tuned(RULES["llama-server"], repeating(even(0.6), foretold=4), "specinfer", times)
    assert (found.rule.least, found.rule.copied) == (10, 16), "copies of fewer tokens than must match are never made"
    assert 0 < found.rule.drafted < 9
    assert found.over_fixed.value > 1.1 and found.over_plain.value > found.over_fixed.value
    never = tuned(RULES["transformers"], repeating(even(0.6), foretold=4), "specinfer", times)
    assert (never.rule.least, never.rule.copied) == (0, 0) and never.over_fixed.value == pytest.approx(1)
    by_length = [speed(flat, 1, length, 0.6) for length in range(9)]
    assert by_length[never.rule.drafted] == pytest.approx(max(by_length), rel=2e-3)


@pytest.mark.parametrize("name", ["vllm", "llama-server", "transformers"])
def test_a_setting_gets_a_file_a_prediction_and_a_section(name: str, tmp_path: Path) -> None:
    engine = {**ENGINES, **RULES}[name]
    own = repeating(even(0.6), foretold=8)
    files = _Files(own, ("traversal", "specinfer"), profile(flat, tmp_path), ("T", "D"), tmp_path, Path("runs/a"))
    greedy = SamplingSetting(draft_temperature=0.0 if name == "llama-server" else None)
    reason, lines = files.of(engine, greedy)
    assert not reason and f"runs/a/temperature-1.{engine.suffix}" in "\n".join(lines)
    assert (tmp_path / f"temperature-1.{engine.suffix}").read_text() and "±" in lines[-1]
    assert json.loads((tmp_path / "temperature-1.prediction.json").read_text())
    refused, lines = files.of(engine, SamplingSetting(draft_temperature=0.5))
    assert refused and not lines


def test_what_llama_server_reads() -> None:
    """`ngram-simple` copies nothing where it is to copy fewer tokens than must match."""
    write = RULES["llama-server"].write
    assert write(Rule(6, 8, 4), "T", "D") == (
        "llama-server --model T.gguf --spec-type ngram-simple,draft-simple --spec-ngram-simple-size-n 6 "
        "--spec-ngram-simple-size-m 8 --spec-draft-model D.gguf --spec-draft-n-max 4 --spec-draft-n-min 0 "
        "--spec-draft-p-min 0\n"
    )
    assert "draft" not in write(Rule(6, 8, 0), "T", "D") and "ngram" not in write(Rule(0, 0, 4), "T", "D")
    assert "draft_temperature: 0" in RULES["llama-server"].refusal(SamplingSetting())
    assert not RULES["llama-server"].refusal(SamplingSetting(temperature=0.0))


def test_transformers_drafts_what_its_file_says() -> None:
    """Its own candidate generator, set up as assisted generation sets it up."""
    config = transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        eos_token_id=None,  # else the draft may end its candidates early
    )
    draft = transformers.LlamaForCausalLM(config).eval()
    draft.generation_config.update(**json.loads(RULES["transformers"].write(Rule(0, 0, 5), "T", "D")))
    target = transformers.LlamaForCausalLM(config).eval()
    text, asked = torch.tensor([[1, 2, 3]]), []
    forward = target.forward

    def counted(*args: object, **kwargs: object) -> object:
        asked.append(kwargs["input_ids"].shape[1])  # type: ignore[union-attr]
        return forward(*args, **kwargs)

    target.forward = counted
    target.generate(text, assistant_model=draft, do_sample=False, max_new_tokens=60, eos_token_id=None)
    assert asked[0] == 3 + 5 and set(asked[1:6]) == {6}
    refusal_of = RULES["transformers"].refusal
    assert refusal_of(SamplingSetting(draft_temperature=0.5)) and not refusal_of(SamplingSetting(top_p=0.9))


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


def test_a_finished_run_gets_tables_for_an_engine(
    finished: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (finished / "runs/demo/latency.json").read_bytes()
    assert espalier(monkeypatch, "export", "--engine", "vllm") == 2
    assert "no engine's times there: espalier latency --from timings.csv" in capsys.readouterr().err
    (finished / "timings.csv").write_text(timings(stepped))
    assert espalier(monkeypatch, "latency", "--from", "timings.csv") == 0
    assert (finished / "runs/demo/latency.json").read_bytes() == before  # this machine's own
    assert espalier(monkeypatch, "export", "--engine", "transformers") == 0
    setting = json.loads((finished / "runs/demo/engines/transformers/temperature-0.json").read_text())
    assert setting["num_assistant_tokens"] > 0 and setting["num_assistant_tokens_schedule"] == "constant"
    for name in ("vllm", "tensorrt-llm"):  # JSON and YAML
        assert espalier(monkeypatch, "export", "--engine", name) == 0
        folder = finished / "runs/demo/engines" / name
        page = (folder / "README.md").read_text()
        assert page.count("\n## ") == 2  # sampling settings
        written = {path.stem: path for path in folder.iterdir() if path.suffix == f".{ENGINES[name].suffix}"}
        tables = {stem: path for stem, path in written.items() if not stem.endswith(".prediction")}
        for stem, path in tables.items():
            assert path.name in page
            yaml.safe_load(path.read_text())
            rows = json.loads((folder / f"{stem}.prediction.json").read_text())
            assert [row["batch"] for row in rows] == list(BATCHES)
            assert all(row["gain"]["value"] > 0 for row in rows)
    assert espalier(monkeypatch, "export", "--engine", "vllm") == 0
    assert "reusing" in capsys.readouterr().out


def test_a_flag_of_another_stage_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert espalier(monkeypatch, "train", "--engine", "vllm") == 2
    assert capsys.readouterr().err == "espalier: export.engine is a key of the export stage\n"
    assert espalier(monkeypatch, "export", "--engine", "other") == 2
    assert "export.engine" in capsys.readouterr().err


def test_the_key_and_the_flag_say_the_same() -> None:
    assert Config(name="a", export={"engine": "sglang"}).export.engine == "sglang"
