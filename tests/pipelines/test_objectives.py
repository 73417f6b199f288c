"""The study of training objectives on a finished run: every variant trains, and has its row in both tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.config import load_config
from pipelines.studies.objectives import VARIANTS, main
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
