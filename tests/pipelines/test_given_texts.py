"""Prompts and logs of a user: equal texts are in one split, and texts of another law are refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from data_gen.models.pair import ModelPair
from pipelines.cli import app
from pipelines.config import load_config
from pipelines.data.shards import shards
from pipelines.pair.loading import encode, prompts_of
from selector.train.data import SPLITS
from tests.pipelines.runs import ROOT, UNTEMPLATED, command, failure

DEMO = ROOT / "configs" / "demo.yaml"
WORDS = ["quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "and", "then", "some", "more"]
Lines = list[dict[str, Any]]


def sentence(number: int) -> str:
    """Different for each number, in its first words."""
    return " ".join(WORDS[number // 12**place % 12] for place in range(3)) + " text follows it" * 6


def write(path: Path, lines: Lines) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def options(pair_folders: tuple[str, str], *more: str) -> list[str]:
    target, draft = pair_folders
    sizes = [*UNTEMPLATED, "prompts.tokens=16", "data.tokens=8", "data.texts=24"]
    return [f"pair.target={target}", f"pair.draft={draft}", *sizes, "name=equal", *more]


@pytest.mark.parametrize("extra", ["", " and more of it"], ids=["equal", "equal once cut"])
def test_a_prompt_that_a_file_repeats_is_in_one_split(
    extra: str, pair: ModelPair, pair_folders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines: Lines = [{"text": sentence(n % 100) + extra * (n // 100)} for n in range(300)]
    arguments = options(pair_folders, f"prompts.file={write(tmp_path / 'prompts.jsonl', lines)}")
    done = CliRunner().invoke(app, command("pair", *arguments)[3:])
    assert "200 with the tokens of an earlier one are left out" in " ".join(done.stdout.split()), done.output
    config = load_config(DEMO, arguments)
    of_split = [{tuple(encode(config, pair, prompt)) for prompt in prompts_of(config, pair, split)} for split in SPLITS]
    assert len(set.union(*of_split)) == sum(map(len, of_split)) == 100


def test_texts_of_a_log_with_the_same_prompt_are_in_one_split(
    pair: ModelPair,
    pair_folders: tuple[str, str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some are the same text again, the others go on differently; each line would be a source of its own."""
    monkeypatch.chdir(tmp_path)
    lines: Lines = []
    for n in range(120):
        for completion in ("the lazy dog", "the lazy dog", "some more text"):
            lines.append({"prompt": sentence(n), "completion": completion, "temperature": 1.0})
    arguments = options(pair_folders, f"data.log={write(tmp_path / 'log.jsonl', lines)}", "sampling=[{temperature: 1}]")
    work = shards(load_config(DEMO, arguments), pair)
    assert "because they have prompts in common: 240" in " ".join(capsys.readouterr().out.split())
    found: dict[str, set[tuple[int, ...]]] = {split: set() for split in SPLITS}
    for shard in work.values():
        found[shard.split] |= {tuple(text.prompt_tokens) for text in shard.given}
    assert sum(map(len, found.values())) == 120 and sum(len(shard.given) for shard in work.values()) == len(lines)


def test_a_repeated_greedy_text_of_a_log_counts_once(
    pair: ModelPair, pair_folders: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines: Lines = [{"prompt": sentence(n % 60), "completion": "the lazy dog", "temperature": 0} for n in range(120)]
    log = write(tmp_path / "log.jsonl", lines)
    config = load_config(DEMO, options(pair_folders, f"data.log={log}", "sampling=[{temperature: 0}]"))
    assert sum(len(shard.given) for shard in shards(config, pair).values()) == 60
    assert "because they are repeated: 60" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_log_of_another_law_is_refused_again_and_again(
    temperature: float,
    pair: ModelPair,
    pair_folders: tuple[str, str],
    empty_store: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It says that it was sampled at temperature 1. No token of it is impossible, and what is finished when it is found
    out must not let the rest through."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{shutil.copyfile(empty_store, tmp_path / 'mlflow.db')}")
    torch.manual_seed(3)
    how = {"do_sample": True, "temperature": temperature, "max_new_tokens": 60, "pad_token_id": 0, "top_k": 0}
    lines: Lines = []
    for n in range(24):
        prompt = pair.tokenizer(sentence(n))["input_ids"]
        completion = pair.target.generate(torch.tensor([prompt]), **how)[0, len(prompt) :].tolist()
        lines.append({"prompt": prompt, "completion": completion, "temperature": 1.0})
    arguments = options(pair_folders, f"data.log={write(tmp_path / 'log.jsonl', lines)}", "data.texts_per_shard=4")
    prompts = write(tmp_path / "prompts.jsonl", [{"text": sentence(n)} for n in range(24)])
    arguments += ["sampling=[{temperature: 1}]", f"prompts.file={prompts}"]
    if temperature == 1:
        done = CliRunner().invoke(app, command("data", *arguments)[3:])
        assert done.exit_code == 0 and "of the tokens had a probability below 0.001" in " ".join(done.stdout.split())
        return
    for _ in range(2):
        message = failure("data", *arguments)
        assert "log.jsonl: not the target's own texts under their sampling settings: " in message
        assert "of the tokens had a probability below 0.001; " in message
