"""A pair of configs without weights: times can be measured, and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from transformers import Gemma3TextConfig

from data_gen import timing
from pipelines.cli import run
from pipelines.config import load_config
from pipelines.latency.stage import summary, unsteady
from pipelines.pair.loading import load_pair
from selector.actions import Action
from selector.schema import InputError
from tests.pipelines.runs import ROOT

DEMO = ROOT / "configs" / "demo.yaml"

SHAPE = {"vocab_size": 300, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "head_dim": 16}


@pytest.fixture
def shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    for role, layers in (("target", 2), ("draft", 1)):
        Gemma3TextConfig(**SHAPE, num_hidden_layers=layers, num_key_value_heads=1).save_pretrained(tmp_path / role)
    monkeypatch.chdir(tmp_path)
    return ["pair.target=./target", "pair.draft=./draft"]


def test_the_profile_of_a_pair_without_weights_says_so(shapes: list[str]) -> None:
    config = load_config(DEMO, shapes)
    pair, cases = load_pair(config, shapes=True), [("traversal", Action.of(each)) for each in ((1, 0, 0), (1, 4, 0))]
    profile = timing.fitted(pair, timing.real_steps(pair, cases, [[1, 2, 3]], 60, 20), (20,), "here")
    assert profile.pair.startswith("random weights, ") and profile.target.at(100, 5) > 0
    row = {"action": "(1, 4, 0)", "predicted": 1.0, "measured": 1.0, "ratio": 1.0}
    assert "random weights" in str(summary(replace(profile, decide={}), [row]).title)


def test_predictions_that_miss_the_measured_steps_are_noticed() -> None:
    near, far = ([{"ratio": 1 + sign * share} for sign in (1, -1)] for share in (0.08, 0.16))
    assert unsteady([]) == unsteady(near) == ""
    assert unsteady([*near, *far]).startswith("predicted step times are 12% away")


def test_other_stages_want_weights(shapes: list[str]) -> None:
    with pytest.raises(InputError, match=r"pair.target: ./target holds a config and no weights"):
        run("data", DEMO, shapes, plan=False)
