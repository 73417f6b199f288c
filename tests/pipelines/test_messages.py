"""Messages send a user to stages that exist."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data_gen.texts.prompt_sets import read_set
from data_gen.texts.prompts import read_prompts
from data_gen.traces import read_manifest
from pipelines.cli import NAMES
from pipelines.config import load_config
from pipelines.config.reading import parts
from pipelines.run import read_json, read_record, record_path, verify
from pipelines.tracking import mlflow_run
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


DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("override", "message"),
    [
        (f"data.texts={DEEP}", "data.texts: the value is nested too deep"),
        ("name=" + "a" * 300, "name: String should have at most 100 characters"),
        ("data.texts=1000000000000", "data.texts: Input should be less than or equal to 10000000"),
    ],
    ids=["deep", "name", "size"],
)
def test_an_absurd_value_is_one_line(override: str, message: str) -> None:
    with pytest.raises(InputError) as error:
        load_config(ROOT / "configs" / "demo.yaml", [override])
    assert message in str(error.value) and "\n" not in str(error.value)


def test_files_that_are_nested_too_deep_are_named(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(f"name: x\ndata: {DEEP}")
    (tmp_path / "manifest.json").write_text(DEEP)
    with pytest.raises(InputError, match=r"run\.yaml: nested too deep"):
        load_config(tmp_path / "run.yaml", [])
    with pytest.raises(InputError, match=r"manifest\.json is damaged"):
        read_manifest(tmp_path)
    with pytest.raises(InputError, match=r"manifest\.json is damaged"):
        read_json(tmp_path / "manifest.json", "data")


@pytest.mark.parametrize("key", ["text", "source", "id"])
def test_half_of_a_surrogate_pair_is_named(key: str, tmp_path: Path) -> None:
    whole = json.dumps({"text": "\N{GRINNING FACE}"})
    half = json.dumps({"text": "a", key: "a \ud83d b"})
    (tmp_path / "prompts.jsonl").write_text(f"{whole}\n{half}\n")
    with pytest.raises(InputError, match=r"prompts\.jsonl:2: holds half of a surrogate pair"):
        read_prompts(tmp_path / "prompts.jsonl")


def test_a_path_with_signs_of_a_uri_holds_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a #b?c%20d"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = load_config(ROOT / "configs" / "demo.yaml", [])
    for _ in range(2):  # the second time, the store is there
        with mlflow_run(config, "report", ("prompts",)) as mlflow:
            mlflow.log_text("found", "found.txt")
    assert len(list((folder / "mlruns").rglob("found.txt"))) == 2
    assert [path.name for path in tmp_path.iterdir()] == [folder.name]


def test_a_record_of_a_data_set_that_is_nested_too_deep_is_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "set.jsonl"
    path.write_text(f'{{"problem": {DEEP}{"]" * len(DEEP)}}}')
    with pytest.raises(InputError, match=r"cannot read .*set\.jsonl: not JSON: nested too deep"):
        read_set("math500", path)


PACKERS: dict[str, Callable[..., Any]] = {
    ".jsonl": open,
    ".jsonl.gz": gzip.open,
    ".json.gz": gzip.open,
    ".jsonl.bz2": bz2.open,
    ".jsonl.xz": lzma.open,
}


@pytest.mark.parametrize("suffix", [*PACKERS, ".json"])
def test_no_data_set_that_is_nested_too_deep_crashes(suffix: str, tmp_path: Path) -> None:
    """Packed or not, as one object a line or as one array."""
    path = tmp_path / f"set{suffix}"
    record = f'{{"problem": {DEEP}{"]" * len(DEEP)}}}'.encode()
    with PACKERS.get(suffix, open)(path, "wb") as file:
        file.write(record if suffix.startswith(".jsonl") else b"[" + record + b"]")
    with pytest.raises(InputError, match=rf"cannot read .*set{suffix}: .*nested too deep"):
        read_set("math500", path)


def test_no_number_of_the_config_may_be_infinite() -> None:
    """Of every key with a number as its default."""
    numbers = {key.name for part in parts() for key in part.keys if re.fullmatch(r"-?[\d.]+", key.default)}
    numbers -= {key for key in numbers if key.startswith("sampling.")}  # a list of settings
    assert len(numbers) > 20
    for key in numbers:
        for value in (".inf", "-.inf", ".nan"):
            with pytest.raises(InputError) as error:
                load_config(ROOT / "configs" / "demo.yaml", [f"{key}={value}"])
            assert key in str(error.value) and "\n" not in str(error.value)
