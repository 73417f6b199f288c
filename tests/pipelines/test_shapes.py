"""What is said of measured times, and what is assumed where a pair has no weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from data_gen import timing
from data_gen.models.checkpoints import RANDOM
from pipelines.latency.stage import summary, unsteady
from pipelines.quick.machine import assumed, contradiction
from selector.latency import Correction, gpu_like


def test_quick_then_assumes_acceptance() -> None:
    """On a machine where a draft pass takes a tenth of a target pass: 1 + 0.5 + 0.25 tokens in 1.21 instead of 1.01."""
    profile = gpu_like(f"{RANDOM}x", ["block"], 0.1)
    row = {"action": "(1, 4, 0)", "predicted": 1.0, "measured": 1.0, "ratio": 1.0}
    assert "random weights" in str(summary(replace(profile, decide={}), [row]).title)
    columns = [list(column.cells) for column in assumed(profile).columns]
    found = {acceptance: rest for acceptance, *rest in zip(*columns, strict=True)}
    assert found["0.5"][:2] == ["2", "1.75"]
    assert float(found["0.5"][2]) == pytest.approx(1.75 / (1.21 / 1.01), abs=0.01)
    assert float(found["0.9"][2]) > float(found["0.8"][2]) > float(found["0.7"][2])


def test_times_that_contradict_each_other_are_noticed() -> None:
    profile = gpu_like("a pair", ["block"], 0.1)
    quicker = replace(profile, corrections={"block": Correction(drafting=-1.0)})
    assert contradiction(profile, "block") == "" and contradiction(quicker, "block").startswith("a tree seems quicker")


def test_a_busy_machine_is_noticed() -> None:
    whole, own = timing.clocks()
    assert timing.disturbance(torch.device("cpu"), (whole, own - 900)) == ""
    assert timing.disturbance(torch.device("cpu"), (whole - 900, own)).startswith("other programs had this core for ")
    assert timing.disturbance(torch.device("cuda"), (whole - 900, own)) == ""


def test_predictions_that_miss_the_measured_steps_are_noticed() -> None:
    near, far = ([{"ratio": 1 + sign * share} for sign in (1, -1)] for share in (0.08, 0.16))
    assert unsteady([]) == unsteady(near) == ""
    assert unsteady([*near, *far]).startswith("predicted step times are 12% away")
