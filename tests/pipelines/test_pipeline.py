"""The whole pipeline, from the pair to the registered selector; and with the feature that
`docs/extending.md` adds."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from data_gen.traces import read_texts
from pipelines.config import Config
from pipelines.evaluate.methods import AT_ROOT, BEST_STATIC, COPYING, NETWORK, PLAIN, SELECTOR
from pipelines.evaluate.table import DECODED, ORIGINS, REPLAYED, SHARE, Table
from pipelines.latency.stage import load_profile
from pipelines.train.result import RESULT, load_module, load_result
from selector.actions import Action, ActionSpace
from selector.decision import Mode
from selector.export.writer import write_artefact
from selector.runtime.artefact import Features
from selector.runtime.selector import Tuned, load_selector
from selector.schema import HIDDEN_STATES
from tests.pipelines import runs
from tests.pipelines.small_logs import as_steps, record, small, write


def test_the_demo_ends_with_a_table_a_report_and_a_selector(demo: tuple[Path, str]) -> None:
    folder, output = demo
    run = folder / "runs" / "demo"
    assert re.search(r"^demo: \S+ with .* on ", output, re.MULTILINE)
    assert all(len(line) <= 80 for line in output.splitlines() if set(line) & set("─━┃│"))
    assert str(run / "report.html") in output
    _, found, program = output.partition(
        f"The exported selector is {run / 'selector'}. This program decodes with it:"
    )
    assert bool(found) == ("custom_generate" in program)
    # where times are disturbed, perhaps no draft pays
    assert found or "Decode without a draft" in output
    assert re.search(
        r"its actions equal the trained module's at all \d{3} roots of the validation texts", output
    )
    report = (run / "report.html").read_text()
    # by setting
    assert len(set(re.findall(r'<img alt="([^"]{20,})" src="data:image/png;base64,', report))) == 2
    for title in (
        "All methods",
        "Do the labels describe the decoder?",
        "Is greedy text unchanged?",
    ):
        assert title in report


PAGES = [
    page
    for page in (runs.ROOT / "README.md", *sorted((runs.ROOT / "docs").glob("*.md")))
    if "```python" in page.read_text()
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_snippets_of_the_pages_run(
    page: Path, demo: tuple[Path, str], inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the demo has been run, and a log's selector trained, as the pages suppose; networks
    decide in programs."""
    decided, select = list[bool](), Tuned.select

    def observed(self: Tuned, features: Features | None) -> Action | None:
        action = select(self, features)
        decided.append(self.mode.decider == "network" and None not in (features, action))
        return action

    Path("configs").symlink_to(runs.ROOT / "configs")
    shutil.copytree(demo[0] / "runs", "runs")
    if page.stem == "README":
        let_the_network_decide()
    # of steps alone: no other policy is compared, so that the network decides
    if page.stem == "logs":
        _, clock = small(inside, 1)
        log = write(inside / "log.jsonl", [as_steps(record(n)) for n in range(30)])
        line = [
            str(log),
            "--timings",
            str(clock),
            "--name",
            "llama_eagle3",
            "train.epochs=1",
            "train.hidden=[8]",
        ]
        runs.espalier(inside, "logs", *line, "logs.force=true", config="")
    monkeypatch.setattr(Tuned, "select", observed)
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        own = block.replace("smollm2", runs.TARGET)  # the pair of this demo
        own = own.replace("pipelines/pair/shipped/draft", runs.DRAFT)
        exec(compile(own, page.name, "exec"), {})
    assert any(decided) or page.stem not in ("README", "logs")


def let_the_network_decide() -> None:
    """In every setting of the demo's artefact, whatever pays on this machine."""
    config = Config.model_validate(
        json.loads(Path("runs/demo/stages/train.json").read_text())["provenance"]["config"]
    )
    result, selector = load_result(config), load_selector("runs/demo/selector")
    modes = [
        replace(mode, feature_levels=("light",), rule=None, rho=1.0, allowed=())
        for mode in selector.modes
    ]
    facts = json.loads(Path("runs/demo/selector/config.json").read_text())
    own = selector.verifier, selector.modes[0].action, [mode.row() for mode in modes]
    kept = {key: facts[key] for key in ("pair", "metrics", "run_id", "provenance")}
    write_artefact(
        Path("runs/demo/selector"), load_module(config, result), load_profile(config), *own, kept
    )


def test_the_evaluation_holds_every_figure(demo: tuple[Path, str]) -> None:
    evaluation, found = (
        runs.evaluation_of(demo[0]),
        Table.read(demo[0] / "runs" / "demo" / "evaluation.parquet"),
    )
    summary = evaluation["summary"]
    assert summary["ratio_vs_static_traversal_wall"] > 0 and 0 <= summary["selector_time_share"] < 1
    assert "ratio_vs_static_traversal_gpu_like" not in summary  # no clock is asked for
    mean = sum(row["wall_ratio"] for row in summary["by_setting"]) / 2
    assert summary["ratio_vs_best_static_delayed"] == pytest.approx(mean)
    methods = {PLAIN, SELECTOR, BEST_STATIC, COPYING, AT_ROOT, "static chain"}
    for row, setting, temperature in zip(
        summary["by_setting"], ("T=0", "T=1"), (0, 1), strict=True
    ):
        assert (row["temperature"], row["top_p"]) == (temperature, 1)
        low, high = row["wall_interval_95"]
        assert (
            0 < low <= row["wall_ratio"] <= high
            and row["replay_ratio"] > 0
            and row["replay_error"] >= 0
        )
        for rival in (PLAIN, COPYING, BEST_STATIC, AT_ROOT):
            for basis in (DECODED, REPLAYED):
                figure = found.of(setting=setting, method=SELECTOR, rival=rival, basis=basis)
                assert figure.low and figure.high and 0 < figure.low <= figure.value <= figure.high
        of_selector = {"setting": setting, "method": SELECTOR, "basis": DECODED}
        shares = [found.of(**of_selector, statistic=SHARE + origin).value for origin in ORIGINS]
        assert sum(shares) == pytest.approx(1)
        entries = [entry for entry in evaluation["methods"] if entry["temperature"] == temperature]
        assert {entry["method"] for entry in entries} == methods
        for entry in entries:
            low, high = entry["interval_95"]
            assert 0 < low <= entry["tokens_per_second"] <= high
            assert (
                1 <= entry["block_efficiency"] <= 17 and entry["verifier"] and entry["top_p"] == 1
            )
            assert (entry["prompts"], entry["tokens"] > 0) == (3, True)
        # of them two are of other verifiers
        replayed = found.select(setting=setting, rival=BEST_STATIC, basis=REPLAYED)
        others = {figure.method for figure in replayed} - methods
        assert {"static tree with branches", NETWORK} <= others and len(others) == 4
    assert evaluation["greedy"]["continuations"] == 18


def test_what_training_decided_is_what_is_evaluated_and_exported(demo: tuple[Path, str]) -> None:
    run = demo[0] / "runs" / "demo"
    training = RESULT.validate_json((run / "training" / "result.json").read_bytes())
    assert set(training.selectors) == {"regressor-light", "policy-light"}
    for selector in training.selectors.values():
        assert (run / "training" / selector.checkpoint).exists()
    modes = [case.mode for case in training.best.cases]
    assert [Mode.of(row) for row in runs.evaluation_of(demo[0])["decisions"]] == modes
    assert load_selector(run / "selector").modes == modes


def test_what_decoding_accepted_is_what_the_labels_say(demo: tuple[Path, str]) -> None:
    """Of the texts that speculative decoding wrote: with every verifier |z| is below 4, in output
    and report."""
    found = re.findall(
        r"data: (\w+), [^:]+: (\d+) decoding steps, .* realised, z = ([+-]\d+\.\d+)", demo[1]
    )
    assert {verifier for verifier, _, _ in found} <= {
        "specinfer",
        "traversal",
        "lifted_uniform",
    } and len(found) >= 2
    assert all(abs(float(z)) < 4 for _, _, z in found)
    assert sum(int(steps) for _, steps, _ in found) >= 15


def test_every_file_stands_in_a_record_with_its_checksum_and_who_made_it(
    demo: tuple[Path, str],
) -> None:
    """So that no change of a file passes unseen; `test_stage` has what becomes of it."""
    run = demo[0] / "runs" / "demo"
    recorded = set()
    for stage in runs.STAGES:
        record = json.loads((run / "stages" / f"{stage}.json").read_text())
        assert record["finished"] and "torch" in record["provenance"]["packages"]
        assert record["provenance"]["config"]["data"]["texts"] == runs.TEXTS
        recorded |= {f"stages/{stage}.json", *record["files"]}
    shards = json.loads((run / "traces" / "manifest.json").read_text())["shards"]
    recorded |= {f"traces/{name}" for name, shard in shards.items() if shard["sha256"]}
    assert {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()} == recorded


def test_datasets_reads_the_traces(demo: tuple[Path, str], tmp_path: Path) -> None:
    from datasets import load_dataset

    traces = demo[0] / "runs" / "demo" / "traces"
    files = {split: str(traces / split / "*.parquet") for split in ("train", "validation", "test")}
    data = load_dataset("parquet", data_files=files, cache_dir=str(tmp_path))
    for row in (row for split in data.values() for row in split):
        roots = row["roots"]
        assert roots == max(0, len(row["tokens"]) - row["start"] - 16) and roots <= runs.TOKENS + 1
        assert (
            len(row["target_entropy"])
            == len(row["draft_prob"])
            == len(row["lookup.right"])
            == roots
        )
        assert len(row["traversal.survivals"]) == roots * len(ActionSpace.recorded().sums_SA)
        assert bool(row["step_root"]) == (row["step_verifier"] is not None)
        assert not set(HIDDEN_STATES) & set(row)  # light features alone
    decoded = [row["step_verifier"] for row in data["train"] if row["step_verifier"]]
    assert len(decoded) == 2 * round(0.1 * 22) and not any(
        row["step_verifier"] for row in data["test"]
    )
    train, validation, test = ({row["source"] for row in data[split]} for split in files)
    assert train.isdisjoint(validation | test) and validation.isdisjoint(test)


def test_a_second_run_reuses_everything_and_says_so(copy: Path) -> None:
    """But for the pair, which is loaded and checked every time."""
    before, output = runs.contents(), runs.espalier(copy, "demo", *runs.SMALL)
    for stage in runs.STAGES[1:]:
        assert f"{stage}: reusing" in output
    assert "speed of all methods over plain decoding" in output  # the tables are shown again
    assert runs.versions(copy) == []  # nothing is registered again
    after = runs.contents()
    assert all(
        path.name == "pair.json" or after[path] == content for path, content in before.items()
    )


def test_the_results_config_runs_with_all_that_the_demo_leaves_out(tmp_path: Path) -> None:
    """Prompts in a chat template, hidden states, a nucleus, other clocks, transformers' own
    methods."""
    few = (
        "prompts.chat=true",
        "prompts.longer=drop",
        "prompts.tokens=300",
        "evaluate.assisted=true",
        "data.features=full",
        "sampling=[{temperature: 1.0, top_p: 0.9}]",
        "data.stride=2",
        "data.texts=24",
        "train.objectives=[regressor]",
        "evaluate.prompts=2",
        "verifiers=[traversal,lifted_uniform]",
    )
    clocks = sorted((runs.ROOT / "configs/clocks").glob("*270m.csv"))
    few = (*few, f"evaluate.clocks={[*map(str, clocks)]}")
    code, said = runs.outcome(tmp_path, "demo", *runs.SMALL, *few, config="results.yaml")
    assert code == 0, said
    evaluation = runs.evaluation_of(tmp_path, "results")
    found = Table.read(tmp_path / "runs" / "results" / "evaluation.parquet")
    columns = {"setting": "T=1, top-p=0.9", "method": SELECTOR, "rival": AT_ROOT}
    ratios = [found.of(**columns, clock=clock.stem).value for clock in clocks]
    assert [evaluation["summary"]["ratio_vs_static_traversal_gpu_like"]] == pytest.approx(ratios)
    for name in ("assisted generation", "prompt lookup"):
        (entry,) = (each for each in evaluation["methods"] if each["method"] == name)
        assert entry["verifier"] == "transformers"
    assert evaluation["summary"]["ratio_vs_assisted_generation"] > 0
    training = json.loads((tmp_path / "runs" / "results" / "training" / "result.json").read_text())
    assert set(training["selectors"]) == {"regressor-light", "regressor-full"}
    assert training["selectors"]["regressor-full"]["feature_level"] == "full"
    texts = read_texts(tmp_path / "runs" / "results" / "traces", "train", ["traversal"])
    assert {name: rows.shape[1] for name, rows in texts.hidden.items()} == dict.fromkeys(
        HIDDEN_STATES, 32
    )
    known = texts.hidden_R >= 0  # every second root of training texts
    assert not known[texts.unknown_R].any() and float(known.float().mean()) == pytest.approx(
        0.48, abs=0.03
    )


def test_a_new_feature_is_replayed_on_traces_that_were_made_without_it(
    demo: tuple[Path, str], tmp_path: Path
) -> None:
    code, folder = tmp_path / "code", tmp_path / "run"
    for room in ("selector", "data_gen", "pipelines"):
        shutil.copytree(runs.ROOT / room, code / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(demo[0], folder)
    page = (runs.ROOT / "docs" / "extending.md").read_text()
    (change,) = re.findall(r"```diff\n(.*?)```", page, flags=re.DOTALL)
    subprocess.run(["patch", "-p1", "--fuzz=0"], cwd=code, input=change, text=True, check=True)
    assert (
        ".venv/bin/espalier train --config configs/demo.yaml\n```\n\nArtefacts that lack the "
        "feature" in page
    )
    variables = {**runs.environment(), "PYTHONPATH": str(code)}
    todo = runs.command("train", *runs.SMALL, "train.objectives=[regressor]")
    said = subprocess.run(
        todo, cwd=folder, env=variables, capture_output=True, text=True, check=False
    )
    assert said.returncode == 0, said.stderr
    assert (
        len(re.findall(r"^ *T=[\d.]+ +\(.*\d\.\d+ ±\d\.\d+", said.stdout, flags=re.MULTILINE)) == 2
    ), said.stdout
    record = json.loads((folder / "runs/demo/stages/train.json").read_text())
    before = json.loads((demo[0] / "runs/demo/stages/train.json").read_text())
    assert record["finished"] and record["depends"]["scalars"] != before["depends"]["scalars"]
