"""From a log to an artefact and a report, through the command line; and a stronger rule than the
lookup rule."""

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
from pipelines.evaluate import gains
from pipelines.evaluate.gains import FIXED, LEVELS, selector_at
from pipelines.evaluate.methods import COPYING, PLAIN
from pipelines.evaluate.table import Figure, Table
from pipelines.latency import decisions
from pipelines.latency.timings import profile_of, read_timings
from pipelines.pair.log import DRAFTING_LEAD, LogSource
from pipelines.pair.source import source_of
from pipelines.train import judging
from pipelines.train.judging import judge_jointly, keep_if_ahead
from pipelines.train.result import Case
from selector import latency
from selector.actions import EMPTY, ActionSpace
from selector.decision import Setting
from selector.runtime.joint import Shapes, joint_choice
from selector.runtime.selector import Policy, Selector, load_selector
from selector.schema import DRAFTER, LOG, SCALARS_KEY, TEXT, InputError
from selector.train.data import SPLITS, Timed
from selector.train.mixed import MixedBatches
from selector.train.module import SelectorModule
from selector.train.replay import Ratio
from selector.train.tuning import (
    Judged,
    StaticTable,
    best_static,
    decide,
    judge_setting,
    tune_lookup_rule,
    tune_setting,
)
from tests.pipelines.runs import ROOT, espalier, evaluation_of, outcome
from tests.pipelines.small_logs import as_steps, record, recorded, small, write
from tests.selector import logged

SMALL = ["train.epochs=2", "train.hidden=[16,8]", "train.batch=128"]
GREEDY = Sampling(0.0)
PROFILE = logged.profile()


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


def led_rules(
    train: Timed,
    validation: Timed,
    fixed: Setting,
    profile: latency.LatencyProfile = PROFILE,
) -> list[Judged]:
    rules, copies = (
        judging.judge_rules([train], [validation], [fixed], profile, drafts)
        for drafts in (True, False)
    )
    return judging.drafting_where_ahead(rules, copies, DRAFTING_LEAD)


@pytest.mark.parametrize("batch", [1, 4])
def test_a_rule_is_kept_where_it_is_surely_ahead_of_a_server_without_a_drafter(batch: int) -> None:
    """The drafter itself takes no time, or much, or it is not known how much a step takes."""
    train, validation = (logged.timed(batch, seed=seed, count=24) for seed in range(2))
    fixed = best_static(train, StaticTable.of(train))
    certain = logged.profile()
    assert certain.batches is not None
    (rule,) = led_rules(train, validation, fixed)

    def kept(profile: latency.LatencyProfile) -> Setting:
        return judging.unless_plain(rule, validation, fixed, profile).setting

    assert kept(certain) == rule.setting and rule.setting.rule is not None
    without = [certain.at_batch(size).target.at(100, 1) - 4e-3 for size in (1, 4)]
    costly = latency.Table([100], [1, 4], [without])
    assert kept(replace(certain, plain=costly)) == replace(fixed, action=EMPTY)
    draws = []
    for token in (0.0, 5e-3):
        target = [
            replace(table, seconds=[[row[0], row[0] + 63 * token] for row in table.seconds])
            for table in certain.batches.target
        ]
        draws.append(replace(certain.batches, target=target))
    assert kept(replace(certain, draws=[draws[0]] * 4)) == rule.setting
    assert kept(replace(certain, draws=draws)) == replace(fixed, action=EMPTY)


def test_a_network_that_knows_what_comes_decides_alone_and_jointly() -> None:
    """Unless its decisions take as long as a step."""
    train, validation, test = (logged.timed(4, seed=seed, count=24) for seed in range(3))
    predictions_of = [
        dict.fromkeys(LOG.levels, timed_texts.space.efficiencies(timed_texts.survivals_RS))
        for timed_texts in (validation, test)
    ]
    fixed = best_static(train, StaticTable.of(train))
    (rule,) = led_rules(train, validation, fixed)
    batches = MixedBatches(train, logged.profile(), 4)
    tuned, alike = (
        batches.replay(decide(train, {}, setting).action_R)
        for setting in (rule.setting, tune_lookup_rule(train, fixed))
    )
    assert tuned.speed >= alike.speed  # as if all requests had the same text
    cases = {}
    for level, efficiency_RA in predictions_of[0].items():
        slow = validation.on(logged.profile(5e-3).at_batch(4), 4)
        alone = tune_setting(slow, {level: efficiency_RA}, fixed)
        network, _ = judge_jointly(slow, efficiency_RA, alone, rule, fixed, logged.profile())
        assert keep_if_ahead(network, rule, fixed).setting.decider == "rule"
        alone = tune_setting(validation, {level: efficiency_RA}, fixed)
        network, common = judge_jointly(
            validation, efficiency_RA, alone, rule, fixed, logged.profile()
        )
        setting = replace(keep_if_ahead(network, rule, fixed).setting, level=level)
        cases[level] = Case(setting, fixed, rule.setting, network.ratio, rule.ratio, common)
        assert setting.decider == "network" and setting.level == level and setting.joint > 0
    table = Table(gains.measured(cases, test, predictions_of[1], logged.profile()))
    gain_entries = list(gains.entries(table, cases))
    assert [(entry["level"], entry["mixed"]) for entry in gain_entries] == [
        (level, m) for m in (False, True) for level in LOG.levels
    ]
    for gain in (part for entry in gain_entries for part in (entry, *entry["by_kind"].values())):
        assert gain["selector"] > max(gain["rule"], gain["fixed"])


def test_one_length_for_all_is_charged_for_its_network_where_a_rule_is_exported() -> None:
    """Decisions take longer than a step."""
    data = logged.timed(4, count=24)
    fixed = best_static(data, StaticTable.of(data))
    rule = tune_lookup_rule(data, fixed)
    even = Ratio(1.0, 0.0)
    cases = {TEXT: Case(replace(rule, level=TEXT), fixed, rule, even, even, common=400.0)}
    predicted = {TEXT: data.space.efficiencies(data.survivals_RS)}
    speeds: dict[str, list[float]] = {gains.ONE_LENGTH: [], gains.CHARGED: []}
    for seconds in (0.0, 5e-3):
        slow = data.on(logged.profile(seconds).at_batch(4), 4)
        table = Table(gains.measured(cases, slow, predicted, logged.profile()))
        for name, values in speeds.items():
            columns = {"setting": "T=0", "batch": 4, "is_mixed": True, "kind": "all"}
            figure = table.of(method=selector_at(TEXT) + name, rival=PLAIN, **columns)
            values.append(figure.value)
    fast, charged = speeds[gains.ONE_LENGTH]
    assert charged < 0.5 * fast and len(set(speeds[gains.CHARGED])) == 1


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


def test_errors_are_larger_by_what_other_labels_make_of_a_figure() -> None:
    figures = [Figure(method="a", value=1.1, low=1.0, high=1.2), Figure(method="b", value=2.0)]
    others = [[replace(f, value=f.value + by) for f in figures] for by in (0.05, -0.2)]
    wide, open_figure = gains.widened(figures, others)
    assert (wide.value, wide.low, wide.high) == pytest.approx((1.1, 0.8, 1.4))
    assert open_figure == figures[1] and gains.widened(figures, []) == figures


def test_of_many_kinds_of_work_the_commonest_are_told_apart() -> None:
    data = logged.timed(count=60)
    kinds = [f"kind {number}" for number in range(30)]
    data.texts.kind_X = [*kinds, *kinds[:15], *kinds[:10], *kinds[:5]]
    fixed = replace(best_static(data, StaticTable.of(data)), level=TEXT)
    case = Case(fixed, fixed, fixed, Ratio(1.0, 0.0), Ratio(1.0, 0.0))
    figures = gains.measured({TEXT: case}, data, {}, logged.profile())
    told = Table(figures).kinds(method=COPYING)
    assert told[0] == "all" and len(told) == 1 + gains.MOST_KINDS == 21
    assert set(kinds[:15]) < set(told)


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


@pytest.mark.parametrize(("drafting", "drafts"), [(0.0, True), (1.3e-3, False)])
def test_a_model_drafts_in_a_log_only_where_it_is_clearly_ahead_of_copies_alone(
    drafting: float, drafts: bool
) -> None:
    """As step times lack some of what drafting costs: where it is ahead, but by less, it does
    not."""
    train, validation = (logged.timed(seed=seed, count=20) for seed in (1, 2))
    for data in (train, validation):
        data.texts.lookup_R.floor_divide_(4)
    train, validation = (
        replace(data, profile=replace(data.profile, drafting=latency.Table.constant(drafting)))
        for data in (train, validation)
    )
    (fixed,) = judging.statics([train])
    (rule,) = led_rules(train, validation, fixed, replace(train.profile, batches=None))
    drafted, alone = (
        judge_setting(validation, {}, tune_lookup_rule(train, fixed, drafts=drafts), fixed.action)
        for drafts in (True, False)
    )
    assert drafted.is_ahead_of(alone) and not alone.setting.action.drafts
    assert rule.setting == (drafted if drafts else alone).setting
    assert fixed.action.drafts
    if not drafts:
        # one that drafts as that rule does
        network = replace(drafted, setting=replace(fixed, feature_levels=(TEXT,)))
        assert (
            judging.keep_if_ahead(network, rule, fixed, times=DRAFTING_LEAD).setting == rule.setting
        )
