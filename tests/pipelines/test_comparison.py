"""From decoded prompts and replayed texts to the table of figures, to what is shown of it, and to
the verdict."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.config import Config
from pipelines.evaluate import table as tables
from pipelines.evaluate.gains import CHARGED, FIXED, NGRAMS, selector_at
from pipelines.evaluate.methods import (
    ASSISTED,
    AT_ROOT,
    BEST_STATIC,
    COPYING,
    NETWORK,
    PLAIN,
    SELECTOR,
    STATIC,
)
from pipelines.evaluate.table import DECODED, EFFICIENCY, SHARE, Figure, Table, sampling_name_of
from pipelines.evaluate.verdict import (
    Evaluation,
    losses,
    metrics,
    next_step,
    origins,
    verdicts,
)
from pipelines.evaluate.verdict import methods as shown_methods
from pipelines.export.stage import run as export
from pipelines.train.result import CASE, Case
from selector.actions import EMPTY, Action
from selector.decision import LookupRule, Setting
from selector.runtime.selector import load_selector
from selector.sampling import Sampling
from selector.schema import TEXT
from selector.train.replay import Ratio
from tests.pipelines.runs import demo_config
from tests.pipelines.test_pipeline import let_the_network_decide

TEMPERATURES = (1.0, 0.2)
TURNS = (0.5, 1.5)  # of two rounds the first is faster
ERROR = 0.01
CONFIG = demo_config(f"sampling=[{', '.join(f'{{temperature: {t}}}' for t in TEMPERATURES)}]")
SPEEDS = {
    PLAIN: 50.0,
    ASSISTED: 80.0,
    BEST_STATIC: 100.0,
    AT_ROOT: 110.0,
    COPYING: 120.0,
    SELECTOR: 125.0,
}
Rows = list[dict[str, Any]]


def rows(sources: int = 6, spread: float = 0.0) -> Rows:
    """Two prompts of each source, of two kinds, decoded in two rounds; all speeds vary by source
    alike."""
    rng = np.random.default_rng(0)
    result = []
    for temperature, source in product(TEMPERATURES, range(sources)):
        factor = 1 + spread * rng.standard_normal()
        for prompt, (method, speed) in product(range(2), SPEEDS.items()):
            is_observed = method != ASSISTED
            seconds = 60 / (speed * factor)
            result.append(
                {
                    "prompt": f"{source}-{prompt}",
                    "kind": ("code", "prose")[prompt],
                    "source": str(source),
                    "setting": sampling_name_of(temperature, 1.0),
                    "temperature": temperature,
                    "top_p": 1.0,
                    "method": method,
                    "verifier": "traversal",
                    "drafts": "(1, 4, 0)" if method == BEST_STATIC else "",
                    "tokens": 64,
                    "rounds": [[64, turn * 64 / (speed * factor)] for turn in TURNS],
                    "steps": 16,
                    "block_tokens": 66,
                    "seconds": seconds,
                    "select_seconds": seconds / 100 if method == SELECTOR else 0.0,
                    "drafted": [(1, 4, 0)] * 15 + [(1, 4, 0, "copy")] if is_observed else [],
                    "step_roots": list(range(0, 64, 4)) if is_observed else [],
                }
            )
    return result


def evaluated(data: Rows | None = None) -> Evaluation:
    """Of decoded rows, and of what replay says of all methods but transformers' own."""
    data = rows() if data is None else data
    figures = list(tables.figures(data))
    speeds = {**SPEEDS, NETWORK: 90.0}
    del speeds[ASSISTED]
    for temperature, (method, rival) in product(TEMPERATURES, permutations(speeds, 2)):
        ratio = Ratio(speeds[method] / speeds[rival], ERROR)
        sampling_name = sampling_name_of(temperature, 1.0)
        figures.append(Figure.of_ratio(ratio, setting=sampling_name, method=method, rival=rival))
    table = Table(figures)
    contents = {
        "summary": tables.summary(CONFIG, table, data),
        "methods": tables.entries(table, data),
        "replayed": [],
        "decisions": [
            Setting(sampling.build(), Action(1, 4, 0)).row() for sampling in CONFIG.sampling
        ],
    }
    return Evaluation(contents, table)


def test_ratios_are_to_the_tree_that_training_texts_promise_the_most_of() -> None:
    contents = evaluated().contents
    summary = contents["summary"]
    # not to the fastest one here
    assert summary["ratio_vs_best_static_delayed"] == pytest.approx(1.25)
    assert summary["ratio_vs_static_traversal_wall"] == pytest.approx(125 / 110)
    assert summary["ratio_vs_assisted_generation"] == pytest.approx(125 / 80)
    assert summary["selector_time_share"] == pytest.approx(0.01)
    for row, temperature in zip(summary["by_setting"], TEMPERATURES, strict=True):
        assert (row["temperature"], row["top_p"]) == (temperature, 1.0)
        assert row["wall_interval_95"] == pytest.approx([row["wall_ratio"]] * 2)
        assert row["wall_ratio"] == row["replay_ratio"] == pytest.approx(1.25)
        assert row["replay_error"] == pytest.approx(ERROR)
    first = contents["methods"][0]
    # tokens beyond the limit do not count
    assert (first["method"], first["block_efficiency"]) == (PLAIN, 64 / 16)
    assert (first["prompts"], first["tokens"]) == (12, 12 * 64)
    assert len(contents["methods"]) == 2 * len(SPEEDS)


def test_a_rival_that_is_slower_than_plain_decoding_under_one_setting_is_seen_there() -> None:
    """Assisted generation at half the speed of plain decoding at T = 1, and thrice it at T = 0.2:
    means hide it."""
    data = rows()
    for row in data:
        if row["method"] == ASSISTED:
            speed = 25 if row["temperature"] == 1 else 150
            row["rounds"] = [[64, turn * 64 / speed] for turn in TURNS]
    evaluation = evaluated(data)
    mean = (5 + 125 / 150) / 2
    assert evaluation.contents["summary"]["ratio_vs_assisted_generation"] == pytest.approx(mean)
    for sampling_name, slow, over_it in (("T=1", "0.50", "5.000"), ("T=0.2", "3.00", "0.833")):
        by_method = {
            row["method"].split(" (")[0]: row for row in shown_methods(evaluation)[sampling_name]
        }
        cells = by_method[ASSISTED]
        assert cells["decoded"] == f"{slow} [{slow}, {slow}]"
        assert cells["selector over it, decoded"] == f"{over_it} [{over_it}, {over_it}]"
        assert cells["selector over it, replayed"] == cells["replayed"] == ""
        assert by_method[BEST_STATIC]["selector over it, replayed"] == "1.250 ±0.010"
        assert by_method[BEST_STATIC]["replayed"] == "2.00 ±0.01"
    logged = metrics(evaluation)
    name = f"decoded_over_{ASSISTED.replace(' ', '_')}/T 0.2 top-p 1"
    assert logged[name] == pytest.approx(125 / 150)
    assert logged["exported_ratio"] == pytest.approx(1.25)


def test_rounds_and_prompts_are_compared_each_with_its_own() -> None:
    """By hand, with two rounds of one prompt and of another: (2 * 8)^(1/2) and (1 * 4)^(1/2), in
    any order."""
    ours = [
        {"prompt": "a", "source": "a", "rounds": [[2, 2], [4, 4]]},
        {"prompt": "b", "source": "b", "rounds": [[2, 6], [4, 8]]},
    ]
    others = [
        {"prompt": "b", "source": "b", "rounds": [[2, 6], [2, 16]]},
        {"prompt": "a", "source": "a", "rounds": [[2, 4], [2, 16]]},
    ]
    logs_XR = tables.log_ratios(ours, others)
    value = tables.paired_figure(ours, logs_XR, method=SELECTOR).value
    assert value == pytest.approx(math.sqrt(4 * math.sqrt(1 * 4)))


def test_shares_are_of_all_tokens_up_to_the_limit() -> None:
    """Of a tree, a lookup of which nothing is accepted, plain decoding, and a tree that was cut at
    the limit."""
    row: dict[str, Any] = {"tokens": 7, "step_roots": [0, 3, 4, 5], "block_tokens": 9}
    row["drafted"] = [(2, 1, 3), (1, 4, 0, "copy"), (1, 0, 0), (1, 4, 0)]
    copy = {"tokens": 5, "drafted": [(1, 4, 0, "copy")], "step_roots": [0], "block_tokens": 5}
    assert tables.shares([row]) == {"drafted": 4 / 7, "copied": 0, "target": 3 / 7}
    assert tables.shares([row, copy]) == pytest.approx(
        {"drafted": 4 / 12, "copied": 4 / 12, "target": 4 / 12}
    )


def test_what_the_tokens_came_from_is_told_by_kind() -> None:
    """Fifteen steps accept three drafted tokens each; the last one copies more than there is room
    for."""
    evaluation = evaluated()
    cells = {"drafted": "70%", "copied": "6%", "target": "23%"}
    cells |= {"over plain": "2.50 [2.50, 2.50]", "over the rule": "1.04 [1.04, 1.04]"}
    kinds = ("all", "code", "prose")
    assert origins(evaluation) == [
        {"setting": t, "prompts": kind, **cells} for t in ("T=1", "T=0.2") for kind in kinds
    ]
    # its steps cannot be observed
    columns = {"setting": "T=1", "method": ASSISTED, "basis": DECODED}
    assert evaluation.table.get(**columns, statistic=SHARE + "drafted") is None


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    """A single source leaves bounds open; what is counted has none."""
    table = evaluated(rows(sources=1, spread=0.1)).table
    columns = {"setting": "T=1", "method": PLAIN, "basis": DECODED}
    assert table.of(**columns, statistic=EFFICIENCY).low is None
    assert table.of(**columns).high is None
    figures = [*table.figures, Figure(method="a", batch=8, is_mixed=True, value=0.5)]
    for written in (figures, []):
        Table(written).write(tmp_path / "evaluation.parquet")
        assert Table.read(tmp_path / "evaluation.parquet").figures == written


def test_a_figure_whose_error_is_not_known_stands_alone() -> None:
    assert Figure.of_ratio(Ratio(1.234, math.inf), method=SELECTOR).text() == "1.23"


TREE = Setting(Sampling(0.2, 0.9), Action(1, 6, 0))
SETTINGS = {
    NETWORK: replace(TREE, feature_levels=("early", "light"), rule=LookupRule(4, 8), longest=175),
    COPYING: replace(TREE, rule=LookupRule(4, 8)),
    STATIC: TREE,
    PLAIN: replace(TREE, action=EMPTY),
}
SETTING = "T=0.2, top-p=0.9"
Interval = tuple[float, float | None, float | None]


def evaluation_where(
    exported: str,
    decoded_speed: Interval = (2.45, 2.1, 2.9),
    over_rule: Interval = (1.04, 0.99, 1.09),
    **other: float,
) -> Evaluation:
    """An evaluation of one sampling setting; `other` replaces replayed speeds over plain
    decoding."""
    speeds = {BEST_STATIC: 1.8, COPYING: 2.4, NETWORK: 2.5}
    speeds |= {name.replace("_", " "): speed for name, speed in other.items()}
    speeds[SELECTOR] = {STATIC: speeds[BEST_STATIC], PLAIN: 1.0, **speeds}[exported]
    figures = []
    for name, speed in speeds.items():
        ratio = Ratio(speed, 0.04)
        figures.append(Figure.of_ratio(ratio, setting=SETTING, method=name, rival=PLAIN))
    measured = {PLAIN: decoded_speed, COPYING: over_rule, BEST_STATIC: (1.2, 1.1, 1.3)}
    for rival, (value, low, high) in measured.items():
        columns = {"setting": SETTING, "method": SELECTOR, "rival": rival, "basis": DECODED}
        figures.append(Figure(**columns, value=value, low=low, high=high))
    summary = {"by_setting": [{"temperature": 0.2, "top_p": 0.9}]}
    return Evaluation({"summary": summary, "decisions": [SETTINGS[exported].row()]}, Table(figures))


@pytest.mark.parametrize(
    ("evaluation", "words"),
    [
        (evaluation_where(NETWORK), "is 2.50 ±0.04 times"),
        (evaluation_where(NETWORK), "and 2.45 [2.10, 2.90]"),
        (evaluation_where(NETWORK, (1.9, None, None)), "and 1.90 times"),
        (
            evaluation_where(NETWORK, lookup_rule=2.6),
            "lookup rule is faster in replay: 2.60 ±0.04 times.",
        ),
        (evaluation_where(COPYING, network=2.3), "lookup rule is exported. It is 2.40 ±0.04 times"),
        (evaluation_where(STATIC), "static tree is exported. It is 1.80 ±0.04 times"),
        (
            evaluation_where(COPYING, (0.8, 0.7, 0.9)),
            "A LOSS, so plain decoding is exported: the lookup rule",
        ),
        (evaluation_where(PLAIN), "nothing was surely faster. The network is faster"),
        (
            evaluation_where(NETWORK, over_rule=(1.06, 1.01, 1.11)),
            "rule is there (1.060 [1.010, 1.110])",
        ),
        (evaluation_where(NETWORK), "rule cannot be told from none (1.040 [0.990, 1.090])"),
        (
            evaluation_where(NETWORK, over_rule=(0.9, 0.85, 0.95)),
            "rule is a loss (0.900 [0.850, 0.950])",
        ),
        (evaluation_where(NETWORK, over_rule=(1.0, 1.0, 1.0)), "rule is zero (both decode alike)"),
        (evaluation_where(NETWORK, over_rule=(1.1, None, None)), "rule has no interval (1.100)"),
    ],
)
def test_what_is_exported_is_told_with_what_is_faster(evaluation: Evaluation, words: str) -> None:
    """By a single source there is no interval; no selector is praised that loses."""
    advice, verdict = verdicts(evaluation)
    assert advice.startswith(f"What to do: {SETTING}: ")
    assert verdict.startswith(f"{SETTING}: ") and words in verdict
    assert verdict.endswith("best static tree is there (1.200 [1.100, 1.300]).")
    assert bool(losses(evaluation)) == ("A LOSS" in verdict)


@pytest.mark.parametrize(
    ("evaluation", "advice"),
    [
        (evaluation_where(NETWORK), "let the network decide, 2.45 [2.10, 2.90] times plain"),
        (
            evaluation_where(COPYING, (0.98, 0.9, 1.06)),
            "copy 8 after a match of 4, else draft 6, 0.98 [0.90, 1.06] times plain decoding "
            "(WARNING: not faster).",
        ),
        (evaluation_where(STATIC), "draft 6, 2.45 [2.10, 2.90] times plain decoding."),
        (evaluation_where(STATIC, (0.8, 0.7, 0.9)), "decode plainly."),
        (evaluation_where(PLAIN), "decode plainly."),
    ],
)
def test_a_verdict_begins_with_what_to_do(evaluation: Evaluation, advice: str) -> None:
    """And says so where that is not faster than plain decoding."""
    assert verdicts(evaluation)[0].startswith(f"What to do: {SETTING}: {advice}")


def test_plain_decoding_is_called_so_and_equal_methods_share_a_row() -> None:
    """Where the best static tree drafts nothing, and where the selector is the lookup rule."""
    data = rows()
    for row in data:
        if row["method"] == BEST_STATIC:
            row["drafts"] = "draft nothing"
            row["rounds"] = [[64, turn * 64 / SPEEDS[PLAIN]] for turn in TURNS]
        elif row["method"] == PLAIN:
            row["drafts"] = "draft nothing"
        elif row["method"] in (COPYING, SELECTOR):
            row["drafts"] = "copy 8 after a match of 2, else draft nothing"
            row["rounds"] = [[64, turn * 64 / SPEEDS[COPYING]] for turn in TURNS]
    evaluation = evaluated(data)
    shown = {row["method"]: row for row in shown_methods(evaluation)["T=1"]}
    assert len(shown) == len(SPEEDS) - 2
    assert list(next(iter(shown.values())))[:2] == ["method", "tokens/s"]
    plain = shown[f"{PLAIN} = {BEST_STATIC} (traversal)"]
    assert plain["tokens/s"] == "58 [58, 58]" and plain["decoded"] == "1.00 [1.00, 1.00]"
    both = shown[f"{COPYING} (traversal) = {SELECTOR} (traversal)"]
    assert both["selector over it, decoded"] == "1.000 [1.000, 1.000]"
    figures = evaluation_where(COPYING, best_static_tree=1.0).table.figures
    same = {"value": 1.0, "low": 1.0, "high": 1.0}
    equal = [
        replace(figure, **same) if figure.method == BEST_STATIC else figure for figure in figures
    ]
    evaluation = replace(evaluation_where(COPYING), table=Table(equal))
    assert "and over plain decoding is there (1.200" in verdicts(evaluation)[1]


GREEDY = Setting(Sampling(0), Action(1, 4, 0), level=TEXT)
RULE = replace(GREEDY, rule=LookupRule(3, 8))


def logs_where(
    settings: dict[int, Setting], over_plain: tuple[float, float] = (1.5, 0.01)
) -> Evaluation:
    """An evaluation of a log by batch size. A network is 1% faster than the rule, and all else is
    as fast as the selector."""
    figures = []
    cases = []
    for batch, setting in settings.items():
        setting = replace(setting, batch=batch)
        even = Ratio(1.0, 0.0)
        case = Case(setting, setting.static_only(), replace(RULE, batch=batch), even, even)
        cases.append(json.loads(CASE.dump_json(case)))
        ratios = {PLAIN: Ratio(*over_plain), NGRAMS: Ratio(1.0, 0.0), FIXED: Ratio(1.0, 0.0)}
        ratios[COPYING + CHARGED] = Ratio(1.01, 0.002)
        columns = {"setting": "T=0", "batch": batch, "is_mixed": batch > 1}
        columns["method"] = selector_at(TEXT) + CHARGED
        for rival, ratio in ratios.items():
            figures.append(Figure.of_ratio(ratio, rival=rival, **columns))
    logs = {
        "drafter": "head",
        "texts": {"train": 60, "test": 20},
        "roots": {"test": 900},
        "accepted": {"train": [], "test": []},
        "steps": None,
        "arrivals": [],
        "doubt": "",
        "exported": False,
        "why": "",
        "cases": cases,
    }
    return Evaluation({"logs": logs, "summary": None}, Table(figures))


def test_a_logs_verdict_begins_with_what_to_do_by_batch_size() -> None:
    """Its selector is said to be a loss where it is slower than plain decoding, decisions charged,
    and plain decoding is exported there."""
    network = replace(GREEDY, feature_levels=(TEXT,))
    three, two, none = (replace(GREEDY, action=Action(1, n, 0)) for n in (3, 2, 0))
    settings = {1: network, 8: GREEDY, 16: three, 32: three, 64: two, 128: two}
    first, _, *lines = verdicts(logs_where(settings))
    assert first == (
        "What to do, by requests in a step: 1: the network (token ids alone), +1.0% over the "
        "lookup rule; 8: draft 4; 16 to 32: draft 3; 64 and more: draft 2."
    )
    rule = "lookup rule (copy 8 after a match of 3, else draft 4)"
    assert lines[1] == (
        "T=0, 8 different requests: draft 4. With its decisions, 1.500 ±0.010 times plain decoding,"
        f" 1.010 ±0.002 of the {rule}, 1.000 ±0.000 of the {NGRAMS} (copy 8 after a match of 3, "
        "else draft 4)."
    )
    assert losses(logs_where(settings)) == []
    longer = replace(RULE, rule=LookupRule(3, 8, longer=((6, 16),)))
    assert verdicts(logs_where({1: longer}))[0].endswith(
        "1: copy 8 after a match of 3, 16 after one of 6, else draft 4."
    )
    doubtful = logs_where({1: RULE}, (0.97, 0.02))
    assert "0.970 ±0.020 times plain decoding (WARNING: not faster on" in verdicts(doubtful)[2]
    assert losses(doubtful) == []
    lost = logs_where({1: RULE, 8: none}, (0.97, 0.01))
    assert losses(lost) == ["T=0, batch 1, text", "T=0, batch 8, text"]
    assert verdicts(lost)[0] == (
        "What to do, by requests in a step: 1: serve without a drafter, because drafting is a "
        "loss; 8 and more: serve without a drafter, because no draft surely pays."
    )


def test_plain_decoding_is_exported_where_decoding_shows_a_loss(
    copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = let_the_network_decide(monkeypatch)
    evaluation = Evaluation.read(config)
    figures = []
    for figure in evaluation.table.figures:
        if (figure.method, figure.rival, figure.basis) == (SELECTOR, PLAIN, DECODED):
            figure = replace(figure, value=0.8, low=0.7, high=0.9)
        figures.append(figure)
    lost = replace(evaluation, table=Table(figures))
    monkeypatch.setattr(Evaluation, "read", lambda _: lost)
    (copy / "runs/demo/stages/export.json").unlink()
    export(config)
    settings = load_selector(copy / "runs/demo/selector").settings
    assert {(setting.decider, setting.action) for setting in settings} == {("static", EMPTY)}


def test_the_next_step_is_named(inside: Path) -> None:
    config = Config.model_validate({"name": "x", "sampling": [{"temperature": 0.2, "top_p": 0.9}]})
    advice, program = next_step(config, evaluation_where(PLAIN))
    assert advice.startswith("Decode without a draft") and not program
    assert next_step(config, evaluation_where(NETWORK)) == (
        "`espalier export` packages the selector.",
        "",
    )
    folder = inside / "runs" / "x" / "selector"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    advice, program = next_step(config, evaluation_where(NETWORK))
    assert str(folder) in advice
    assert compile(program, "program", "exec") and "temperature=0.2, top_k=0, top_p=0.9)" in program


def test_paired_ratios_by_hand() -> None:
    """Two prompts of one source and one of another, in two rounds: the sources' means are log 2 and
    log 8. With one degree of freedom the bounds are 12.706 standard errors away, each error half
    the distance."""
    logs_XR = torch.tensor([[2.0, 0.5], [1.0, 16.0], [8.0, 8.0]]).log()
    two_sources_X = torch.tensor([4, 4, 7])
    one_source_X = torch.tensor([4, 4, 4])
    value, (low, high) = tables.paired(logs_XR, two_sources_X)
    assert value == pytest.approx(4)
    assert (low, high) == pytest.approx((4 / 2**12.7062, 4 * 2**12.7062), rel=1e-4)
    value, bounds = tables.paired(logs_XR, one_source_X)
    assert value == pytest.approx(2 ** (5 / 3)) and bounds == [0, math.inf]
    assert tables.paired(0 * logs_XR, one_source_X) == (1, [1, 1])
    assert tables.paired(0 * logs_XR + math.log(2), two_sources_X)[1] == pytest.approx([2, 2])
