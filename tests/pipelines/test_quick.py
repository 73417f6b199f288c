"""Stage `quick`: what it checks first, what it finds on a tiny pair and on texts, and what its clock does."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.texts.labelled import Recipe, Work, make_shard
from data_gen.texts.prompts import Form, Prompt
from data_gen.traces import texts_of
from pipelines.config import load_config
from pipelines.quick.stage import SOURCES, Answer, answers_in_time
from selector.schema import InputError
from selector.tables import Table
from tests.copying import copying_model
from tests.pipelines.runs import ROOT, UNTEMPLATED, espalier, outcome
from tests.selector.synthetic import gpu_like, texts
from tests.tiny import TEXT, train_tokenizer

VERIFIERS = ("naive_tree", "lifted_uniform", "traversal")
PROMPTS = [Prompt(str(n), TEXT[n : n + 200], "text", str(n)) for n in range(24)]


@pytest.fixture
def mine(pair_folders: tuple[str, str], tmp_path: Path) -> Path:
    """A folder with prompts, and a config that names a pair and little else."""
    lines = [json.dumps({"text": prompt.text, "source": prompt.source}) for prompt in PROMPTS]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    own = f"name: mine\npair: {{target: {pair_folders[0]}, draft: {pair_folders[1]}, device: cpu, threads: 1}}\n"
    own += "sampling: [{temperature: 0.0}, {temperature: 1.0}]\n"
    (tmp_path / "mine.yaml").write_text(f"{own}prompts: {{file: prompts.jsonl, tokens: 40}}\ndata: {{tokens: 12}}\n")
    return tmp_path


def test_a_given_pair_needs_a_config_and_nothing_else(mine: Path) -> None:
    said = espalier(mine, "quick", "--config", "mine.yaml", "quick.texts=8", "quick.minutes=600", config="")
    assert "24 of them are longer than prompts.tokens=40 and are cut" in said
    assert "Does a selector pay here?" in said and "quick: next: " in said and "left out" not in said
    quick = json.loads((mine / "runs/mine/quick.json").read_text())
    assert [row["sampling"]["temperature"] for row in quick["settings"]] == [0.0, 1.0]
    for row in quick["settings"]:
        assert f"{Sampling(row['sampling']['temperature'])}: speed over plain decoding" in said
        assert row["texts"] == 8 and row["best"] in row["ways"] and row["best"]["low"] <= row["best"]["speed"]


def test_prompts_are_checked_before_a_model_is_loaded(pair_folders: tuple[str, str], tmp_path: Path) -> None:
    """The weights cannot be loaded, and nobody hears of it."""
    for role, folder in zip(("target", "draft"), pair_folders, strict=True):
        shutil.copytree(folder, tmp_path / role)
        (tmp_path / role / "model.safetensors").write_bytes(b"no weights")
    (tmp_path / "prompts.jsonl").write_text('{"text": "one", "source": "a"}\n')
    line = ["pair.target=./target", "pair.draft=./draft", "prompts.file=prompts.jsonl", *UNTEMPLATED]
    code, said = outcome(tmp_path, "quick", *line)
    assert code == 2 and "prompts of 4 sources are needed that are not held out" in said.strip().splitlines()[-1], said
    assert not (tmp_path / "mlruns").exists()


def test_when_the_time_is_over_few_texts_answer_for_the_first_sampling_setting(pair: ModelPair) -> None:
    more = [*UNTEMPLATED, "prompts.tokens=40", "data.tokens=12", "sampling=[{temperature: 1.0}, {temperature: 0.5}]"]
    config = load_config(ROOT / "configs" / "demo.yaml", more)
    _, answers = answers_in_time(config, pair, PROMPTS, time.perf_counter())
    assert [(str(answer.sampling), answer.texts) for answer in answers] == [("T=1", SOURCES)]
    with pytest.raises(InputError, match="texts of 3 sources can be labelled: 4 are needed"):
        answers_in_time(config, pair, [*PROMPTS[:3], *PROMPTS[:3]], time.perf_counter())


def test_the_verdict_follows_from_times_and_texts() -> None:
    """With a draft that costs five target passes nothing pays; with a cheap one it does."""
    data = texts(count=16)
    data = replace(data, survivals=dict.fromkeys(VERIFIERS, data.survivals["traversal"]))
    cheap = gpu_like("pair", VERIFIERS, 0.05)
    none, pays = (
        Answer.of(Sampling(), data, profile, VERIFIERS) for profile in (gpu_like("pair", VERIFIERS, 5.0), cheap)
    )
    assert none.verdict() == "T=1: speculation does not pay here: decode without a draft" and not none.pays
    assert pays.verdict().startswith("T=1: speculation pays: ") and pays.best["low"] > 1
    assert pays.best["low"] < pays.best["speed"] < pays.best["high"] and "[" in pays.verdict()
    assert json.loads(json.dumps(asdict(pays)))["best"] == pays.best
    quicker = replace(cheap, target=Table([1], [1, 2], [[1.0, 0.5]]))
    assert "the machine is busy; repeat later" in Answer.of(Sampling(), data, quicker, VERIFIERS).verdict()


@pytest.fixture(scope="module")
def copying(tmp_path_factory: pytest.TempPathFactory) -> ModelPair:
    """A target with an induction head and no training, and a draft that knows nothing."""
    folder = tmp_path_factory.mktemp("copying")
    tokenizer = train_tokenizer([TEXT], 300)
    for role, layers in (("target", 2), ("draft", 1)):
        model = copying_model(64, layers, len(tokenizer), tokenizer.eos_token_id, seed=1)
        model.save_pretrained(folder / role)
        tokenizer.save_pretrained(folder / role)
    return ModelPair.load(str(folder / "target"), str(folder / "draft"), device="cpu")


def test_where_the_target_copies_the_answer_is_to_copy(copying: ModelPair) -> None:
    """A tree of this draft pays nothing, and a lookup yields many tokens a step."""
    generator = torch.Generator().manual_seed(1)
    words = TEXT.split()[:16]
    prompts = []
    for n in range(12):
        order = torch.randperm(len(words), generator=generator).tolist()
        text = " ".join(words[at] for at in order)
        prompts.append((Prompt(str(n), f"{text} {text}", "copies", f"source {n}"), 0))
    recipe = Recipe(VERIFIERS, Form(100, "start"), tokens=40, siblings=1, stride=1, hidden=False, seed=1)
    table = make_shard(copying, recipe, Work("validation", Sampling(0.0), tuple(prompts))).table
    profile = gpu_like("copying", VERIFIERS, 0.3)
    found = Answer.of(Sampling(0.0), texts_of(table, VERIFIERS), profile, VERIFIERS)
    assert found.best["choice"].startswith("copy ") and found.best["low"] > 1
    assert found.best["speed"] > 2 * max(way["speed"] for way in found.ways[:-1])
