"""The study of boosted trees, on a finished run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipelines.config import load_config
from pipelines.studies import boosted
from selector.schema import EARLY, LIGHT
from selector.train.data import Timed
from tests.pipelines.runs import ROOT, SMALL
from tests.selector.synthetic import EASY, HARD, SPACE, profile, texts


def test_every_setting_and_share_has_a_row(
    demo: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(demo[0])
    monkeypatch.setattr(boosted, "SHARES", (2, 1))
    monkeypatch.setitem(boosted.SIZES, "max_iter", 3)
    config = load_config(ROOT / "configs" / "demo.yaml", SMALL)
    boosted.main(config)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    rows = [line.strip("| ").split(" | ") for line in lines]
    assert rows[0] == boosted.HEADS.split(" | ") and len(rows) == 1 + 2 * len(config.sampling)
    for half, whole in zip(rows[1::2], rows[2::2], strict=True):
        assert half[0] == whole[0] and int(half[1]) < int(whole[1]) and float(whole[2].split()[0]) > 0


def test_boosted_trees_learn_what_a_scalar_tells() -> None:
    """Which roots are easy: of these, a chain of two yields that much, to 0.1 tokens."""
    train, other = (Timed(texts(40, 30, seed=seed), "traversal", profile()) for seed in (1, 2))
    learned = boosted.Boosted(train, LIGHT, 0).efficiencies(other)[:, SPACE.index(SPACE.chain(2))]
    truth = other.space.efficiencies(other.survivals_RS)[:, SPACE.index(SPACE.chain(2))]
    known_R = ~other.texts.unknown_R
    assert float((learned - truth)[known_R].abs().mean()) < 0.1
    assert float(learned[known_R].max()) > 1 + EASY > 1 + HARD > float(learned[known_R].min()) - 0.3
    assert max(boosted.Boosted(train, EARLY, 0).scalars) < train.texts.schema.first
    assert torch.isfinite(learned).all()
