"""The study of different branches on a finished run: a row for every clock and setting, and decoded prompts."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.config import load_config
from pipelines.studies.branches import HEADS, main
from tests.pipelines.runs import ROOT, SMALL


def test_every_clock_and_setting_has_a_row(
    demo: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(demo[0])
    config = load_config(ROOT / "configs" / "demo.yaml", [*SMALL, "evaluate.prompts=2"])
    main(config)
    out = capsys.readouterr().out
    lines = out.splitlines()
    rows = [line.strip("| ").split(" | ") for line in lines if line.startswith("|")]
    assert rows[0] == HEADS.split(" | ")
    of_clocks = [row for row in rows if len(row) == 8 and "T = " in row[1]]
    assert len(of_clocks) == 5 * len(config.sampling)
    assert all("±" in cell for row in of_clocks for cell in row[3:])
    assert "95% interval" in out.partition("\ndecoded at ")[2]
