"""From a log to an artefact and a report, through the command line."""

from __future__ import annotations

import json
import os
import re
from dataclasses import replace
from itertools import cycle
from pathlib import Path
from typing import Any

import mlflow
import numpy as np
import pytest
import torch

from data_gen.features.root import DrafterKnowledge
from data_gen.generate import speculative_generate
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.texts.log_labels import VERIFIER, Labeller, with_features
from data_gen.texts.logs import read_logs, read_trace_log
from data_gen.traces import read_texts
from pipelines.config import load_config
from pipelines.evaluate.gains import FIXED, LEVELS, selector_at
from pipelines.evaluate.methods import COPYING, PLAIN
from pipelines.evaluate.table import Table
from pipelines.latency import decisions
from pipelines.latency.timings import profile_of, read_timings
from pipelines.pair.log import LogSource
from pipelines.pair.source import source_of
from selector.actions import ActionSpace
from selector.runtime.joint import Shapes, joint_choice
from selector.runtime.selector import Policy, Selector, load_selector
from selector.schema import DRAFTER, SCALARS_KEY, TEXT, InputError
from selector.train.data import SPLITS, Timed
from selector.train.module import SelectorModule
from selector.train.tuning import (
    StaticTable,
)
from tests.pipelines.runs import ROOT, espalier, evaluation_of, outcome
from tests.pipelines.small_logs import as_steps, record, recorded, small, write

SMALL = ["train.epochs=2", "train.hidden=[16,8]", "train.batch=128"]
GREEDY = Sampling(0.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("logs")
    small(folder)
    return folder, espalier(folder, "logs", *arguments(folder), config="")


@pytest.fixture(scope="module")
def logs(run: tuple[Path, str]) -> dict[str, Any]:
    return evaluation_of(run[0], "small")["logs"]


@pytest.fixture(scope="module")
def selector(run: tuple[Path, str]) -> Selector:
    return load_selector(run[0] / "runs/small/selector")


def test_mlflow_holds_the_selector_and_its_gains(
    run: tuple[Path, str], logs: dict[str, Any]
) -> None:
    client = mlflow.MlflowClient(f"sqlite:///{run[0]}/mlruns/mlflow.db")
    version = client.get_model_version_by_alias("espalier-selector", "small")
    for entry in logs["by_batch"]:
        if (entry["batch"], entry["level"], entry["mixed"]) == (8, DRAFTER, True):
            value = f"{entry['selector_over_rule']['value']:.3f}"
    tag = "test/T0_8_different_requests/selector_with_the_drafters_hits/replayed_over_lookup_rule"
    assert version.tags[tag] == value


def test_there_is_an_entry_for_every_batch_size_level_and_kind_of_batch(
    run: tuple[Path, str], logs: dict[str, Any]
) -> None:
    """And all figures are in one table."""
    table = Table.read(run[0] / "runs/small/evaluation.parquet")
    cases_found = [(entry["batch"], entry["level"], entry["mixed"]) for entry in logs["by_batch"]]
    cases = [(1, False), (8, False), (32, False), (8, True), (32, True)]
    assert {(figure.batch, figure.is_mixed) for figure in table.figures} == set(cases)
    assert sorted(cases_found) == sorted(
        (b, level, m) for b, m in cases for level in (TEXT, DRAFTER)
    )
    for entry in logs["by_batch"]:
        assert set(entry["by_kind"]) == {"code", "prose"}
        for kind, gains_of in {"all": entry, **entry["by_kind"]}.items():
            over_rule = table.of(
                setting="T=0",
                batch=entry["batch"],
                is_mixed=entry["mixed"],
                kind=kind,
                method=selector_at(entry["level"]),
                rival=COPYING,
            )
            assert vars(over_rule.ratio) == gains_of["selector_over_rule"]
            assert gains_of["fixed"] > 0 and gains_of["rule"] > 0
            for other in ("rule", "fixed"):
                ratio = gains_of["selector"] / gains_of[other]
                assert gains_of[f"selector_over_{other}"]["value"] == pytest.approx(ratio)
            # the rule's decisions are charged, too
            charged = gains_of["charged_over_rule"]["value"]
            assert charged > 0 and 0 < gains_of["charged"] <= gains_of["selector"]
            assert ("one_length_over_fixed" in gains_of) == entry["mixed"]
            if not entry["mixed"]:
                best = max(gains_of[name] for name in ("selector", "rule", "fixed"))
                assert gains_of["oracle"] >= best


def test_what_is_printed_says_what_is_gained_and_where_it_is(run: tuple[Path, str]) -> None:
    folder, output = run
    advice = re.search(r"What to do, by requests in a step: 1: .*; 32 and more: .*\.", output)
    assert advice or "requests in a step: 1 and more: " in output
    assert "T=0, 32 different requests: " in output and " of the engine's own n-grams" in output
    assert "batch 32: " not in output  # of equal texts
    again = espalier(folder, "logs", *arguments(folder), config="")
    assert "reusing" in again and "T=0, batch 1: " in again


def test_the_logs_own_arrivals_are_served_at_several_loads(
    run: tuple[Path, str], logs: dict[str, Any]
) -> None:
    """The more of them come, the longer each waits, and the more tokens are made."""
    assert "1 times the log's arrivals, 10.26 requests/s: plain decoding" in run[1]
    by_method: dict[str, list[dict[str, Any]]] = {}
    for row in logs["arrivals"]:
        by_method.setdefault(row["method"], []).append(row)
    assert {PLAIN, COPYING, FIXED, *map(selector_at, LEVELS)} <= by_method.keys()
    for rows in by_method.values():
        assert [row["load"] for row in rows] == [1, 2, 4]
        for name in ("latency", "latency_95", "tokens_per_second", "requests"):
            assert rows[0][name] < rows[2][name], name
        assert all(row["latency"] < row["latency_95"] for row in rows)
    speeds = {method: rows[2]["latency"] for method, rows in by_method.items()}
    assert speeds[PLAIN] > speeds[FIXED]


def arguments(folder: Path, log: str = "small.jsonl", name: str = "small") -> list[str]:
    return [str(folder / log), "--timings", str(folder / "clock.csv"), "--name", name, *SMALL]


@pytest.mark.parametrize("batch", [1, 8, 20, 32])
def test_one_artefact_decides_for_every_batch_size_and_level(
    run: tuple[Path, str], selector: Selector, batch: int
) -> None:
    text = read_logs([run[0] / "small.jsonl"])[3]
    root = DrafterKnowledge(text.tokens[: text.start], GREEDY, selector.tokens, batch)
    root.committed(text.tokens[text.start : text.start + 30], [1.0, 0.0] * 15)
    for level in (TEXT, DRAFTER):
        asked = selector.at(0.0, batch=batch, level=level)
        assert asked.setting.level == level and asked.setting.batch == min(
            (1, 8, 32), key=lambda b: abs(np.log2(b / batch))
        )
        features = root.features(level)
        alone = asked.select(features)
        assert alone in selector.actions
        assert selector.select(features) == alone, "by the scalars `batch` and `temperature`"
        jointly = asked.select_jointly([features] * batch)
        assert len(jointly) == batch and len(set(jointly)) == 1, "equal requests decide alike"
        assert selector.scores(features).shape == (len(selector.actions),)


def test_joint_decisions_are_those_that_replay_takes_by_the_trained_network(
    run: tuple[Path, str], selector: Selector
) -> None:
    module = SelectorModule.load_from_checkpoint(
        run[0] / "runs/small/training/regressor-drafter/best.ckpt", map_location="cpu"
    ).eval()
    texts = read_logs([run[0] / "small.jsonl"])[:8]
    data = with_features(Labeller("head", selector.space, GREEDY).table(texts), selector.tokens)
    rows = [int(begin) + 7 for begin in data.size_X.cumsum(0) - data.size_X]
    features_of_rows = [{SCALARS_KEY: data.scalars_RF[row]} for row in rows]
    setting = selector.at(0.0, batch=8, level=DRAFTER).setting
    for speed in (100.0, 400.0, 1600.0):
        asked = Policy(
            replace(setting, feature_levels=(DRAFTER,), rule=None, joint=speed, allowed=()),
            selector,
        )
        chosen = asked.select_jointly(features_of_rows)
        prices = selector.latency.step_times(8).prices(float(data.length_R[rows].float().mean()), 8)
        tokens_BA = module.scores(data)[rows].double().numpy()
        expected = joint_choice(tokens_BA, Shapes.of(selector.actions), speed, *prices)
        assert chosen == [selector.actions[a] for a in expected]
        few = Policy(replace(asked.setting, allowed=(0, 3)), selector).select_jointly(
            features_of_rows
        )
        assert set(few) <= {selector.actions[0], selector.actions[3]}
    assert asked.select_jointly([]) == []


def test_its_card_says_what_it_is_and_generate_refuses_it(
    run: tuple[Path, str], selector: Selector, pair: ModelPair
) -> None:
    folder = run[0] / "runs/small/selector"
    card = (folder / "README.md").read_text()
    assert "the drafter `head`" in card and "custom_generate" not in card
    assert "selector.at(temperature=0.0, top_p=1.0)" in card and "temperature=1.0" not in card
    assert "steps of 1, 8, 32 requests" in card and "`batch` chooses the setting" in card
    with pytest.raises(InputError, match="trained on an engine's log"):
        pair.target.generate(
            torch.tensor([[5]]),
            custom_generate=speculative_generate,
            draft_model=pair.draft,
            selector=selector,
        )


def test_a_log_of_steps_gives_a_selector_and_says_what_it_does_not_tell(tmp_path: Path) -> None:
    """The log says nothing of drafts of more than three tokens. Every error is larger by what the
    bounds of the labels make of the gain."""
    small(tmp_path, 1)
    entries = [as_steps(record(n, kind="prose" if n % 2 else "code")) for n in range(40)]
    write(tmp_path / "sparse.jsonl", entries)
    output = espalier(tmp_path, "logs", *arguments(tmp_path, "sparse.jsonl", "sparse"), config="")
    selector = load_selector(tmp_path / "runs/sparse/selector")
    assert selector.space.depth == 3 and len(selector.tokens.keys_N) > 0
    assert "steps do not tell" in output and "in one step of ten" in output
    contents = evaluation_of(tmp_path, "sparse")["logs"]
    steps = contents["steps"]
    assert contents["exported"] and not steps["is_told"]
    assert 0 == steps["low"] < steps["again"] < steps["high"] < 1 and 0 < steps["unknown"] < 0.3
    assert len(contents["accepted"]["test"]) == 3


def test_a_profile_of_another_drafter_is_refused(run: tuple[Path, str], selector: Selector) -> None:
    folder = run[0] / "runs/small/selector"
    assert selector.latency.pair == selector.config.pair["fingerprint"] == "log:head"
    elsewhere = replace(selector.latency, device="another machine")
    assert load_selector(folder, latency=elsewhere).latency == elsewhere
    with pytest.raises(InputError, match="measured with another pair"):
        load_selector(folder, latency=replace(elsewhere, pair="log:other"))


def test_a_pause_of_the_machine_is_in_no_decisions_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of its rounds takes a second longer."""
    log, timings = small(tmp_path)
    config = load_config(None, ["name=x", f"logs.files=['{log}']"])
    source = source_of(config)
    assert isinstance(source, LogSource)
    profile = profile_of(read_timings(timings), "clock", False, source.fingerprint, [VERIFIER])
    paused = cycle([1.0, *[0.0] * (decisions.ROUNDS - 1)])
    timed = decisions._step_seconds
    monkeypatch.setattr(decisions, "_step_seconds", lambda *step: timed(*step) + next(paused))
    batches = decisions.with_decisions(config, source, profile).batches
    assert batches is not None and len(batches.decide) == 3
    assert max(max(seconds.values()) for seconds in batches.decide) < 1


def test_without_step_times_accepted_lengths_are_told(tmp_path: Path) -> None:
    """And what is left out."""
    log = write(tmp_path / "dirty.jsonl", [*(record(n) for n in range(40)), {"id": "no text"}])
    output = espalier(tmp_path, "logs", str(log), "--name", "timeless", *SMALL, config="")
    assert "No step times were given" in output and "Accepted of a chain of 8" in output
    assert "data: 1 of 41 lines" in output
    assert not (tmp_path / "runs/timeless/selector").exists()
    for split, accepted in evaluation_of(tmp_path, "timeless")["logs"]["accepted"].items():
        assert len(accepted) == 8 and sorted(accepted) == accepted, split


def test_lookups_alone_are_a_choice(tmp_path: Path) -> None:
    """With the step times of a server's traffic; one without a drafter is twice as fast with four
    requests."""
    small(tmp_path)
    steps = [step for step in recorded(9000) if step["passes"] == 0 and step["batch"] in (1, 4)]
    for batch, seconds in ((1, 0.03), (4, 0.012)):
        plain = {"batch": batch, "context": 500, "verified": 1, "passes": 0, "drafter": False}
        steps.append({**plain, "seconds": seconds})
    timings = write(tmp_path / "steps.jsonl", steps)
    line = arguments(tmp_path, name="copies")
    line[line.index(str(tmp_path / "clock.csv"))] = str(timings)
    output = espalier(tmp_path, "logs", *line, "logs.drafter=none", config="")
    assert "held-out steps of 1 requests, drafting:" in output
    assert "4 and more: serve without a drafter" in output
    assert "token ids alone" in output and "drafter's hits" not in output, "there is no drafter"
    entries = evaluation_of(tmp_path, "copies")["logs"]["by_batch"]
    assert all(entry["fixed_length"] == 0 and entry["fixed"] <= 1 for entry in entries)
    line = [f"logs.files=['{tmp_path}/small.jsonl']", "logs.drafter=none", "name=copies", *SMALL]
    line += [f"latency.timings={timings}", "--engine", "vllm"]
    code, output = outcome(tmp_path, "export", *line, config="llama_eagle3.yaml")
    assert code == 2 and "export.engine: the log has no drafter" in output
    folder = tmp_path / "runs/copies/selector"
    assert [action.nodes for action in load_selector(folder).actions] == list(range(21))
    card = (folder / "README.md").read_text()
    assert "Serve 4 requests without a drafter" in card and "Serve 1 request" not in card


def test_the_shipped_config_runs_and_a_held_out_file_is_the_test_split(tmp_path: Path) -> None:
    log, _ = small(tmp_path, 16)
    other = write(tmp_path / "other.jsonl", [record(100 + n, kind="other") for n in range(5)])
    timings = ROOT / "configs/clocks/h100_llama3.1-8b_eagle3.csv"
    line = [f"logs.files=['{log}']", f"logs.test=['{other}']", f"latency.timings={timings}", *SMALL]
    assert "batch 128" in espalier(tmp_path, "logs", *line, config="llama_eagle3.yaml")
    assert "train: reusing" in espalier(tmp_path, "train", *line, config="llama_eagle3.yaml"), (
        "a stage by itself"
    )
    contents = evaluation_of(tmp_path, "llama_eagle3")["logs"]
    assert (
        contents["texts"]["test"] == 5
        and contents["texts"]["train"] + contents["texts"]["validation"] == 16
    )
    assert all(set(entry["by_kind"]) == {"other"} for entry in contents["by_batch"])
    line += ["--engine", "vllm"]
    code, output = outcome(tmp_path, "export", *line, config="llama_eagle3.yaml")
    assert code == 2 and "add pair.target=NAME pair.draft=NAME" in output
    line += ["pair.target=org/large", "pair.draft=org/head", "export.drafter=eagle3"]
    espalier(tmp_path, "export", *line, config="llama_eagle3.yaml")
    folder = tmp_path / "runs/llama_eagle3/engines/vllm"
    settings = json.loads((folder / "temperature-0.json").read_text())
    assert (settings["method"], settings["model"]) == ("eagle3", "org/head")
    predicted = json.loads((folder / "temperature-0.prediction.json").read_text())
    lengths = settings["num_speculative_tokens_per_batch_size"]
    assert (lengths[0][0], lengths[-1][1]) == (1, predicted[-1]["batch"])
    assert max(length for *_, length in lengths) == settings["num_speculative_tokens"] <= 8
    assert "Copies beside the head's chains" in (folder / "README.md").read_text()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([], "logs.files: name at least one log"),
        (["none.jsonl"], "none.jsonl: No such file"),
        (["one.jsonl", "--timings", "clock.csv"], "too few"),
        (["small.jsonl", "--timings", "none.csv"], "none.csv"),
        (["small.jsonl", "--test", "small.jsonl"], "is among files, too"),
        (["pipe"], "pipe: a pipe, no file"),  # empty once it is read, so another would pass for it
        (["small.jsonl", "--timings", "pipe"], "pipe: a pipe, no file"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    line: list[str], message: str, tmp_path: Path
) -> None:
    small(tmp_path)
    write(tmp_path / "one.jsonl", [record(1)])
    os.mkfifo(tmp_path / "pipe")
    code, output = outcome(tmp_path, "logs", *line, config="")
    assert code == 2 and message in output and len(output.strip().splitlines()) == 1, output
    assert not (tmp_path / "runs").exists()


def test_a_pairs_traces_give_the_same_speeds_as_a_log(
    demo: tuple[Path, str], tmp_path: Path
) -> None:
    """Tokens, seconds and steps of every chain, and what lookups have right."""
    folder = demo[0] / "runs/demo/traces"
    with pytest.raises(InputError, match=r"no texts of temperature 0\.7"):
        read_trace_log(folder, Sampling(0.7))
    _, timings = small(tmp_path, 1)
    space = ActionSpace.chains(ActionSpace.default().depth, 4)
    table = Labeller("draft", space, GREEDY).table(read_trace_log(folder, GREEDY))
    data = replace(with_features(table), space=space)
    verifiers = (VERIFIER, "specinfer")
    times = profile_of(read_timings(timings), "clock", False, "log:draft", verifiers).at_batch(8)
    parts = [read_texts(folder, split, ["specinfer"]).of_sampling(GREEDY) for split in SPLITS]
    assert sum(map(len, parts)) == len(data)

    def totals(timed: Timed) -> torch.Tensor:
        actions = [timed.space.index(timed.space.chain(n)) for n in range(space.depth + 1)]
        return torch.stack([columns_XA.sum(0)[actions] for columns_XA in StaticTable.of(timed)])

    of_pair = sum(totals(Timed(part, "specinfer", times)) for part in parts)
    assert torch.allclose(totals(Timed(data, VERIFIER, times)), of_pair, rtol=1e-5)
    in_log = sorted(data.lookup_R.tolist())
    in_pair = sorted(torch.cat([part.lookup_R for part in parts]).clamp(max=4).tolist())
    assert in_log == in_pair
