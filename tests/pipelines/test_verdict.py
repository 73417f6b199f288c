"""What a reader of an evaluation sees first."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from pipelines.config import Config, load_config
from pipelines.evaluate.verdict import choices, decisions, next_steps, title, verdicts
from selector.actions import EMPTY, Action
from selector.decision import Mode
from tests.pipelines.runs import ROOT, SMALL

SPEEDS = {"static tree": 1.8, "lookup rule": 2.4, "network": 2.5}
ALIKE = (2.45, [2.1, 2.9])  # decoded, about what is replayed
TREE = Mode(0.2, 0.9, Action(1, 6, 0)).row()
NETWORK, RULE = (
    TREE | {"feature_levels": ["early", "light"], "rule": [4, 8], "longest": 175},
    TREE | {"feature_levels": ["match"], "rule": [4, 8]},
)
PLAIN = TREE | {"action": list(EMPTY)}
MODES = {"network": NETWORK, "lookup rule": RULE, "static tree": TREE}


def setting(
    exported: str, decoded: tuple[float, list[float]] = ALIKE, over_rule: float = 1.04, **other: float
) -> dict[str, Any]:
    """The figures of one sampling setting; `other` replaces replayed speeds over plain decoding, or adds choices."""
    speeds = SPEEDS | {name.replace("_", " "): speed for name, speed in other.items()}
    over = {"ratio_vs_autoregressive": decoded}
    over |= {"ratio_vs_lookup_rule": (over_rule, [over_rule - 0.05, over_rule + 0.05])}
    over |= {"ratio_vs_best_static_delayed": (1.2, [1.1, 1.3])}
    return {
        "temperature": 0.2,
        "top_p": 0.9,
        "paired": {figure: {"value": value, "interval_95": bounds} for figure, (value, bounds) in over.items()},
        "equal_texts": None,
        "replayed": {"ratio_vs_autoregressive": {"value": speeds[exported], "error": 0.04}},
        "choices": [
            {"choice": name, "exported": name == exported, "over_plain": {"value": speed, "error": 0.04}}
            for name, speed in speeds.items()
        ],
    }


def evaluation(*rows: dict[str, Any], mode: dict[str, Any] | None = None) -> dict[str, Any]:
    exported = [next(each["choice"] for each in row["choices"] if each["exported"]) for row in rows]
    return {"summary": {"by_setting": list(rows)}, "decisions": [mode or MODES[name] for name in exported]}


def said(row: dict[str, Any], mode: dict[str, Any] | None = None) -> str:
    (found,) = verdicts(evaluation(row, mode=mode))
    return found


def test_what_is_exported_is_told_by_its_speed_over_plain_decoding() -> None:
    expected = "T=0.2, top-p=0.9: the network is exported. It is 2.50 ±0.04 times as fast as plain decoding in replay "
    assert said(setting("network")).startswith(expected)
    rule = setting("lookup rule", network=2.3)
    assert said(rule).startswith(expected.replace("network", "lookup rule").replace("2.50", "2.40"))
    assert len(verdicts(evaluation(setting("network"), rule))) == 2


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (setting("network"), "Some of the gain is text that repeats itself: copying gives 40% of it."),
        (setting("network", static_tree=1.1), "Most of the gain is text that repeats itself: copying gives 87% of it."),
        (
            setting("network", static_tree=2.4),
            "Little of the gain is text that repeats itself: copying gives 0% of it.",
        ),
        (setting("lookup rule", static_tree=1.0), "copying gives 100% of it."),
    ],
)
def test_the_share_of_copying_is_told_in_words(row: dict[str, Any], words: str) -> None:
    """(2.4 - 1.8) / (2.5 - 1) = 0.4: of the gain over plain decoding, what the rule adds to the tree's speed."""
    assert f"{words} In wall-clock" in said(row)


def test_what_was_decoded_stands_beside_what_was_replayed() -> None:
    assert "2.50 ±0.04 times as fast as plain decoding in replay and 1.90 [1.70, 2.10] times in decoding." in said(
        setting("network", decoded=(1.9, [1.7, 2.1]))
    )


def test_no_selector_is_praised_that_loses() -> None:
    """To the rule or to the tree, replayed, also with another verifier; or to the rule, decoded."""
    assert said(setting("network", lookup_rule=2.6)).startswith(
        "T=0.2, top-p=0.9: the lookup rule is 2.60 ±0.04 times as fast as plain decoding in replay. The network, which "
        "is exported, is 2.50 ±0.04 times as fast"
    )
    assert said(setting("network", lookup_rule_with_specinfer=2.6)).startswith(
        "T=0.2, top-p=0.9: the lookup rule with specinfer is 2.60 ±0.04 times"
    )
    assert said(setting("lookup rule", network=2.3, static_tree=2.45)).startswith(
        "T=0.2, top-p=0.9: the static tree is 2.45 ±0.04 times"
    )
    assert said(setting("network", over_rule=0.9)).startswith(
        "T=0.2, top-p=0.9: the lookup rule is faster than the network, which is exported and decodes at 0.90 "
        "[0.85, 0.95] of its speed. In wall-clock"
    )


def test_a_single_source_has_no_interval() -> None:
    row = setting("network", decoded=(1.9, [0.0, math.inf]))
    assert "in replay and 1.90 times in decoding." in said(row)


@pytest.mark.parametrize(
    ("over_rule", "words"),
    [
        (1.06, "is there (1.060 [1.010, 1.110])"),
        (1.04, "cannot be told from none (1.040 [0.990, 1.090])"),
        (0.9, "is a loss (0.900 [0.850, 0.950])"),
    ],
)
def test_whether_the_gain_is_there_in_wall_clock_is_one_sentence(over_rule: float, words: str) -> None:
    row = setting("network", over_rule=over_rule)
    expected = (
        f"In wall-clock time, prompt by prompt, the selector's gain over the lookup rule {words} and over the best "
        "static tree is there (1.200 [1.100, 1.300])."
    )
    assert said(row).endswith(expected)
    row["equal_texts"] = [11, 12]
    assert said(row).endswith(f"{expected} All methods wrote the same text for 11 of 12 prompts.")


def test_who_decodes_as_the_rule_does_gains_nothing_over_it() -> None:
    row = setting("lookup rule")
    row["paired"]["ratio_vs_lookup_rule"] = {"value": 1.0, "interval_95": [1.0, 1.0]}
    assert "gain over the lookup rule is nil (both decode alike) and over" in said(row)


def test_where_no_draft_pays_plain_decoding_is_exported_by_its_name() -> None:
    nothing = {"static_tree": 1.0, "lookup_rule": 0.99, "network": 0.8, "decoded": (1.0, [1.0, 1.0])}
    row = setting("static tree", **nothing)  # type: ignore[arg-type]
    expected = "T=0.2, top-p=0.9: plain decoding is exported: nothing that drafts is faster here. In wall-clock"
    assert said(row, PLAIN).startswith(expected)
    faster = said(setting("static tree", **nothing | {"lookup_rule": 1.2}), PLAIN)  # type: ignore[arg-type]
    assert faster.startswith("T=0.2, top-p=0.9: the lookup rule is 1.20 ±0.04 times as fast as plain decoding")
    assert "Plain decoding is exported, because on the validation texts nothing was surely faster" in faster
    assert choices(evaluation(row, mode=PLAIN))[0]["exported"] == "plain decoding"
    lines, program = next_steps(Config(name="x"), evaluation(row, mode=PLAIN))
    assert lines[0].startswith("Decode without a draft") and not program


def test_who_decides_and_why_is_told_in_sentences() -> None:
    found = evaluation(setting("network"), setting("lookup rule"), setting("static tree"))
    network, rule, neither = decisions(found)
    assert network.startswith("T=0.2, top-p=0.9: The network decides: on the validation texts it is ahead of the")
    assert network.endswith(
        "It is asked with early and then light features. On texts of more than 175 tokens the lookup rule decides."
    )
    assert rule.startswith("T=0.2, top-p=0.9: The lookup rule decides: ")
    assert rule.endswith("It copies 8 tokens after a match of 4 or more, and drafts (1, 6, 0) elsewhere.")
    assert "neither the network nor the lookup rule" in neither
    assert neither.endswith("errors over sources, so (1, 6, 0) is drafted everywhere.")


def test_the_title_names_the_pair_and_the_machine() -> None:
    own = Config.model_validate({"name": "mine", "pair": {"target": "org/large", "draft": "/models/small/"}})
    assert title(own, "H100, bfloat16") == "mine: large with small on H100, bfloat16"
    assert title(Config(name="mine"), "a CPU") == "mine: smollm2 with its draft on a CPU"


def test_the_program_of_the_next_step_runs(
    demo: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It loads the pair and the exported selector, and continues a prompt; an engine's file is named."""
    monkeypatch.chdir(demo[0])
    config = load_config(ROOT / "configs" / "demo.yaml", SMALL)
    row = setting("network")
    lines, program = next_steps(config, evaluation(*[row] * len(config.sampling)))
    assert lines == [f"The exported selector is {demo[0] / 'runs/demo/selector'}. This program decodes with it:"]
    exec(compile(program, "next step", "exec"), {})
    assert capsys.readouterr().out.strip()
    monkeypatch.chdir(tmp_path)
    assert next_steps(config, evaluation(*[row] * len(config.sampling))) == (
        ["`espalier export` packages the selector."],
        "",
    )
    for folder in ("selector", "engines/vllm"):
        (tmp_path / "runs" / "demo" / folder).mkdir(parents=True)
    (tmp_path / "runs/demo/selector/config.json").write_text("{}")
    (tmp_path / "runs/demo/engines/vllm/README.md").write_text("how")
    lines, _ = next_steps(config, evaluation(*[row] * len(config.sampling)))
    assert lines[1] == f"For vllm see {tmp_path / 'runs/demo/engines/vllm/README.md'}."
