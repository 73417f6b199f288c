"""The study of what a selector could gain at most, on a finished run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from data_gen.text_labels.labels import label_text
from pipelines.config import load_config
from pipelines.studies import ceiling
from selector.actions import ActionSpace
from tests.pipelines.runs import ROOT, SMALL


def test_every_setting_has_a_row(
    demo: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever knows the text itself is never slower than whoever knows what to expect."""
    monkeypatch.chdir(demo[0])
    monkeypatch.setattr(ceiling, "ROLLOUTS", 3)
    monkeypatch.setattr(ceiling, "TEXTS", 2)
    config = load_config(ROOT / "configs" / "demo.yaml", SMALL)
    ceiling.main(config)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    rows = [line.strip("| ").split(" | ") for line in lines]
    assert rows[0] == ceiling.HEADS.split(" | ")
    assert len(rows) == 1 + len(config.sampling)
    for row in rows[1:]:
        expected, hindsight = (float(cell.split()[0]) for cell in row[4:])
        assert 1 <= expected <= hindsight


def test_expected_labels_are_the_mean_over_continuations() -> None:
    """Of chains, whose labels no draw of siblings changes: each continuation is labelled by itself."""
    torch.manual_seed(0)
    B, D, V = 4, ceiling.DEPTH, 7
    target_BDV, draft_BDV = torch.rand(2, B, D, V).add(0.1).softmax(-1)
    texts_BD = torch.randint(V, (B, D + 1))
    rollouts = ceiling.Rollouts(texts_BD, target_BDV, draft_BDV, draft_BDV.log())
    found_S = ceiling.expected(rollouts, "traversal", 1)
    space = ActionSpace.recorded()
    chains = [space.index(space.chain(length)) for length in range(1, D + 1)]
    last_1V = torch.full((1, V), 1 / V)
    each = [
        label_text(texts_BD[b], *(torch.cat([rows[b], last_1V]) for rows in (target_BDV, draft_BDV)), ["traversal"])
        for b in range(B)
    ]
    wanted = torch.stack(each)[:, 0, 0].mean(0)
    own = ActionSpace.default()
    wanted_L = wanted[[own.index(own.chain(length)) for length in range(1, D + 1)]]
    torch.testing.assert_close(space.efficiencies(found_S.unsqueeze(0))[0, chains], wanted_L, atol=1e-6, rtol=0)
