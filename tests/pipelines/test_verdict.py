"""What a reader of an evaluation sees first."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.config import Config
from pipelines.evaluate.methods import BEST_STATIC, COPYING, NETWORK, PLAIN, SELECTOR, STATIC
from pipelines.evaluate.table import ALL, Figure, Table, decoded, replayed, replayed_figure
from pipelines.evaluate.verdict import Evaluation, next_step, title, verdicts
from selector.actions import EMPTY, Action
from selector.decision import Mode
from selector.sampling import Sampling
from selector.train.replay import Ratio

SPEEDS = {BEST_STATIC: 1.8, COPYING: 2.4, NETWORK: 2.5}
TREE = Mode(Sampling(0.2, 0.9), Action(1, 6, 0)).row()
MODES = {
    NETWORK: TREE | {"feature_levels": ["early", "light"], "rule": [4, 8], "longest": 175},
    COPYING: TREE | {"feature_levels": ["match"], "rule": [4, 8]},
    STATIC: TREE,
    PLAIN: TREE | {"action": list(EMPTY)},
}
SETTING = "T=0.2, top-p=0.9"
CONFIG = Config.model_validate({"name": "x", "sampling": [{"temperature": 0.2, "top_p": 0.9}]})


def evaluation(
    exported: str,
    decoded_speed: tuple[float, float | None, float | None] = (2.45, 2.1, 2.9),
    over_rule: tuple[float, float | None, float | None] = (1.04, 0.99, 1.09),
    **other: float,
) -> Evaluation:
    """An evaluation of one sampling setting; `other` replaces replayed speeds over plain decoding."""
    speeds = SPEEDS | {name.replace("_", " "): speed for name, speed in other.items()}
    speeds[SELECTOR] = {STATIC: speeds[BEST_STATIC], PLAIN: 1.0, **speeds}[exported]
    measured = {PLAIN: decoded_speed, COPYING: over_rule, BEST_STATIC: (1.2, 1.1, 1.3)}
    figures = [replayed_figure(SETTING, name, replayed(PLAIN), Ratio(speed, 0.04)) for name, speed in speeds.items()]
    figures += [Figure(SETTING, SELECTOR, ALL, decoded(rival), *ratio) for rival, ratio in measured.items()]
    row = {"temperature": 0.2, "top_p": 0.9}
    return Evaluation({"summary": {"by_setting": [row]}, "decisions": [MODES[exported]]}, Table(figures))


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (
            evaluation(NETWORK),
            "the network is exported. It is 2.50 ±0.04 times as fast as plain decoding in replay and "
            "2.45 [2.10, 2.90] times in decoding. In wall-clock time",
        ),
        (evaluation(COPYING, network=2.3), "the lookup rule is exported. It is 2.40 ±0.04 times as fast as plain"),
        (evaluation(NETWORK, (1.9, None, None)), "2.50 ±0.04 times as fast as plain decoding in replay and 1.90 times"),
        (evaluation(NETWORK, lookup_rule=2.6), "in decoding. The lookup rule is faster in replay: 2.60 ±0.04 times."),
        (evaluation(STATIC), "the static tree is exported. It is 1.80 ±0.04 times as fast"),
        (evaluation(PLAIN), "plain decoding is exported: on the validation texts nothing was surely faster. The net"),
        (
            evaluation(PLAIN, best_static_tree=1.0, lookup_rule=0.9, network=0.8),
            "nothing was surely faster. In wall-clock time",
        ),
    ],
)
def test_what_is_exported_is_told_with_what_is_faster(found: Evaluation, words: str) -> None:
    """By a single source there is no interval; no selector is praised that loses."""
    (said,) = verdicts(found)
    assert said.startswith(f"{SETTING}: ") and words in said


@pytest.mark.parametrize(
    ("over_rule", "words"),
    [
        ((1.06, 1.01, 1.11), "is there (1.060 [1.010, 1.110])"),
        ((1.04, 0.99, 1.09), "cannot be told from none (1.040 [0.990, 1.090])"),
        ((0.9, 0.85, 0.95), "is a loss (0.900 [0.850, 0.950])"),
        ((1.0, 1.0, 1.0), "is nil (both decode alike)"),
        ((1.1, None, None), "has no interval (1.100)"),
    ],
)
def test_whether_the_gain_is_there_in_wall_clock_is_one_sentence(
    over_rule: tuple[float, float | None, float | None], words: str
) -> None:
    (said,) = verdicts(evaluation(NETWORK, over_rule=over_rule))
    assert said.endswith(
        f"In wall-clock time, prompt by prompt, the selector's gain over the lookup rule {words} and over the best "
        "static tree is there (1.200 [1.100, 1.300])."
    )


def test_the_title_names_the_pair_and_the_machine() -> None:
    own = Config.model_validate({"name": "mine", "pair": {"target": "org/large", "draft": "/models/small/"}})
    assert title(own, "H100, bfloat16") == "mine: large with small on H100, bfloat16"
    assert title(Config(name="mine"), "a CPU") == "mine: smollm2 with its draft on a CPU"


def test_the_next_step_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    said, program = next_step(CONFIG, evaluation(PLAIN))
    assert said.startswith("Decode without a draft") and not program
    assert next_step(CONFIG, evaluation(NETWORK)) == ("`espalier export` packages the selector.", "")
    folder = tmp_path / "runs" / "x" / "selector"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    said, program = next_step(CONFIG, evaluation(NETWORK))
    assert said.startswith(f"The exported selector is {folder}. This program")
    assert compile(program, "program", "exec") and "temperature=0.2, top_k=0, top_p=0.9)" in program
