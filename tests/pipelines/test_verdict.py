"""What a reader of an evaluation sees first."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from pipelines.config import Config, load_config
from pipelines.evaluate.methods import BEST_STATIC, COPYING, NETWORK, PLAIN, SELECTOR, STATIC
from pipelines.evaluate.table import ALL, Figure, Table, decoded, replayed, replayed_figure
from pipelines.evaluate.verdict import Evaluation, choices, decisions, next_steps, title, verdicts
from pipelines.run import table
from selector.actions import EMPTY, Action
from selector.decision import Mode
from selector.sampling import Sampling
from selector.train.replay import Ratio
from tests.pipelines.runs import ROOT, SMALL

SPEEDS = {BEST_STATIC: 1.8, COPYING: 2.4, NETWORK: 2.5}
ALIKE = (2.45, 2.1, 2.9)  # decoded, about what is replayed
TREE = Mode(Sampling(0.2, 0.9), Action(1, 6, 0)).row()
DECIDES, RULE = (
    TREE | {"feature_levels": ["early", "light"], "rule": [4, 8], "longest": 175},
    TREE | {"feature_levels": ["match"], "rule": [4, 8]},
)
NOTHING = TREE | {"action": list(EMPTY)}
MODES = {NETWORK: (DECIDES, NETWORK), COPYING: (RULE, COPYING), STATIC: (TREE, BEST_STATIC)}
SETTING = "T=0.2, top-p=0.9"


def evaluation(
    exported: str,
    decoded_speed: tuple[float, float | None, float | None] = ALIKE,
    over_rule: tuple[float, float, float] | None = None,
    mode: dict[str, Any] | None = None,
    equal: list[int] | None = None,
    settings: int = 1,
    **other: float,
) -> Evaluation:
    """An evaluation of one sampling setting; `other` replaces replayed speeds over plain decoding."""
    speeds = SPEEDS | {name.replace("_", " "): speed for name, speed in other.items()}
    own, same = MODES[exported]
    speeds = {SELECTOR: speeds[same], **speeds}
    measured = {PLAIN: decoded_speed, COPYING: over_rule or (1.04, 0.99, 1.09), BEST_STATIC: (1.2, 1.1, 1.3)}
    figures = [replayed_figure(SETTING, name, replayed(PLAIN), Ratio(speed, 0.04)) for name, speed in speeds.items()]
    figures += [Figure(SETTING, SELECTOR, ALL, decoded(rival), *ratio) for rival, ratio in measured.items()]
    row = {"temperature": 0.2, "top_p": 0.9, "equal_texts": equal}
    return Evaluation(
        {"summary": {"by_setting": [row] * settings}, "decisions": [mode or own] * settings}, Table(figures)
    )


def said(*args: Any, **how: Any) -> str:
    (found,) = verdicts(evaluation(*args, **how))
    return found


def test_what_is_exported_is_told_by_its_speed_over_plain_decoding() -> None:
    expected = "T=0.2, top-p=0.9: the network is exported. It is 2.50 ±0.04 times as fast as plain decoding in replay "
    assert said(NETWORK).startswith(expected)
    assert said(COPYING, network=2.3).startswith(expected.replace("network", "lookup rule").replace("2.50", "2.40"))


@pytest.mark.parametrize(
    ("exported", "tree", "words"),
    [
        (NETWORK, 1.8, "Some of the gain is text that repeats itself: copying gives 40% of it."),
        (NETWORK, 1.1, "Most of the gain is text that repeats itself: copying gives 87% of it."),
        (NETWORK, 2.4, "Little of the gain is text that repeats itself: copying gives 0% of it."),
        (COPYING, 1.0, "copying gives 100% of it."),
    ],
)
def test_the_share_of_copying_is_told_in_words(exported: str, tree: float, words: str) -> None:
    """(2.4 - 1.8) / (2.5 - 1) = 0.4: of the gain over plain decoding, what the rule adds to the tree's speed."""
    other = {"network": 2.3} if exported == COPYING else {}
    assert f"{words} In wall-clock" in said(exported, best_static_tree=tree, **other)


def test_a_tree_copies_nothing() -> None:
    assert " times in decoding. In wall-clock" in said(STATIC, best_static_tree=2.6)


def test_what_was_decoded_stands_beside_what_was_replayed() -> None:
    both = "2.50 ±0.04 times as fast as plain decoding in replay and 1.90 [1.70, 2.10] times in decoding."
    assert both in said(NETWORK, (1.9, 1.7, 2.1))
    assert "in replay and 1.90 times in decoding." in said(NETWORK, (1.9, None, None))  # a single source


def test_no_selector_is_praised_that_loses() -> None:
    """To the rule or to the tree, replayed; or to the rule, decoded."""
    assert said(NETWORK, lookup_rule=2.6).startswith(
        "T=0.2, top-p=0.9: the lookup rule is 2.60 ±0.04 times as fast as plain decoding in replay. The network, which "
        "is exported, is 2.50 ±0.04 times as fast"
    )
    assert said(COPYING, network=2.3, best_static_tree=2.45).startswith(
        "T=0.2, top-p=0.9: the best static tree is 2.45 ±0.04 times"
    )
    assert said(NETWORK, over_rule=(0.9, 0.85, 0.95)).startswith(
        "T=0.2, top-p=0.9: the lookup rule is faster than the network, which is exported and decodes at 0.90 "
        "[0.85, 0.95] of its speed. In wall-clock"
    )


@pytest.mark.parametrize(
    ("over_rule", "words"),
    [
        ((1.06, 1.01, 1.11), "is there (1.060 [1.010, 1.110])"),
        ((1.04, 0.99, 1.09), "cannot be told from none (1.040 [0.990, 1.090])"),
        ((0.9, 0.85, 0.95), "is a loss (0.900 [0.850, 0.950])"),
        ((1.0, 1.0, 1.0), "is nil (both decode alike)"),
    ],
)
def test_whether_the_gain_is_there_in_wall_clock_is_one_sentence(
    over_rule: tuple[float, float, float], words: str
) -> None:
    expected = (
        f"In wall-clock time, prompt by prompt, the selector's gain over the lookup rule {words} and over the best "
        "static tree is there (1.200 [1.100, 1.300])."
    )
    assert said(NETWORK, over_rule=over_rule).endswith(expected)
    found = said(NETWORK, over_rule=over_rule, equal=[11, 12])
    assert found.endswith(f"{expected} All methods wrote the same text for 11 of 12 prompts.")


def test_where_no_draft_pays_plain_decoding_is_exported_by_its_name() -> None:
    nothing = {"best_static_tree": 1.0, "lookup_rule": 0.99, "network": 0.8}
    row = evaluation(STATIC, (1.0, 1.0, 1.0), mode=NOTHING, **nothing)
    expected = "T=0.2, top-p=0.9: plain decoding is exported: nothing that drafts is faster here. In wall-clock"
    assert verdicts(row)[0].startswith(expected)
    faster = said(STATIC, mode=NOTHING, **nothing | {"lookup_rule": 1.2})
    assert faster.startswith("T=0.2, top-p=0.9: the lookup rule is 1.20 ±0.04 times as fast as plain decoding")
    assert "Plain decoding is exported, because on the validation texts nothing was surely faster" in faster
    assert choices(row)[0]["exported"] == "plain decoding"
    config = Config.model_validate({"name": "x", "sampling": [{"temperature": 0.2, "top_p": 0.9}]})
    lines, program = next_steps(config, row)
    assert lines[0].startswith("Decode without a draft") and not program


def test_who_decides_and_why_is_told_in_sentences() -> None:
    network, rule, neither = (decisions(evaluation(name))[0] for name in (NETWORK, COPYING, STATIC))
    assert network.startswith("T=0.2, top-p=0.9: The network decides: on the validation texts it is ahead of the")
    assert network.endswith(
        "It is asked with early and then light features. On texts of more than 175 tokens the lookup rule decides."
    )
    assert rule.startswith("T=0.2, top-p=0.9: The lookup rule decides: ")
    assert rule.endswith("It copies 8 tokens after a match of 4 or more, and drafts (1, 6, 0) elsewhere.")
    assert "neither the network nor the lookup rule" in neither
    assert neither.endswith("errors over sources, so (1, 6, 0) is drafted everywhere.")


def test_the_verdict_is_80_columns_wide_and_nothing_is_cut() -> None:
    console = Console(width=80)
    with console.capture() as shown:
        console.print(table(choices(evaluation(NETWORK)), "a title"))
    lines = shown.get().splitlines()
    assert max(map(len, lines)) <= 80 and "…" not in shown.get()
    assert {"2.50 ±0.04", "2.45 [2.10, 2.90]"} <= {part.strip() for line in lines for part in line.split("  ")}


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
    found = evaluation(NETWORK, settings=len(config.sampling))
    lines, program = next_steps(config, found)
    assert lines == [f"The exported selector is {demo[0] / 'runs/demo/selector'}. This program decodes with it:"]
    exec(compile(program, "next step", "exec"), {})
    assert capsys.readouterr().out.strip()
    monkeypatch.chdir(tmp_path)
    assert next_steps(config, found) == (
        ["`espalier export` packages the selector."],
        "",
    )
    for folder in ("selector", "engines/vllm"):
        (tmp_path / "runs" / "demo" / folder).mkdir(parents=True)
    (tmp_path / "runs/demo/selector/config.json").write_text("{}")
    (tmp_path / "runs/demo/engines/vllm/README.md").write_text("how")
    lines, _ = next_steps(config, found)
    assert lines[1] == f"For vllm see {tmp_path / 'runs/demo/engines/vllm/README.md'}."
