"""Texts, and the trees behind them, end within the positions of a pair, and within those that were checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pipelines.config import load_config
from pipelines.data.shards import shards
from pipelines.pair.loading import load_pair
from selector.schema import InputError
from tests.data_gen.families import LONGROPE, model_of
from tests.pipelines.runs import ROOT
from tests.tiny import TEXT

DEMO = ROOT / "configs" / "demo.yaml"
SIZES = ("prompts.tokens=12", "data.tokens=24")  # the deepest tree behind a text ends at token 67


@pytest.fixture
def given(pair_folders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A pair with 512 positions, and a file of prompts, in an empty working directory."""
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps({"text": TEXT[number : number + 60], "source": str(number)}) + "\n" for number in range(40)]
    Path("prompts.jsonl").write_text("".join(lines))
    return [f"pair.target={pair_folders[0]}", f"pair.draft={pair_folders[1]}", "prompts.file=prompts.jsonl", *SIZES]


def test_written_texts_have_a_look_ahead_with_a_tree_behind_it(given: list[str]) -> None:
    """12 prompt tokens, 469 labelled ones, 15 of look-ahead and 16 of a tree."""
    load_pair(load_config(DEMO, [*given, "data.tokens=469"]))
    with pytest.raises(InputError, match="ask for up to 513 positions; the pair has 512"):
        load_pair(load_config(DEMO, [*given, "data.tokens=470"]))


def test_a_log_is_checked_up_to_its_longest_text(given: list[str], pair_folders: tuple[str, str]) -> None:
    """The target's positions change behind 100 tokens, which no text of the run's own prompts reaches."""
    scaling = {**LONGROPE, "partial_rotary_factor": 1.0, "original_max_position_embeddings": 100}
    changes: dict[str, Any] = {"vocab_size": 300, "original_max_position_embeddings": 100, "rope_parameters": scaling}
    target = Path("target")
    model_of("Phi-3, longrope", **changes, max_position_embeddings=512).save_pretrained(target)
    for file in Path(pair_folders[0]).glob("tokenizer*"):
        (target / file.name).write_bytes(file.read_bytes())
    config = load_config(DEMO, [*given, "pair.target=./target", "data.log=log.jsonl", "sampling=[{temperature: 1.0}]"])
    pair = load_pair(config)
    for count in (88, 89):
        lines = [{"prompt": [n] * 12, "completion": [7] * count, "temperature": 1, "source": str(n)} for n in range(40)]
        Path("log.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        if count == 88:
            assert sum(len(work.given) for work in shards(config, pair).values()) == 40
        else:
            with pytest.raises(InputError, match=r"^./target: a pass over a token tree is not what plain passes give"):
                shards(config, pair)
