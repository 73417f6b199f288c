"""The whole pipeline, from the pair to the registered selector; and with the feature that
`docs/extending.md` adds."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from itertools import chain, product
from pathlib import Path

import pytest

from data_gen.traces import read_texts
from pipelines.config import Config
from pipelines.data.recorded import load_traces
from pipelines.evaluate.methods import (
    AT_ROOT,
    BEST_STATIC,
    BRANCHING,
    CHAIN,
    COPYING,
    NETWORK,
    PLAIN,
    SELECTOR,
)
from pipelines.evaluate.table import CORRELATION, DECODED, REPLAYED, Table
from pipelines.evaluate.verdict import Evaluation, losses
from pipelines.train.result import RESULT, build, load_result
from selector.actions import EMPTY, Action, ActionSpace
from selector.decision import Setting
from selector.runtime.artefact import Features
from selector.runtime.selector import Policy, load_selector
from selector.schema import HIDDEN_STATES
from tests.checks import python
from tests.pipelines.runs import (
    DRAFT,
    ROOT,
    SMALL,
    STAGES,
    TARGET,
    TEXTS,
    TOKENS,
    command,
    contents,
    espalier,
    evaluation_of,
    outcome,
    versions,
)
from tests.pipelines.small_logs import as_steps, record, small, write


def test_the_demo_ends_with_a_table_a_report_and_a_selector(demo: tuple[Path, str]) -> None:
    folder, output = demo
    run = folder / "runs" / "demo"
    assert re.search(r"^demo: \S+ with .* on ", output, re.MULTILINE)
    assert all(len(line) <= 80 for line in output.splitlines() if set(line) & set("─━┃│"))
    assert str(run / "report.html") in output
    # where times are disturbed, perhaps no draft pays
    assert ("custom_generate" in output) != ("Decode without a draft" in output)
    assert re.search(r"equal the trained module's at all \d{3} roots", output)
    report = (run / "report.html").read_text()
    # by setting
    assert len(set(re.findall(r'<img alt="([^"]{20,})" src="data:image/png;base64,', report))) == 2


PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if "```python" in page.read_text()
]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_snippets_of_the_pages_run(
    page: Path, demo: tuple[Path, str], inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the demo has been run, and a log's selector trained, as the pages suppose; networks
    decide in programs."""
    decided: list[bool] = []
    select = Policy.select

    def observed(self: Policy, features: Features | None) -> Action | None:
        action = select(self, features)
        decided.append(self.setting.decider == "network" and None not in (features, action))
        return action

    Path("configs").symlink_to(ROOT / "configs")
    shutil.copytree(demo[0] / "runs", "runs")
    if page.stem == "README":
        config = let_the_network_decide(monkeypatch)
        build(config, Path("runs/demo/selector"), load_traces(config))
    if page.stem == "logs":
        _, timings = small(inside, 1)
        log = write(inside / "log.jsonl", [as_steps(record(n)) for n in range(30)])
        options = ["--timings", str(timings), "--name", "mine"]
        network = ["train.epochs=1", "train.hidden=[8]"]
        espalier(inside, "logs", str(log), *options, *network, config="")
        config = let_the_network_decide(monkeypatch, "mine")
        build(config, Path("runs/mine/selector"), load_traces(config))
    monkeypatch.setattr(Policy, "select", observed)
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.DOTALL):
        block = block.replace("smollm2", TARGET)  # the pair of this demo
        block = block.replace("pipelines/pair/shipped/draft", DRAFT)
        exec(compile(block, page.name, "exec"), {})
    assert any(decided) or page.stem not in ("README", "logs")


def let_the_network_decide(monkeypatch: pytest.MonkeyPatch, name: str = "demo") -> Config:
    """In every setting of a run's result, whatever pays on this machine; the run's config."""
    train = json.loads(Path(f"runs/{name}/stages/train.json").read_text())
    config = Config.model_validate(train["provenance"]["config"])
    result = load_result(config)
    cases = []
    for case in result.best.cases:
        levels = (case.setting.level or "light",)
        setting = replace(case.setting, feature_levels=levels, rule=None, rho=1.0)
        cases.append(replace(case, setting=setting))
    best = replace(result.best, cases=cases)
    monkeypatch.setattr(
        "pipelines.train.result.load_result",
        lambda _: replace(result, selectors={"best": best}, chosen="best"),
    )
    return config


def test_the_evaluation_holds_every_figure(demo: tuple[Path, str]) -> None:
    evaluation = evaluation_of(demo[0])
    table = Table.read(demo[0] / "runs" / "demo" / "evaluation.parquet")
    summary = evaluation["summary"]
    assert summary["ratio_vs_static_traversal_wall"] > 0 and 0 <= summary["selector_time_share"] < 1
    assert "ratio_vs_static_traversal_gpu_like" not in summary  # no other machine is asked for
    methods = {PLAIN, SELECTOR, BEST_STATIC, COPYING, AT_ROOT, CHAIN}
    for row, temperature in zip(summary["by_setting"], (0, 1), strict=True):
        sampling_name = f"T={temperature}"
        assert (row["temperature"], row["top_p"]) == (temperature, 1)
        low, high = row["wall_interval_95"]
        assert 0 < low <= row["wall_ratio"] <= high
        of_selector = {"setting": sampling_name, "method": SELECTOR}
        for rival, basis in product((PLAIN, COPYING, BEST_STATIC, AT_ROOT), (DECODED, REPLAYED)):
            figure = table.of(**of_selector, rival=rival, basis=basis)
            assert figure.low and figure.high and 0 < figure.low <= figure.value <= figure.high
        entries = [entry for entry in evaluation["methods"] if entry["temperature"] == temperature]
        assert {entry["method"] for entry in entries} == methods
        for entry in entries:
            low, high = entry["interval_95"]
            assert 0 < low <= entry["tokens_per_second"] <= high
            assert 1 <= entry["block_efficiency"] <= 17
            assert entry["prompts"] == 3 and entry["tokens"] > 0
        replayed = table.select(setting=sampling_name, rival=BEST_STATIC, basis=REPLAYED)
        others = {figure.method for figure in replayed} - methods
        correlation = table.of(setting=sampling_name, method=NETWORK, statistic=CORRELATION)
        assert -1 <= correlation.value <= 1
        # of them two are of other verifiers
        assert {BRANCHING, NETWORK} <= others and len(others) == 4
    assert evaluation["greedy"]["continuations"] == 18


def test_what_training_decided_is_what_is_evaluated_and_exported(demo: tuple[Path, str]) -> None:
    run = demo[0] / "runs" / "demo"
    training = RESULT.validate_json((run / "training" / "result.json").read_bytes())
    assert set(training.selectors) == {"regressor-light", "policy-light"}
    for selector in training.selectors.values():
        assert (run / "training" / selector.checkpoint).exists()
    settings = [case.setting for case in training.best.cases]
    assert [Setting.of(row) for row in evaluation_of(demo[0])["decisions"]] == settings
    # on a busy machine a selector may have lost to plain decoding, which is then exported
    evaluation = Evaluation(evaluation_of(demo[0]), Table.read(run / "evaluation.parquet"))
    lost = losses(evaluation)
    for setting, exported in zip(settings, load_selector(run / "selector").settings, strict=True):
        if setting.label in lost:
            assert exported == replace(setting.static_only(), action=EMPTY)
        else:
            assert exported == setting


def test_what_decoding_accepted_is_what_the_labels_say(demo: tuple[Path, str]) -> None:
    """Of the texts that speculative decoding wrote: with every verifier |z| is below 4."""
    compared = re.findall(
        r"data: (\w+), [^:]+: (\d+) decoding steps, .* realised, z = ([+-]\d+\.\d+)", demo[1]
    )
    verifiers = {verifier for verifier, _, _ in compared}
    assert verifiers <= {"specinfer", "traversal", "lifted_uniform"} and len(compared) >= 2
    assert all(abs(float(z)) < 4 for _, _, z in compared)
    assert sum(int(steps) for _, steps, _ in compared) >= 15


def test_every_file_stands_in_a_record_with_its_checksum_and_who_made_it(
    demo: tuple[Path, str],
) -> None:
    """So that no change of a file passes unseen; `test_stage` has what becomes of it."""
    run = demo[0] / "runs" / "demo"
    recorded = {"stages/day.json"}  # the first one's, which templates write
    for stage in STAGES:
        record = json.loads((run / "stages" / f"{stage}.json").read_text())
        assert record["finished"] and "torch" in record["provenance"]["packages"]
        assert record["provenance"]["config"]["data"]["texts"] == TEXTS
        recorded |= {f"stages/{stage}.json", *record["files"]}
    shards = json.loads((run / "traces" / "manifest.json").read_text())["shards"]
    recorded |= {f"traces/{name}" for name, shard in shards.items() if shard["sha256"]}
    assert {str(path.relative_to(run)) for path in run.rglob("*") if path.is_file()} == recorded


def test_datasets_reads_the_traces(demo: tuple[Path, str], tmp_path: Path) -> None:
    from datasets import load_dataset

    traces = demo[0] / "runs" / "demo" / "traces"
    files = {split: str(traces / split / "*.parquet") for split in ("train", "validation", "test")}
    data = load_dataset("parquet", data_files=files, cache_dir=str(tmp_path))
    for row in chain.from_iterable(data.values()):
        roots = row["roots"]
        assert roots == max(0, len(row["tokens"]) - row["start"] - 16) and roots <= TOKENS + 1
        for column in ("draft_entropy", "draft_prob", "lookup.right"):
            assert len(row[column]) == roots
        assert len(row["traversal.survivals"]) == roots * len(ActionSpace.recorded().sums_SA)
        assert bool(row["step_root"]) == (row["step_verifier"] is not None)
        assert not set(HIDDEN_STATES) & set(row)  # light features alone
    decoded = [row["step_verifier"] for row in data["train"] if row["step_verifier"]]
    assert len(decoded) == 2 * round(0.1 * 22)
    assert not any(row["step_verifier"] for row in data["test"])
    train, validation, test = ({row["source"] for row in data[split]} for split in files)
    assert train.isdisjoint(validation | test) and validation.isdisjoint(test)


def test_a_second_run_reuses_everything_and_says_so(copy: Path) -> None:
    """But for the pair, which is loaded and checked every time."""
    before, output = contents(), espalier(copy, "demo", *SMALL)
    for stage in STAGES[1:]:
        assert f"{stage}: reusing" in output
    assert "speed of all methods over plain decoding" in output  # the tables are shown again
    assert versions(copy) == []  # nothing is registered again
    after = contents()
    assert all(
        path.name == "pair.json" or after[path] == content for path, content in before.items()
    )


def test_the_results_config_runs_with_all_that_the_demo_leaves_out(tmp_path: Path) -> None:
    """Prompts in a chat template, hidden states, a nucleus, other machines, transformers' own
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
    timings = sorted((ROOT / "configs/clocks").glob("*270m.csv"))
    few = (*few, f"evaluate.clocks={[*map(str, timings)]}")
    code, output = outcome(tmp_path, "demo", *SMALL, *few, config="results.yaml")
    assert code == 0, output
    evaluation = evaluation_of(tmp_path, "results")
    figures = Table.read(tmp_path / "runs" / "results" / "evaluation.parquet")
    columns = {"setting": "T=1, top-p=0.9", "method": SELECTOR, "rival": AT_ROOT}
    ratios = [figures.of(**columns, clock=path.stem).value for path in timings]
    assert [evaluation["summary"]["ratio_vs_static_traversal_gpu_like"]] == pytest.approx(ratios)
    for name in ("assisted generation", "prompt lookup"):
        (entry,) = (method for method in evaluation["methods"] if method["method"] == name)
        assert entry["verifier"] == "transformers"
    assert evaluation["summary"]["ratio_vs_assisted_generation"] > 0
    path = tmp_path / "runs" / "results" / "training" / "result.json"
    levels = {s.feature_level for s in RESULT.validate_json(path.read_bytes()).selectors.values()}
    assert levels == {"light", "full"}
    texts = read_texts(tmp_path / "runs" / "results" / "traces", "train", ["traversal"])
    assert {name: rows.shape[1] for name, rows in texts.hidden.items()} == dict.fromkeys(
        HIDDEN_STATES, 32
    )
    is_known_R = texts.hidden_R >= 0  # every second root of training texts
    assert not is_known_R[texts.unknown_R].any()
    assert float(is_known_R.float().mean()) == pytest.approx(0.48, abs=0.03)


def test_a_new_feature_is_replayed_on_traces_that_were_made_without_it(
    demo: tuple[Path, str], tmp_path: Path
) -> None:
    code, folder = tmp_path / "code", tmp_path / "run"
    for room in ("selector", "data_gen", "pipelines"):
        shutil.copytree(ROOT / room, code / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(demo[0], folder)
    page = (ROOT / "docs" / "extending.md").read_text()
    (change,) = re.findall(r"```diff\n(.*?)```", page, flags=re.DOTALL)
    subprocess.run(["patch", "-p1", "--fuzz=0"], cwd=code, input=change, text=True, check=True)
    _, *todo = command("train", *SMALL, "train.objectives=[regressor]")
    completed = python(*todo, folder=folder, PYTHONPATH=str(code))
    assert (
        len(re.findall(r"^ *T=[\d.]+ +\S.*\d\.\d+ ±\d\.\d+", completed.stdout, flags=re.MULTILINE))
        == 2
    ), completed.stdout
    record = json.loads((folder / "runs/demo/stages/train.json").read_text())
    before = json.loads((demo[0] / "runs/demo/stages/train.json").read_text())
    assert record["finished"] and record["depends"]["scalars"] != before["depends"]["scalars"]
