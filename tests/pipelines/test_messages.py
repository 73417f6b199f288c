"""Messages send a user to stages that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipelines.cli import NAMES
from pipelines.config import load_config
from pipelines.run import read_record, record_path, verify
from selector.schema import InputError
from tests.pipelines.runs import ROOT

SOURCES = {
    path: path.read_text() for room in ("selector", "data_gen", "pipelines") for path in (ROOT / room).rglob("*.py")
}
RECORDS = sorted({name for text in SOURCES.values() for name in re.findall(r'\bStage\(\s*"([^"]+)"', text)})


def test_stages_that_are_named_exist() -> None:
    named = {
        (path.name, name) for path, text in SOURCES.items() for name in re.findall(r"\b[Tt]he ([\w-]+) stage\b", text)
    }
    assert len(named) > 10
    assert {(file, name) for file, name in named if name not in NAMES} == set()


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("content", [None, "[]", '{"depends": {}, "finished": false}'], ids=["none", "damaged", "open"])
def test_advice_on_every_record_names_a_stage(
    name: str, content: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config(ROOT / "configs" / "demo.yaml", [])
    path = record_path(config, name)
    if content is not None:
        path.parent.mkdir(parents=True)
        path.write_text(content)
    with pytest.raises(InputError) as error:
        (read_record if content is None else verify)(config, name)
    (advised,) = re.findall(r"the ([\w-]+) stage", str(error.value))
    assert advised in NAMES
