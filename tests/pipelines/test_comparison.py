"""From decoded prompts and replayed texts to the numbers of an evaluation."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest

from pipelines.config import Config, load_config
from pipelines.evaluate.assisted import ASSISTED
from pipelines.evaluate.comparison import FIGURES, evaluation, over
from pipelines.evaluate.findings import methods, metrics, origins
from pipelines.evaluate.methods import AT_ROOT, BEST_STATIC, COPYING, PLAIN, SELECTOR
from pipelines.evaluate.replays import WALL
from pipelines.run import read_json, write_json

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"
TEMPERATURES = (1.0, 0.2)
TURNS = (0.5, 1.5)  # of two rounds the first is faster
ERROR = 0.01
CONFIG = load_config(DEMO, [f"sampling=[{', '.join(f'{{temperature: {t}}}' for t in TEMPERATURES)}]"])


def rows(speeds: dict[str, float], sources: int = 6, spread: float = 0.0, seed: int = 0) -> list[dict]:
    """Two prompts of each source, of two kinds, decoded in two rounds at a speed that varies by source, alike for all
    methods."""
    rng = np.random.default_rng(seed)
    result = []
    for temperature in TEMPERATURES:
        for source in range(sources):
            factor = 1 + spread * rng.standard_normal()
            for prompt in range(2):
                for method, speed in speeds.items():
                    result.append(
                        {
                            "prompt": f"{source}-{prompt}",
                            "kind": ("code", "prose")[prompt],
                            "source": str(source),
                            "temperature": temperature,
                            "top_p": 1.0,
                            "method": method,
                            "verifier": "traversal",
                            "action": [1, 4, 0] if method == BEST_STATIC else None,
                            "drafts": "(1, 4, 0)" if method == BEST_STATIC else "",
                            "tokens": 64,
                            "text": list(range(64)),
                            "rounds": [[64, turn * 64 / (speed * factor)] for turn in TURNS],
                            "steps": 16,
                            "block_tokens": 66,
                            "seconds_of_steps": [60 / (speed * factor)],
                            "select_seconds": 0.6 / (speed * factor) if method == SELECTOR else 0.0,
                            "drafted": [] if method == ASSISTED else ["(1, 4, 0)"] * 15 + ["lookup 4"],
                            "step_roots": [] if method == ASSISTED else list(range(0, 64, 4)),
                        }
                    )
    return result


def replayed(speeds: dict[str, float], clock: str = WALL, shift: float = 0.0) -> list[dict]:
    """What replay says of methods, `shift` added to the ratio of all but the best static tree."""
    return [
        {
            "clock": clock,
            "temperature": temperature,
            "top_p": 1.0,
            "method": method,
            "verifier": "traversal",
            "action": [1, 4, 0] if method == BEST_STATIC else None,
            "ratio": speed / speeds[BEST_STATIC] + (shift if method != BEST_STATIC else 0.0),
            "error": ERROR if method != BEST_STATIC else 0.0,
            "over": {
                rival: {"value": speed / SPEEDS[rival], "error": 2 * ERROR} for rival in (PLAIN, COPYING, BEST_STATIC)
            },
            "tokens_per_second": speed,
        }
        for temperature in TEMPERATURES
        for method, speed in speeds.items()
        if method != ASSISTED  # transformers' loop is not replayed
    ]


SPEEDS = {**{PLAIN: 50.0, ASSISTED: 80.0, BEST_STATIC: 100.0, AT_ROOT: 110.0}, **{COPYING: 120.0, SELECTOR: 125.0}}


CHOICES = [
    [
        {"choice": choice, "exported": choice == "network", "over_plain": {"value": value, "error": ERROR}}
        for choice, value in (("static tree", 2.0), ("lookup rule", 2.4), ("network", 2.5))
    ]
    for _ in TEMPERATURES
]


def compared(config: Config = CONFIG, shift: float = 0.0, **how: float) -> dict:
    return evaluation(config, rows(SPEEDS, **how), replayed(SPEEDS, shift=shift), CHOICES)


def test_ratios_are_to_the_tree_that_training_texts_promise_the_most_of() -> None:
    result = compared()
    summary = result["summary"]
    assert summary["ratio_vs_best_static_delayed"] == pytest.approx(1.25)  # not to the fastest one here
    assert summary["ratio_vs_static_traversal_wall"] == pytest.approx(125 / 110)
    assert summary["ratio_vs_autoregressive"] == pytest.approx(2.5)
    assert summary["ratio_vs_assisted_generation"] == pytest.approx(125 / 80)
    assert "ratio_vs_prompt_lookup" not in summary  # not among these methods
    assert summary["selector_time_share"] == pytest.approx(0.01)
    assert {entry["method"] for entry in result["methods"]} == set(SPEEDS)
    assert [entry["method"] for entry in result["methods"] if entry["is_best_static"]] == [BEST_STATIC] * 2
    assert result["methods"][0]["method"] == PLAIN
    assert result["methods"][0]["block_efficiency"] == 64 / 16  # tokens beyond the limit do not count
    assert (result["methods"][0]["prompts"], result["methods"][0]["tokens"]) == (12, 12 * 64)
    assert result["methods"][0]["actions"] == {"(1, 4, 0)": 12 * 15, "lookup 4": 12}
    assert {setting: len(own) for setting, own in methods(result).items()} == {"T=1": 6, "T=0.2": 6}


def test_every_setting_has_its_decoded_and_its_replayed_gain() -> None:
    summary = compared(shift=0.5)["summary"]
    assert [(row["temperature"], row["top_p"]) for row in summary["by_setting"]] == [(t, 1.0) for t in TEMPERATURES]
    for row in summary["by_setting"]:
        assert row["wall_ratio"] == pytest.approx(1.25)
        assert row["wall_interval_95"] == pytest.approx([1.25, 1.25])
        assert (row["replay_ratio"], row["replay_error"]) == (pytest.approx(1.75), ERROR)
        assert row["paired"]["ratio_vs_assisted_generation"]["value"] == pytest.approx(125 / 80)
        assert row["paired"]["ratio_vs_assisted_generation"]["interval_95"] == pytest.approx([125 / 80] * 2)
        assert row["paired"]["ratio_vs_lookup_rule"]["value"] == pytest.approx(125 / 120)
        assert row["replayed"]["ratio_vs_lookup_rule"] == {"value": pytest.approx(125 / 120), "error": 2 * ERROR}
        assert row["replayed"]["ratio_vs_autoregressive"]["value"] == pytest.approx(125 / 50)
        assert "ratio_vs_assisted_generation" not in row["replayed"]
    assert {FIGURES[figure] for figure in FIGURES if figure in summary} == set(SPEEDS) - {SELECTOR}


def test_a_rival_that_is_slower_than_plain_decoding_under_one_setting_is_seen_there() -> None:
    """Assisted generation at half the speed of plain decoding at T = 1, and three times it at T = 0.2: the mean over
    settings hides that."""
    data = rows(SPEEDS)
    for row in data:
        if row["method"] == ASSISTED:
            row["rounds"] = [[64, turn * 64 / (25 if row["temperature"] == 1 else 150)] for turn in TURNS]
    found = evaluation(CONFIG, data, replayed(SPEEDS), CHOICES)
    summary = found["summary"]
    found_there = [row["paired"]["ratio_vs_assisted_generation"]["value"] for row in summary["by_setting"]]
    assert found_there == pytest.approx([5, 125 / 150])
    assert summary["ratio_vs_assisted_generation"] == pytest.approx((5 + 125 / 150) / 2)
    for setting, decoded, over_it in (("T=1", "0.50", "5.000"), ("T=0.2", "3.00", "0.833")):
        (cells,) = (row for row in methods(found)[setting] if row["method"].startswith(ASSISTED))
        assert cells["decoded"] == f"{decoded} [{decoded}, {decoded}]"
        assert cells["selector over it, decoded"] == f"{over_it} [{over_it}, {over_it}]"
        assert cells["selector over it, replayed"] == cells["replayed"] == ""
    assert metrics(summary)["ratio_vs_assisted_generation/T 0.2 top-p 1"] == pytest.approx(125 / 150)


def test_a_faster_rule_with_another_verifier_is_among_the_choices() -> None:
    """One that is as fast is not."""
    wall = replayed(SPEEDS)
    for row in wall:
        if row["method"] in (COPYING, BEST_STATIC):
            row["verifier"] = "specinfer"
            row["over"][PLAIN]["value"] = 2.6 if row["method"] == COPYING else 2.0
    found = evaluation(CONFIG, rows(SPEEDS), wall, CHOICES)["summary"]["by_setting"]
    for row in found:
        assert [each["choice"] for each in row["choices"][3:]] == ["lookup rule with specinfer"]
        assert row["choices"][3]["over_plain"]["value"] == 2.6 and not row["choices"][3]["exported"]


def test_rounds_and_prompts_are_compared_each_with_its_own() -> None:
    """By hand, with two rounds of one prompt and of another: (2 * 8)^(1/2) and (1 * 4)^(1/2)."""
    times = {"a": ([2, 8], [1, 1]), "b": ([3, 4], [3, 2])}
    mine, other = (
        [
            {"prompt": name, "source": name, "rounds": [[n, t * n] for n, t in zip((2, n2), each[way], strict=True)]}
            for name, each in times.items()
            for n2 in (2 + 2 * way,)
        ]
        for way in (1, 0)
    )
    other.reverse()
    assert over(mine, other)["value"] == pytest.approx(math.sqrt(4 * math.sqrt(2)))


def test_texts_of_greedy_decoding_are_compared() -> None:
    """Of twelve prompts one was continued otherwise by one method; where tokens are drawn, nothing is said."""
    data, wall = rows(SPEEDS), replayed(SPEEDS)
    for row in (*data, *wall):
        row["temperature"] = {1.0: 1.0, 0.2: 0.0}[row["temperature"]]
    next(row for row in data if (row["temperature"], row["method"]) == (0.0, COPYING))["text"] = [7]
    config = load_config(DEMO, ["sampling=[{temperature: 1.0}, {temperature: 0.0}]"])
    found = evaluation(config, data, wall, CHOICES)["summary"]["by_setting"]
    assert [row["equal_texts"] for row in found] == [None, [11, 12]]


def test_what_the_tokens_came_from_is_told_by_kind() -> None:
    """Fifteen steps accept three drafted tokens each; the last one copies more than there is room for."""
    result = compared()
    expected = {"drafted": 45 / 64, "copied": 4 / 64, "target": 15 / 64}
    for entry in result["methods"]:
        assert entry["shares"] == (None if entry["method"] == ASSISTED else pytest.approx(expected))
    for row in result["summary"]["by_setting"]:
        assert [(each["kind"], each["prompts"]) for each in row["by_kind"]] == [("code", 6), ("prose", 6)]
        for each in row["by_kind"]:
            assert each["shares"] == pytest.approx(expected)
            assert each["over_plain"]["value"] == pytest.approx(2.5)
            assert each["over_rule"]["interval_95"] == pytest.approx([125 / 120] * 2)
    cells = {"drafted": "70%", "copied": "6%", "target": "23%"}
    cells |= {"over plain": "2.50 [2.50, 2.50]", "over the rule": "1.04 [1.04, 1.04]"}
    prompts = ("12 of all kinds", "6 code", "6 prose")
    assert origins(result) == [{"setting": t, "prompts": n, **cells} for t in ("T=1", "T=0.2") for n in prompts]


def test_intervals_are_paired() -> None:
    """Prompts differ a lot, methods by a constant factor: speeds are uncertain, their ratios are not."""
    result = compared(spread=0.2)
    (low, high), *_ = (entry["interval_95"] for entry in result["methods"] if entry["method"] == SELECTOR)
    assert high / low > 1.1
    low, high = result["summary"]["ratio_vs_best_static_delayed_interval_95"]
    assert high - low < 1e-9


def test_sources_are_the_same_ones_under_all_settings() -> None:
    """With ratios that vary by source, alike in both settings, averaging settings must not narrow the interval."""
    data = rows(SPEEDS, sources=12)
    rng = np.random.default_rng(1)
    factors = {str(source): 1 + 0.3 * rng.standard_normal() for source in range(12)}
    for row in data:
        if row["method"] == SELECTOR:
            row["rounds"] = [[64, seconds * factors[row["source"]]] for _, seconds in row["rounds"]]
    result = evaluation(CONFIG, data, replayed(SPEEDS), CHOICES)
    low, high = result["summary"]["ratio_vs_best_static_delayed_interval_95"]
    for row in result["summary"]["by_setting"]:
        assert [low, high] == pytest.approx(row["wall_interval_95"])


def test_what_a_single_source_leaves_open_is_null_in_the_file(tmp_path: Path) -> None:
    """JSON has no infinity. Read again, the same figures are shown."""
    replays = [row | {"error": math.inf} for row in replayed(SPEEDS)]
    found = evaluation(CONFIG, rows(SPEEDS, sources=1, spread=0.1), replays, CHOICES)
    path = tmp_path / "evaluation.json"
    write_json(path, found)

    def refused(constant: str) -> None:
        raise AssertionError(f"{constant} is no JSON")

    json.loads(path.read_text(), parse_constant=refused)
    assert '"ratio_vs_best_static_delayed_interval_95": [\n   0.0,\n   null\n  ]' in path.read_text()
    assert read_json(path, "evaluate") == json.loads(json.dumps(found))
