"""What a reader of an evaluation sees first."""

from __future__ import annotations

from typing import Any

from pipelines.evaluate.findings import decisions, headline
from selector.actions import Action
from selector.decision import Mode

SPEEDS = {"static tree": 1.8, "lookup rule": 2.4, "network": 2.5}
ALIKE = (2.45, [2.1, 2.9])  # decoded, about what is replayed


def setting(
    exported: str, decoded: tuple[float, list[float]] = ALIKE, over_rule: float = 1.04, **other: float
) -> dict[str, Any]:
    """The figures of one sampling setting; `other` replaces replayed speeds over plain decoding."""
    speeds = SPEEDS | {name.replace("_", " "): speed for name, speed in other.items()}
    return {
        "temperature": 0.2,
        "top_p": 0.9,
        "ratio_vs_autoregressive": decoded[0],
        "ratio_vs_autoregressive_interval_95": decoded[1],
        "ratio_vs_lookup_rule": over_rule,
        "ratio_vs_lookup_rule_interval_95": [over_rule - 0.05, over_rule + 0.05],
        "replayed": {"ratio_vs_autoregressive": {"value": speeds[exported], "error": 0.04}},
        "choices": [
            {"choice": name, "exported": name == exported, "over_plain": {"value": speed, "error": 0.04}}
            for name, speed in speeds.items()
        ],
    }


def said(row: dict[str, Any]) -> str:
    return headline({"summary": {"by_setting": [row]}})


def test_what_is_exported_is_told_by_its_speed_over_plain_decoding() -> None:
    expected = "T=0.2, top-p=0.9: the network is exported and decodes 2.50 ±0.04 times as fast as plain decoding."
    assert said(setting("network")) == expected
    rule = setting("lookup rule", network=2.3)
    assert said(rule) == expected.replace("network", "lookup rule").replace("2.50", "2.40")
    both = headline({"summary": {"by_setting": [setting("network"), rule]}})
    assert both == f"{expected} {said(rule)}"


def test_decoding_that_says_something_else_than_replay_stands_beside_it() -> None:
    assert said(setting("network", decoded=(1.9, [1.7, 2.1]))).endswith(
        "decodes 2.50 ±0.04 (replayed; decoded 1.90 [1.70, 2.10]) times as fast as plain decoding."
    )


def test_no_selector_is_praised_that_loses() -> None:
    """To the rule or to the tree, replayed; or to the rule, decoded."""
    assert said(setting("network", lookup_rule=2.6)) == (
        "T=0.2, top-p=0.9: the lookup rule decodes 2.60 ±0.04 times as fast as plain decoding (replayed), and the "
        "network, which is exported, 2.50 ±0.04 times."
    )
    assert said(setting("lookup rule", network=2.3, static_tree=2.45)).startswith(
        "T=0.2, top-p=0.9: the static tree decodes 2.45 ±0.04 times"
    )
    assert said(setting("network", over_rule=0.9)) == (
        "T=0.2, top-p=0.9: the lookup rule is faster than the network, which is exported and decodes at 0.90 "
        "[0.85, 0.95] of its speed."
    )


def test_who_decides_and_why_is_told_in_sentences() -> None:
    modes = [Mode(0.2, 0.9, Action(1, 6, 0), levels).row() for levels in (("early", "light"), (), ())]
    modes[1] |= {"feature_levels": ["match"], "rule": [4, 8]}
    network, rule, neither = decisions({"summary": {"by_setting": [setting("network")] * 3}, "decisions": modes})
    assert network.startswith("T=0.2, top-p=0.9: The network decides: on the validation texts it is ahead of the")
    assert network.endswith("It is asked with early and then light features.")
    assert rule.startswith("T=0.2, top-p=0.9: The lookup rule decides: ")
    assert rule.endswith("It copies 8 tokens after a match of 4 or more, and drafts (1, 6, 0) elsewhere.")
    assert "neither the network nor the lookup rule" in neither
    assert neither.endswith("errors over sources, so (1, 6, 0) is drafted everywhere.")
