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
    monkeypatch.setattr(boosted, "ROWS", ((2, 0), (1, 0), (1, 2)))
    monkeypatch.setitem(boosted.SIZES, "max_iter", 3)
    config = load_config(ROOT / "configs" / "demo.yaml", SMALL)
    boosted.main(config)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    rows = [line.strip("| ").split(" | ") for line in lines]
    assert rows[0] == boosted.HEADS.split(" | ") and len(rows) == 1 + 3 * len(config.sampling)
    for half, whole, knowing in zip(rows[1::3], rows[2::3], rows[3::3], strict=True):
        assert half[0] == whole[0] == knowing[0] and int(half[1]) < int(whole[1]) == int(knowing[1])
        assert (whole[2], knowing[2]) == ("0", "2") and min(float(row[3].split()[0]) for row in (whole, knowing)) > 0


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


def test_features_ahead_are_those_of_the_next_roots_of_the_same_text() -> None:
    timed = Timed(texts(6, 5, seed=3), "traversal", profile())
    learned = boosted.Boosted(timed, LIGHT, 0, ahead=2)
    own_RF, later_RF = timed.texts.scalars_RF[:, learned.scalars], learned._inputs(timed.texts)
    width, number_R, size = own_RF.shape[1], timed.texts.number_R, int(timed.texts.size_X[0])
    for n in (1, 2):
        found_RF, inside_R = later_RF[:, n * width : (n + 1) * width], number_R < size - n
        assert torch.equal(found_RF[inside_R], own_RF[number_R >= n])
        assert found_RF[~inside_R].isnan().all()
