from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from data_gen.traces import flat
from pipelines.cli import SIZES
from pipelines.config import Config, load_config
from pipelines.pair.models import PairSource
from pipelines.pair.stage import in_small
from tests.checks import one_line
from tests.pipelines.runs import ROOT, demo_config, write_lines


@pytest.mark.parametrize(
    "file", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda path: path.name
)
def test_every_shipped_config_is_valid(file: Path) -> None:
    assert load_config(file, []).name == file.stem


def test_a_quick_run_is_the_run_in_small_where_nothing_else_is_said() -> None:
    """Its sizes give way to the command line, and a draft that the run has trained stays where that
    run has it."""
    options = ["name=own", "pair.target=a/b", "pair.draft=distilled", "data.texts=9"]
    config = in_small(load_config(None, [*SIZES, *options]))
    assert (config.name, config.data.texts, config.data.seconds) == ("own-quick", 9, 20)
    assert config.pair.draft == "runs/own/distil/draft"
    assert in_small(Config(name="own")).pair == Config(name="own").pair


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("data.textz=3", "unknown key data.textz; did you mean data.texts?"),
        ("data.texts=many", "data.texts: Input should be a valid integer"),
        ("train.verifier=travresal", "train.verifier: 'travresal' is not among verifiers"),
        ("verifiers=[travresal]", "verifiers: unknown verifier 'travresal'; known are"),
        ("verifiers=[khisti,lifted_uniform]", "verifiers: khisti has no labels along a text"),
        ('distil={"a\\nb": 1}', r"unknown key 'distil.a\nb'"),
        (
            "pair.target=some/model",
            "pair: draft: the one that comes with Espalier is not for the target some/model",
        ),
        (
            "sampling=[{temprature: 1}]",
            "unknown key sampling.0.temprature; did you mean sampling.0.temperature?",
        ),
        (
            "sampling.temperature=0.7",
            "sampling.temperature: sampling is a list of 2: name one of them, as "
            "sampling.0.temperature, or give the whole list, as 'sampling=[{..}]'",
        ),
        ("sampling.2.top_p=0.9", "sampling.2.top_p: sampling is a list of 2: name one of them, as"),
        ("sampling=3 & sampling.top_p=0.9", "sampling"),
        (
            "prompts.sets.name=gsm8k",
            "prompts.sets.name: prompts.sets is a list of 0: give the whole list, as 'prompts.sets",
        ),
        ("sampling=[{top_p: 0.5},{top_p: 0.5}]", "sampling: a setting is listed twice"),
        ("name=../x", "name: String should match pattern"),
        ("data", "'data': an override reads section.key=value"),
        ("logs=[1]", "logs: Input should be a valid dictionary or instance of Logs"),
        ("name=2020-01-01", "name: not YAML of keys and values"),
        ("name.x=1", "name: Input should be a valid string"),
        ("sampling=[{top_k: -1}]", "sampling.0.top_k: Input should be greater than or equal to 0"),
        (
            "sampling=[{min_p: 0.1}, {top_k: 20}]",
            "settings that differ in top_k or min_p alone need runs of",
        ),
        (
            "prompts.longer=start",
            "prompts: longer: a prompt in a chat template cannot be cut: drop",
        ),
        (
            "prompts.chat=false & prompts.system=hello",
            "prompts: system: without chat there is no system turn",
        ),
        (
            "prompts.file=a.jsonl & prompts.sets=[{name: gsm8k}]",
            "prompts: sets: prompts come from a file or from",
        ),
        ("prompts.sets=[{name: gsm9k}]", "prompts.sets.0: name: 'gsm9k' is none of math500, "),
        ("prompts.sets=[{name: lines}]", "prompts.sets.0: file: lines is on no hub: name a file"),
    ],
    ids=lambda value: value[:40],
)
def test_a_wrong_key_or_value_is_one_line_that_names_it(overrides: str, message: str) -> None:
    with one_line("", message):
        demo_config(*overrides.split(" & "))


@pytest.mark.parametrize(
    ("file", "overrides", "temperatures"),
    [
        ("demo.yaml", ["sampling.0.temperature=0.7"], [0.7, 0.8]),
        ("demo.yaml", ["sampling=[{temperature: 0.7}]"], [0.7]),
        ("llama_eagle3.yaml", ["sampling.temperature=0.7"], [0.7]),
        (None, ["name=x", "sampling.temperature=0.7"], [0.7]),  # in place of the default
        (None, ["name=x", "sampling.0.temperature=0.7"], [0.7]),
        (None, ["name=x", "sampling.top_p=0.9"], [1.0]),
    ],
)
def test_a_key_of_a_list_means_one_of_its_entries(
    file: str | None, overrides: list[str], temperatures: list[float]
) -> None:
    """Or the only one."""
    config = load_config(ROOT / "configs" / file if file else None, overrides)
    assert [setting.temperature for setting in config.sampling] == temperatures


def test_no_number_may_be_infinite() -> None:
    """Of every key with a number as its default."""
    numbers = [
        key
        for key, value in flat(Config(name="x").model_dump()).items()
        if type(value) in (int, float)
    ]
    assert len(numbers) > 20
    for key in numbers:
        with one_line("", key):
            demo_config(f"{key}=.inf")


@pytest.mark.parametrize("content", ["- a list", "key: [unclosed"])
def test_a_file_that_is_no_config_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "run.yaml").write_text(content)
    for name, message in (("run", ""), ("none", "No such file")):
        with one_line("", f"{name}.yaml: {message}"):
            load_config(tmp_path / f"{name}.yaml", [])


def test_a_file_is_utf_8_wherever_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # as another locale's
    monkeypatch.setattr("io.text_encoding", lambda encoding, *_: encoding or "latin-1")
    (tmp_path / "run.yaml").write_text("name: x\nprompts: {file: müller.jsonl}", encoding="utf-8")
    assert load_config(tmp_path / "run.yaml", []).prompts.file == Path("müller.jsonl")


@pytest.mark.parametrize(
    "pair",
    [
        {},
        {"target": "/models/SmolLM2-135M-Instruct"},
        {"target": "some/model", "draft": "distilled"},
        {"target": "some/model", "draft": "some/small"},
    ],
)
def test_every_target_has_a_draft_of_its_own(pair: dict[str, str]) -> None:
    config = load_config(None, ["name=x", *(f"pair.{key}={value}" for key, value in pair.items())])
    assert config.pair.draft == pair.get("draft", "smollm2")


@pytest.mark.parametrize(("level", "same"), [("light", True), ("full", False)])
def test_the_stride_of_training_makes_no_traces_anew(
    level: str, same: bool, tmp_path: Path
) -> None:
    """Only hidden states are recorded at every stride-th root."""
    file = write_lines(
        tmp_path / "prompts.jsonl", ({"text": f"prompt number {n}"} for n in range(40))
    )
    keys = [f"data.features={level}", f"prompts.file={file}"]
    one, two = (PairSource(demo_config(*keys, f"data.stride={n}")) for n in (1, 2))
    for source in (one, two):
        source.pair = SimpleNamespace(fingerprint="pair")
    assert (one.depends() == two.depends()) is same
