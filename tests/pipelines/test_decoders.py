"""Which decoder a run uses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data_gen import timing
from data_gen.decoding import COMPILED, EAGER, GRAPH
from data_gen.decoding.loop import Step
from pipelines.config import load_config
from pipelines.latency.profile import faster_decoder
from selector.actions import EMPTY

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"


@pytest.mark.parametrize(
    ("asked", "device", "seconds", "expected"),
    [
        ("auto", "cpu", {EAGER: 1.0, GRAPH: 0.8}, GRAPH),
        ("auto", "cuda", {EAGER: 1.0, COMPILED: 0.3}, COMPILED),
        ("auto", "cuda", {EAGER: 1.0, COMPILED: 1.3}, EAGER),
        ("eager", "cuda", {}, EAGER),
        ("graph", "cpu", {GRAPH: 1.0, COMPILED: 0.7}, COMPILED),
    ],
)
def test_the_faster_decoder_is_taken(
    asked: str, device: str, seconds: dict[str, float], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the steps of each kind that may be used, and of no other."""
    pair = SimpleNamespace(device=torch.device(device), decoder=EAGER, spare={}, has_head=False)
    timed: list[str] = []

    def steps(own: SimpleNamespace, *_: object) -> dict[str, list[Step]]:
        timed.append(own.decoder)
        return {"tree": [Step(1, EMPTY, 0, 1, {"draft": seconds[own.decoder]})]}

    monkeypatch.setattr(timing, "real_steps", steps)
    monkeypatch.setattr("shutil.which", lambda _: "/usr/bin/g++")
    config = load_config(DEMO, [f"pair.decoder={asked}"])
    assert faster_decoder(config, pair, [[1, 2]]) == expected  # type: ignore[arg-type]
    assert timed == list(seconds)
