"""From data sets in small files to the prompts of a run, and the plans of the large pairs'
configs."""

from __future__ import annotations

import json
import shutil
from datetime import date
from itertools import chain
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from data_gen.models.pair import ModelPair
from data_gen.texts.prompts import Prompt, read_prompts
from pipelines.cli import run
from pipelines.config import load_config
from pipelines.pair.stage import (
    all_prompts,
    encode,
    form_of,
    load_pair,
    prompts_depend,
    prompts_of,
)
from pipelines.run import Stage
from selector.schema import InputError
from selector.train.data import SPLITS
from tests.data_gen.test_prompt_sets import RECORDS
from tests.pipelines.runs import (
    DEMO,
    ROOT,
    SMALL_PAIR,
    TARGET,
    UNTEMPLATED,
    demo_config,
    failure,
    write_lines,
)
from tests.tiny import TEMPLATE

LARGE = ("qwen", "spec_bench")
COUNT = 40  # records of a set
GSM8K = "prompts.sets=[{name: gsm8k, file: gsm8k.jsonl, prompts: %d}]"


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a file of every data set: `COUNT` records, and a long one."""
    folder = tmp_path_factory.mktemp("sets")
    for name, record, *_ in RECORDS:
        lines = []
        for ending in (*(f" {n}" for n in range(COUNT)), " on and on" * 40):
            line = json.dumps(record)
            lines.append(line.replace(".", f"{ending}.").replace("?", f"{ending}?"))
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
    return folder


def overrides(folder: Path, *names: str) -> list[str]:
    sets = ", ".join(
        f"{{name: {name}, file: {folder / f'{name}.jsonl'}, prompts: 20}}" for name in names
    )
    return [*SMALL_PAIR, f"prompts.sets=[{sets}]"]


@pytest.mark.parametrize("extra", ["", " and more of it"], ids=["equal", "equal once cut"])
def test_a_prompt_that_a_file_repeats_is_in_one_split(
    extra: str, inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = [f"number {n % 100}" + " text follows it" * 6 + extra * (n // 100) for n in range(300)]
    write_lines(Path("prompts.jsonl"), ({"text": text} for text in texts))
    options = [*SMALL_PAIR, *UNTEMPLATED, "prompts.tokens=16", "prompts.file=prompts.jsonl"]
    run("pair", DEMO, options, plan=False)
    output = " ".join(capsys.readouterr().out.split())
    assert "200 with the tokens of an earlier one are left out" in output
    config = demo_config(*options)
    pair = load_pair(config)
    in_splits = []
    for split in SPLITS:
        in_splits.append({tuple(encode(config, pair, p)) for p in prompts_of(config, pair, split)})
    assert len(set.union(*in_splits)) == sum(map(len, in_splits)) == 100


def test_a_run_that_goes_on_has_the_prompts_of_the_day_on_which_it_began(
    inside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the template writes the day, also in what the texts depend on."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    shutil.copytree(TARGET, "target")
    tokenizer.chat_template = "{{ strftime_now('%d %b %Y') }}" + TEMPLATE
    tokenizer.save_pretrained("target")
    first_day, later_day = date(2026, 5, 1), date(2026, 12, 12)
    prompt = Prompt("a", "hello", "text", "a")
    depends = {}
    for day, name in ((first_day, "early"), (later_day, "early"), (later_day, "late")):
        monkeypatch.setattr("pipelines.run.TODAY", day)
        config = demo_config(*SMALL_PAIR, "pair.target=target", f"name={name}")
        stage = Stage("data", config, prompts_depend(config, *SPLITS), ())
        assert stage.is_reusable == (depends.get(name) is not None)
        depends[name] = stage.depends
        written = "12 Dec" if name == "late" else "01 May"
        ids = form_of(config).encode(tokenizer, prompt)
        assert tokenizer.decode(ids).startswith(f"{written} 2026<user>hello")
        stage.finish()
    assert depends["early"] != depends["late"]


@pytest.mark.parametrize("name", LARGE)
def test_the_configs_of_large_pairs_make_their_plans(
    here: Path, name: str, inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a tiny pair in the place of theirs."""
    file = ROOT / "configs" / f"{name}.yaml"
    config = load_config(file, [])
    sets = [prompt_set.name for prompt_set in config.prompts.sets]
    run("demo", file, [*overrides(here, *sets), "pair.device_map=null"], plan=True)
    output = capsys.readouterr().out
    for of_set in sets:
        assert f"pair: {of_set}: 20 prompts from {here / of_set}.jsonl" in output
    assert f"{len(config.sampling)} sampling settings x {config.data.texts} texts" in output
    counts = [prompt_set.prompts or 480 for prompt_set in config.prompts.sets]
    assert sum(counts) == config.data.texts


def test_sets_are_read_fitted_and_split(
    here: Path, inside: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *models, sets = overrides(here, "math500", "spec_bench")
    options = [
        *models,
        sets.replace("20}]", "20, kind: all}]"),
        "prompts.chat=true",
        "prompts.longer=drop",
    ]
    options += ["prompts.tokens=100", "prompts.system=be brief", "data.tokens=8", "name=sets"]
    run("pair", DEMO, options, plan=False)
    output = " ".join(capsys.readouterr().out.split())
    assert (
        "1 of them are longer than prompts.tokens=100 and are left out; taken: 20 math500" in output
    )
    config = demo_config(*options)
    kept = read_prompts(config.folder / "pair" / "prompts.jsonl")
    assert [sum(prompt.kind == kind for prompt in kept) for kind in ("math500", "all")] == [20, 20]
    pair = ModelPair.load(config.pair.target, config.pair.draft, device="cpu")
    prompts = {split: prompts_of(config, pair, split) for split in SPLITS}
    assert sorted(p.id for p in chain(*prompts.values())) == sorted(p.id for p in kept)
    for prompt in prompts["train"]:
        text = f"<system>be brief<|end|><user>{prompt.text}<|end|><assistant>"
        tokens = pair.tokenizer(text, add_special_tokens=False)["input_ids"]
        assert encode(config, pair, prompt) == tokens
    run("pair", DEMO, options, plan=False)
    assert "reusing runs/sets/pair/prompts.jsonl" in capsys.readouterr().out
    written = config.folder / "pair" / "prompts.jsonl"
    written.write_text(written.read_text().replace("a", "b", 1))
    with pytest.raises(
        InputError, match=r"prompts\.jsonl: missing, or changed since it was written: run the pair"
    ):
        all_prompts(config)
    run("pair", DEMO, options, plan=False)
    assert all_prompts(config) == kept


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([GSM8K % 1000, "prompts.tokens=400"], "prompts.sets: gsm8k gives 41 prompts, not"),
        ([GSM8K % 20, "prompts.tokens=2"], "gsm8k gives 0 prompts"),
        (
            ["prompts.sets=[{name: math500, file: gsm8k.jsonl}]"],
            "record 1 has not the fields of '{problem}'",
        ),
        (
            ["prompts.file=few.jsonl"],
            "few.jsonl: prompts.validation=0.2, prompts.test=0.25: none of the sources",
        ),
    ],
)
def test_prompts_that_are_not_there_are_named(
    here: Path, monkeypatch: pytest.MonkeyPatch, options: list[str], message: str
) -> None:
    monkeypatch.chdir(here)
    write_lines(Path("few.jsonl"), ({"text": f"number {n}", "source": "one"} for n in range(9)))
    few = ["prompts.validation=0.2", "prompts.longer=drop", "name=few"]
    assert message in failure("pair", *SMALL_PAIR, *few, *options)
