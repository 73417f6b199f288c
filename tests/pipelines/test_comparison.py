"""From decoded prompts and replayed texts to the table of figures, to what is shown of it, and to
the verdict."""

from __future__ import annotations

import json
import math
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from pipelines.config import Config
from pipelines.evaluate import table as tables
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
from pipelines.evaluate.table import (
    ALL,
    Figure,
    Table,
    decoded,
    figures,
    over,
    replayed,
    replayed_figure,
    setting_name,
)
from pipelines.evaluate.verdict import (
    Evaluation,
    losses,
    metrics,
    next_step,
    origins,
    show,
    verdicts,
)
from pipelines.evaluate.verdict import methods as shown_methods
from pipelines.train.result import chosen_of
from selector.actions import EMPTY, Action
from selector.decision import Mode
from selector.runtime.selector import load_selector
from selector.sampling import Sampling
from selector.schema import sha256
from selector.train.replay import Ratio
from tests.pipelines.runs import SMALL, demo_config, espalier, signed

TEMPERATURES = (1.0, 0.2)
TURNS = (0.5, 1.5)  # of two rounds the first is faster
ERROR = 0.01
TRIALS = 1500  # one standard error of a coverage of 95% is then 0.6 points
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


def rows(speeds: dict[str, float] = SPEEDS, sources: int = 6, spread: float = 0.0) -> Rows:
    """Two prompts of each source, of two kinds, decoded in two rounds; all speeds vary by source
    alike."""
    rng, result = np.random.default_rng(0), []
    for temperature, source in product(TEMPERATURES, range(sources)):
        factor = 1 + spread * rng.standard_normal()
        for prompt, (method, speed) in product(range(2), speeds.items()):
            seen = method != ASSISTED  # its steps cannot be observed
            result.append(
                {
                    "prompt": f"{source}-{prompt}",
                    "kind": ("code", "prose")[prompt],
                    "source": str(source),
                    "setting": setting_name(temperature, 1.0),
                    "temperature": temperature,
                    "top_p": 1.0,
                    "method": method,
                    "verifier": "traversal",
                    "drafts": "(1, 4, 0)" if method == BEST_STATIC else "",
                    "tokens": 64,
                    "text": list(range(64)),
                    "rounds": [[64, turn * 64 / (speed * factor)] for turn in TURNS],
                    "steps": 16,
                    "block_tokens": 66,
                    "seconds": 60 / (speed * factor),
                    "select_seconds": 0.6 / (speed * factor) if method == SELECTOR else 0.0,
                    "drafted": ([(1, 4, 0)] * 15 + [(1, 4, 0, "copy")]) * seen,
                    "step_roots": list(range(0, 64, 4)) * seen,
                }
            )
    return result


def replays() -> list[Figure]:
    """What replay says of all methods but transformers' own."""
    own = {**{name: speed for name, speed in SPEEDS.items() if name != ASSISTED}, NETWORK: 90.0}
    return [
        replayed_figure(
            setting_name(t, 1.0), name, replayed(rival), Ratio(speed / own[rival], ERROR)
        )
        for t in TEMPERATURES
        for name, speed in own.items()
        for rival in own
        if rival != name
    ]


def evaluated(data: Rows | None = None) -> Evaluation:
    data = rows() if data is None else data
    table = Table([*figures(data), *replays()])
    decisions = [Mode(each.build(), Action(1, 4, 0)).row() for each in CONFIG.sampling]
    found = {"summary": tables.summary(CONFIG, table, data), "methods": tables.entries(table, data)}
    return Evaluation(found | {"replayed": [], "decisions": decisions}, table)


def test_ratios_are_to_the_tree_that_training_texts_promise_the_most_of() -> None:
    found = evaluated().found
    # not to the fastest one here
    assert found["summary"]["ratio_vs_best_static_delayed"] == pytest.approx(1.25)
    assert found["summary"]["ratio_vs_static_traversal_wall"] == pytest.approx(125 / 110)
    assert found["summary"]["ratio_vs_assisted_generation"] == pytest.approx(125 / 80)
    assert found["summary"]["selector_time_share"] == pytest.approx(0.01)
    for row, temperature in zip(found["summary"]["by_setting"], TEMPERATURES, strict=True):
        assert (row["temperature"], row["top_p"]) == (temperature, 1.0)
        assert row["wall_ratio"] == pytest.approx(1.25) and row[
            "wall_interval_95"
        ] == pytest.approx([1.25] * 2)
        assert (row["replay_ratio"], row["replay_error"]) == (
            pytest.approx(1.25),
            pytest.approx(ERROR),
        )
    first = found["methods"][0]
    # tokens beyond the limit do not count
    assert (first["method"], first["block_efficiency"]) == (PLAIN, 64 / 16)
    assert (first["prompts"], first["tokens"], len(found["methods"])) == (
        12,
        12 * 64,
        2 * len(SPEEDS),
    )


def test_a_rival_that_is_slower_than_plain_decoding_under_one_setting_is_seen_there() -> None:
    """Assisted generation at half the speed of plain decoding at T = 1, and thrice it at T = 0.2:
    means hide it."""
    data = rows()
    for row in data:
        if row["method"] == ASSISTED:
            row["rounds"] = [
                [64, turn * 64 / (25 if row["temperature"] == 1 else 150)] for turn in TURNS
            ]
    evaluation = evaluated(data)
    assert evaluation.found["summary"]["ratio_vs_assisted_generation"] == pytest.approx(
        (5 + 125 / 150) / 2
    )
    for setting, slow, over_it in (("T=1", "0.50", "5.000"), ("T=0.2", "3.00", "0.833")):
        (cells,) = (
            row for row in shown_methods(evaluation)[setting] if row["method"].startswith(ASSISTED)
        )
        assert cells["decoded"] == f"{slow} [{slow}, {slow}]"
        assert cells["selector over it, decoded"] == f"{over_it} [{over_it}, {over_it}]"
        assert cells["selector over it, replayed"] == cells["replayed"] == ""
    found = metrics(evaluation)
    assert found[f"decoded_over_{ASSISTED.replace(' ', '_')}/T 0.2 top-p 1"] == pytest.approx(
        125 / 150
    )
    assert found["exported_ratio"] == pytest.approx(1.25)


def test_the_tables_say_what_was_decoded_and_what_was_replayed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    evaluation, console = evaluated(), Console(width=80)
    monkeypatch.setattr("pipelines.evaluate.verdict.console", console)
    with console.capture() as captured:
        show("a pair on a machine", evaluation)
    text = captured.get()
    assert text.strip().startswith("a pair on a machine") and "…" not in text
    assert "T=0.2: the static tree is exported." in text
    assert "Decisions take 1.00% of the time" in text
    row = next(
        row for row in shown_methods(evaluation)["T=0.2"] if row["method"].startswith(BEST_STATIC)
    )
    assert row["selector over it, decoded"] == "1.250 [1.250, 1.250]"
    assert row["selector over it, replayed"] == "1.250 ±0.010"
    assert row["decoded"] == "2.00 [2.00, 2.00]" and row["replayed"] == "2.00 ±0.01"


def test_rounds_and_prompts_are_compared_each_with_its_own() -> None:
    """By hand, with two rounds of one prompt and of another: (2 * 8)^(1/2) and (1 * 4)^(1/2), in
    any order."""
    mine = [
        {"prompt": x, "source": x, "rounds": [[2, 2 * a], [4, 4 * b]]}
        for x, a, b in (("a", 1, 1), ("b", 3, 2))
    ]
    other = [
        {"prompt": x, "source": x, "rounds": [[2, 2 * a], [2, 2 * b]]}
        for x, a, b in (("b", 3, 8), ("a", 2, 8))
    ]
    assert over(mine, other)[0] == pytest.approx(math.sqrt(4 * math.sqrt(1 * 4)))


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
    found, expected = evaluation.table, {"drafted": 45 / 64, "copied": 4 / 64, "target": 15 / 64}
    for origin, share in expected.items():
        assert found.of("T=1", SELECTOR, f"{tables.SHARE} {origin}", "code").value == pytest.approx(
            share
        )
        # its steps cannot be observed
        assert found.get("T=1", ASSISTED, f"{tables.SHARE} {origin}") is None
    cells = {"drafted": "70%", "copied": "6%", "target": "23%"}
    cells |= {"over plain": "2.50 [2.50, 2.50]", "over the rule": "1.04 [1.04, 1.04]"}
    kinds = ("all", "code", "prose")
    assert origins(evaluation) == [
        {"setting": t, "prompts": kind, **cells} for t in ("T=1", "T=0.2") for kind in kinds
    ]


def test_intervals_are_paired() -> None:
    """Prompts differ a lot, methods by a constant factor: speeds are uncertain, their ratios are
    not."""
    found = evaluated(rows(spread=0.2)).table
    speed, ratio = (
        found.of("T=1", SELECTOR, tables.TOKENS_PER_SECOND),
        found.of("T=1", SELECTOR, decoded(BEST_STATIC)),
    )
    assert speed.low and speed.high and speed.high / speed.low > 1.1
    assert ratio.low and ratio.high and ratio.high - ratio.low < 1e-9


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    """A single source leaves bounds open; what is counted has none."""
    found = evaluated(rows(sources=1, spread=0.1)).table
    assert found.of("T=1", PLAIN, tables.EFFICIENCY).low is None
    assert found.of("T=1", PLAIN, tables.TOKENS_PER_SECOND).high is None
    found.write(tmp_path / "evaluation.parquet")
    assert Table.read(tmp_path / "evaluation.parquet").figures == found.figures


def test_a_figure_stands_with_what_is_known_of_its_error() -> None:
    assert (
        str(Figure("T=1", SELECTOR, "all", decoded(PLAIN), 1.234, 1.1, 1.3)) == "1.23 [1.10, 1.30]"
    )
    assert str(Figure("T=1", SELECTOR, "all", tables.EFFICIENCY, 2.0)) == "2.00"
    for error, text in ((0.02, "1.23 ±0.02"), (math.inf, "1.23")):
        assert str(replayed_figure("T=1", SELECTOR, replayed(PLAIN), Ratio(1.234, error))) == text


REPLAYED = {BEST_STATIC: 1.8, COPYING: 2.4, NETWORK: 2.5}
TREE = Mode(Sampling(0.2, 0.9), Action(1, 6, 0)).row()
MODES = {
    NETWORK: TREE | {"feature_levels": ["early", "light"], "rule": [4, 8], "longest": 175},
    COPYING: TREE | {"feature_levels": ["match"], "rule": [4, 8]},
    STATIC: TREE,
    PLAIN: TREE | {"action": list(EMPTY)},
}
SETTING = "T=0.2, top-p=0.9"


def told(
    exported: str,
    decoded_speed: tuple[float, float | None, float | None] = (2.45, 2.1, 2.9),
    over_rule: tuple[float, float | None, float | None] = (1.04, 0.99, 1.09),
    **other: float,
) -> Evaluation:
    """An evaluation of one sampling setting; `other` replaces replayed speeds over plain
    decoding."""
    speeds = REPLAYED | {name.replace("_", " "): speed for name, speed in other.items()}
    speeds[SELECTOR] = {STATIC: speeds[BEST_STATIC], PLAIN: 1.0, **speeds}[exported]
    measured = {PLAIN: decoded_speed, COPYING: over_rule, BEST_STATIC: (1.2, 1.1, 1.3)}
    figures = [
        replayed_figure(SETTING, name, replayed(PLAIN), Ratio(speed, 0.04))
        for name, speed in speeds.items()
    ]
    figures += [
        Figure(SETTING, SELECTOR, ALL, decoded(rival), *ratio) for rival, ratio in measured.items()
    ]
    row = {"temperature": 0.2, "top_p": 0.9}
    return Evaluation(
        {"summary": {"by_setting": [row]}, "decisions": [MODES[exported]]}, Table(figures)
    )


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            told(NETWORK),
            "the network is exported. It is 2.50 ±0.04 times as fast as plain decoding in replay "
            "and "
            "2.45 [2.10, 2.90] times in decoding. In wall-clock time",
        ),
        (
            told(COPYING, network=2.3),
            "the lookup rule is exported. It is 2.40 ±0.04 times as fast as plain",
        ),
        (
            told(NETWORK, (1.9, None, None)),
            "2.50 ±0.04 times as fast as plain decoding in replay and 1.90 times",
        ),
        (
            told(NETWORK, lookup_rule=2.6),
            "in decoding. The lookup rule is faster in replay: 2.60 ±0.04 times.",
        ),
        (told(STATIC), "the static tree is exported. It is 1.80 ±0.04 times as fast"),
        (
            told(COPYING, (0.8, 0.7, 0.9)),
            "0.9: A LOSS, so plain decoding is exported: the lookup rule was chosen. It is 2",
        ),
        (
            told(PLAIN),
            "plain decoding is exported: on the validation texts nothing was surely faster. The "
            "net",
        ),
        (
            told(PLAIN, best_static_tree=1.0, lookup_rule=0.9, network=0.8),
            "nothing was surely faster. In wall-clock time",
        ),
    ],
)
def test_what_is_exported_is_told_with_what_is_faster(found: Evaluation, words: str) -> None:
    """By a single source there is no interval; no selector is praised that loses."""
    (said,) = verdicts(found)
    assert (
        said.startswith(f"{SETTING}: ")
        and words in said
        and bool(losses(found)) == ("A LOSS" in said)
    )


def test_plain_decoding_is_exported_where_decoding_shows_a_loss(copy: Path) -> None:
    path, result = Path("runs/demo/evaluation.parquet"), Path("runs/demo/training/result.json")
    found, before = json.loads(result.read_text()), sha256(result)
    for mode in chosen_of(found)["modes"]:  # as if a static tree had been chosen
        mode |= {"action": [1, 4, 0, "iid"], "feature_levels": [], "rule": None}
    result.write_text(json.dumps(found))
    signed(result, "train")
    record = Path("runs/demo/stages/evaluate.json")
    record.write_text(record.read_text().replace(before, sha256(result)))
    lost = [
        each._replace(value=0.8, low=0.7, high=0.9)
        if each[1:4] == (SELECTOR, ALL, decoded(PLAIN))
        else each
        for each in Table.read(path).figures
    ]
    Table(lost).write(path)
    signed(path, "evaluate")
    espalier(copy, "export", *SMALL)
    assert {mode.action for mode in load_selector(copy / "runs/demo/selector").modes} == {EMPTY}


@pytest.mark.parametrize(
    ("over_rule", "words"),
    [
        ((1.06, 1.01, 1.11), "is there (1.060 [1.010, 1.110])"),
        ((1.04, 0.99, 1.09), "cannot be told from none (1.040 [0.990, 1.090])"),
        ((0.9, 0.85, 0.95), "is a loss (0.900 [0.850, 0.950])"),
        ((1.0, 1.0, 1.0), "is zero (both decode alike)"),
        ((1.1, None, None), "has no interval (1.100)"),
    ],
)
def test_whether_the_gain_is_there_in_wall_clock_is_one_sentence(
    over_rule: tuple[float, float | None, float | None], words: str
) -> None:
    (said,) = verdicts(told(NETWORK, over_rule=over_rule))
    assert said.endswith(
        f"In wall-clock time, prompt by prompt, the selector's gain over the lookup rule {words} "
        "and over the best "
        "static tree is there (1.200 [1.100, 1.300])."
    )


def test_the_next_step_is_named(inside: Path) -> None:
    config = Config.model_validate({"name": "x", "sampling": [{"temperature": 0.2, "top_p": 0.9}]})
    said, program = next_step(config, told(PLAIN))
    assert said.startswith("Decode without a draft") and not program
    assert next_step(config, told(NETWORK)) == ("`espalier export` packages the selector.", "")
    folder = inside / "runs" / "x" / "selector"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    said, program = next_step(config, told(NETWORK))
    assert said.startswith(f"The exported selector is {folder}. This program")
    assert compile(program, "program", "exec") and "temperature=0.2, top_k=0, top_p=0.9)" in program


def test_paired_ratios_by_hand() -> None:
    """Two prompts of one source and one of another, in two rounds: the sources' means are log 2 and
    log 8. With one degree of freedom the bounds are 12.706 standard errors away, each error half
    the distance."""
    logs_XR = torch.tensor([[2.0, 0.5], [1.0, 16.0], [8.0, 8.0]]).log()
    value, (low, high) = tables.paired(logs_XR, torch.tensor([4, 4, 7]))
    assert value == pytest.approx(4)
    assert (low, high) == pytest.approx((4 / 2**12.7062, 4 * 2**12.7062), rel=1e-4)
    assert tables.paired(logs_XR, torch.tensor([4, 4, 4])) == (
        pytest.approx(2 ** (5 / 3)),
        [0, math.inf],
    )
    assert tables.paired(0 * logs_XR, torch.tensor([4, 4, 4])) == (1, [1, 1])
    assert tables.paired(0 * logs_XR + math.log(2), torch.tensor([4, 4, 7]))[1] == pytest.approx(
        [2, 2]
    )


def test_paired_intervals_cover_the_true_ratio_as_often_as_they_say() -> None:
    """Prompts of one source share a part of their ratio, rounds of one prompt another, and each
    round has noise."""
    sources = 4
    generator = torch.Generator().manual_seed(sources)
    of, covered = torch.arange(sources).repeat_interleave(3), 0
    for _ in range(TRIALS):
        parts = (
            torch.randn(size, generator=generator)
            for size in ((sources, 1), (3 * sources, 1), (3 * sources, 2))
        )
        source, prompt, noise = parts
        value, (low, high) = tables.paired(
            math.log(1.2) + 0.2 * source[of] + 0.1 * prompt + 0.3 * noise, of
        )
        assert low < value < high
        covered += low <= 1.2 <= high
    assert covered / TRIALS == pytest.approx(0.95, abs=0.02)
