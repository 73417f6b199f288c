"""The study of training objectives on a finished run: every variant trains, and has its row in both tables."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pipelines.config import load_config
from pipelines.data.recorded import load_traces
from pipelines.latency.profile import load_profile
from pipelines.studies import objectives
from pipelines.studies.objectives import VARIANTS, averaged, main
from selector.train.module import learned_rows
from tests.pipelines.runs import ROOT, SMALL


def test_every_variant_has_a_row_over_the_rule_and_over_the_tree(
    demo: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(demo[0])
    config = load_config(ROOT / "configs" / "demo.yaml", SMALL)
    main(config, seeds=(1,))
    rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    own = [row for row in rows if row[0] in VARIANTS]
    assert [row[0] for row in own] == [*VARIANTS, *VARIANTS]
    speeds = [[float(cell.split(" ")[0]) for cell in row[1:]] for row in own]
    assert all(len(row) == len(config.sampling) and min(row) > 0 for row in speeds)
    assert len({tuple(row) for row in speeds}) > len(VARIANTS)  # the variants differ


def test_averaged_labels_are_those_of_continuations(demo: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """At the roots that are learned from, and nowhere else; greedy text has only one continuation."""
    monkeypatch.chdir(demo[0])
    monkeypatch.setattr(objectives, "track", lambda texts, *_, **__: list(texts)[::2])
    config = load_config(ROOT / "configs" / "demo.yaml", SMALL)
    texts, verifier = load_traces(config, load_profile(config).pair)["train"], config.train.verifier
    strided = config.model_copy(update={"data": config.data.model_copy(update={"stride": 2})})
    found = averaged(strided, texts, 3)
    rows = slice(None)
    changed_RS = found.labels(verifier, rows, found.space) != texts.labels(verifier, rows, texts.space)
    changed_R = changed_RS.any(-1)
    trees = found.space.tree_survivals
    assert changed_RS[:, :trees].any() and changed_RS[:, trees:].any()
    few = found.setting_of((1.0, 1.0))
    assert few.labels(verifier, rows, few.space).shape == (int(few.size_X.sum()), changed_RS.shape[1])
    learned_R = torch.zeros(len(changed_R), dtype=torch.bool)
    learned_R[learned_rows(texts, 2)] = True
    greedy_R = texts.setting_X[texts.text_R] == texts.settings.index((0.0, 1.0))
    assert changed_R.any() and not changed_R[~learned_R | greedy_R].any()
    assert found.survivals[verifier].min() >= 0
