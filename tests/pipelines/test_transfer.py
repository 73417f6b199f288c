"""The study of selectors where they were not trained, from a finished run to itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipelines.config import Config, load_config
from pipelines.data.recorded import load_traces
from pipelines.latency.profile import load_profile
from pipelines.studies import transfer
from pipelines.train.judging import by_setting
from selector.actions import EMPTY
from selector.decision import Mode
from selector.train.tuning import replay_mode
from tests.pipelines.runs import ROOT, SMALL


@pytest.fixture
def config(demo: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(demo[0])
    return load_config(ROOT / "configs" / "demo.yaml", SMALL)


def test_every_setting_has_a_row_for_whole_texts_and_one_for_their_ends(
    config: Config, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(transfer, "LATE", 10)
    monkeypatch.setattr(transfer, "SEEDS", 1)
    transfer.main(config, [config])
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| T")]
    assert [row[1] for row in rows] == ["all", "from 10"] * len(config.sampling)
    assert not any("nan" in cell or "inf" in cell for row in rows for cell in row)
    at_one = [row for row in rows if row[4].endswith("tree")]
    assert all(row[4].startswith("1.000 ±0.000") for row in at_one)  # the tree is its own base


def test_the_end_of_a_text_is_replayed_as_a_text_of_its_own(config: Config) -> None:
    profile = load_profile(config)
    timed = by_setting(config, load_traces(config, profile.pair)["test"], profile)[0]
    end = transfer._from(timed, 5)
    assert end.texts.size_X.tolist() == [size - 5 for size in timed.texts.size_X.tolist() if size > 5]
    assert torch.equal(end.texts.number_R.bincount()[:1], torch.tensor([len(end.texts)]))
    plain = Mode(*timed.setting, EMPTY)  # one token a step
    assert replay_mode(end, {}, plain).steps_X.tolist() == end.texts.size_X.tolist()
