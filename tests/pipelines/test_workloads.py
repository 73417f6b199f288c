"""The study of workloads on a finished run: fixed choices are the fastest ones, and every kind has its row."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from data_gen.models.pair import ModelPair
from pipelines.config import Config, load_config
from pipelines.data.recorded import load_traces, settings_of
from pipelines.latency.profile import load_profile
from pipelines.pair.loading import load_pair
from pipelines.studies.workloads import EVERYTHING, STEP, FixedChoices, main, of_kind, step_shaped
from selector.train.data import Timed
from selector.train.tuning import replay_mode
from tests.pipelines.runs import ROOT, SMALL


@pytest.fixture
def config(demo: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> Config:
    monkeypatch.chdir(demo[0])
    return load_config(ROOT / "configs" / "demo.yaml", [*SMALL, "evaluate.gpu_like=[0.05]"])


def test_the_best_fixed_choice_is_the_fastest_of_all_on_the_texts_it_is_taken_from(config: Config) -> None:
    profile = load_profile(config, load_pair(config))
    for setting in settings_of(config):
        texts = load_traces(config, profile.pair)["train"].setting_of(setting)
        fixed = FixedChoices.of(config, setting, texts, profile)
        for kind in (EVERYTHING, texts.kind_X[0]):
            index_X = of_kind(texts, kind)
            best, *others = [fixed.best(index_X), *fixed.choices_C[::40], *fixed.choices_C[-24:]]
            speed, *slower = (
                replay_mode(Timed(texts, verifier, profile), {}, mode) for verifier, mode in (best, *others)
            )
            mine = [float(each.tokens_X[index_X].sum() / each.seconds_X[index_X].sum()) for each in (speed, *slower)]
            assert all(mine[0] >= each * (1 - 1e-5) for each in mine[1:])


def test_every_kind_has_a_row_on_every_clock(config: Config, capsys: pytest.CaptureFixture[str]) -> None:
    main(config)
    lines = capsys.readouterr().out.splitlines()
    clocks = [line for line in lines if line.startswith("**")]
    assert clocks == ["**this machine**", "**gpu_like_1/20**", f"**steps of {STEP} tokens**"]
    rows = [line.split(" | ") for line in lines if line.startswith("| T = ")]
    everything = [row for row in rows if row[1] == EVERYTHING]
    assert len(everything) == len(clocks) * len(config.sampling)
    assert all(row[4] == "1.000 ±0.000" for row in everything)  # it is its own base
    assert len({row[1] for row in rows}) > 1 and not any("nan" in cell for row in rows for cell in row)


def test_the_step_shaped_clock_rises_after_every_few_tokens(config: Config, pair: ModelPair) -> None:
    table = step_shaped(pair.fingerprint, config).target
    seconds = torch.tensor([table.at(1, tokens) for tokens in range(1, 33)]).view(-1, STEP)
    assert torch.equal(seconds, seconds[:, :1].expand_as(seconds))
    assert math.isclose(seconds[1, 0] - seconds[0, 0], 0.5 * seconds[0, 0], rel_tol=1e-5)
