"""Prompts and logs of a user: equal texts are in one split, texts of another law are refused, and
texts with the trees behind them end within the positions of a pair, and within those that were
checked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from data_gen.models.pair import ModelPair
from pipelines.cli import run
from pipelines.data.stage import shards
from pipelines.pair.stage import encode, load_pair, prompts_of
from selector.schema import InputError
from selector.train.data import SPLITS
from tests.data_gen.families import LONGROPE, model_of
from tests.pipelines.runs import DEMO, UNTEMPLATED, demo_config, failure, write_lines
from tests.tiny import TEXT

WORDS = [
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "the",
    "lazy",
    "dog",
    "and",
    "then",
    "some",
    "more",
]
Lines = list[dict[str, Any]]


def sentence(number: int) -> str:
    """Different for each number, in its first words."""
    return " ".join(WORDS[number // 12**place % 12] for place in range(3)) + " text follows it" * 6


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """As one line."""
    return " ".join(capsys.readouterr().out.split())


@pytest.fixture
def options(pair_folders: tuple[str, str], inside: Path) -> list[str]:
    """Of a run in an empty working directory."""
    target, draft = pair_folders
    sizes = [*UNTEMPLATED, "prompts.tokens=16", "data.tokens=8", "data.texts=24"]
    return [f"pair.target={target}", f"pair.draft={draft}", *sizes, "name=equal"]


def log_of(lines: Lines, temperature: float) -> list[str]:
    """Options of a run on these lines."""
    write_lines(Path("log.jsonl"), ({**line, "temperature": temperature} for line in lines))
    return ["data.log=log.jsonl", f"sampling=[{{temperature: {temperature}}}]"]


@pytest.mark.parametrize("extra", ["", " and more of it"], ids=["equal", "equal once cut"])
def test_a_prompt_that_a_file_repeats_is_in_one_split(
    extra: str, pair: ModelPair, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    write_lines(
        Path("prompts.jsonl"),
        ({"text": sentence(n % 100) + extra * (n // 100)} for n in range(300)),
    )
    options += ["prompts.file=prompts.jsonl"]
    run("pair", DEMO, options, plan=False)
    assert "200 with the tokens of an earlier one are left out" in said(capsys)
    config = demo_config(*options)
    of_split = [
        {tuple(encode(config, pair, prompt)) for prompt in prompts_of(config, pair, split)}
        for split in SPLITS
    ]
    assert len(set.union(*of_split)) == sum(map(len, of_split)) == 100


def test_texts_of_a_log_with_the_same_prompt_are_in_one_split(
    pair: ModelPair, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Some are the same text again, the others go on differently; each line would be a source of
    its own."""
    completions = ("the lazy dog", "the lazy dog", "some more text")
    lines: Lines = [
        {"prompt": sentence(n), "completion": own} for n in range(120) for own in completions
    ]
    work = shards(demo_config(*options, *log_of(lines, 1.0)), pair)
    assert "because they have prompts in common: 240" in said(capsys)
    found: dict[str, set[tuple[int, ...]]] = {split: set() for split in SPLITS}
    for shard in work.values():
        found[shard.split] |= {tuple(text.prompt_tokens) for text in shard.given}
    assert sum(map(len, found.values())) == 120 and sum(
        len(shard.given) for shard in work.values()
    ) == len(lines)


def test_a_repeated_greedy_text_of_a_log_counts_once(
    pair: ModelPair, options: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    lines: Lines = [{"prompt": sentence(n % 60), "completion": "the lazy dog"} for n in range(120)]
    work = shards(demo_config(*options, *log_of(lines, 0)), pair)
    assert sum(len(shard.given) for shard in work.values()) == 60
    assert "because they are repeated: 60" in said(capsys)


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_a_log_of_another_law_is_refused_again_and_again(
    temperature: float,
    pair: ModelPair,
    options: list[str],
    store: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It says that it was sampled at temperature 1. No token of it is impossible, and what is
    finished when it is found out must not let the rest through."""
    torch.manual_seed(3)
    how = {
        "do_sample": True,
        "temperature": temperature,
        "max_new_tokens": 60,
        "pad_token_id": 0,
        "top_k": 0,
    }
    lines: Lines = []
    for n in range(24):
        prompt = pair.tokenizer(sentence(n))["input_ids"]
        completion = pair.target.generate(torch.tensor([prompt]), **how)[0, len(prompt) :].tolist()
        lines.append({"prompt": prompt, "completion": completion})
    write_lines(Path("prompts.jsonl"), ({"text": sentence(n)} for n in range(24)))
    options += [*log_of(lines, 1.0), "data.texts_per_shard=4", "prompts.file=prompts.jsonl"]
    if temperature == 1:
        run("data", DEMO, options, plan=False)
        assert "of the tokens had a probability below 0.001" in said(capsys)
        return
    for _ in range(2):
        message = failure("data", *options)
        assert "log.jsonl: not the target's own texts under their sampling settings: " in message
        assert "of the tokens had a probability below 0.001; " in message


SIZES = ("prompts.tokens=12", "data.tokens=24")  # the deepest tree behind a text ends at token 67


@pytest.fixture
def given(pair_folders: tuple[str, str], inside: Path) -> list[str]:
    """A pair with 512 positions, and a file of prompts, in an empty working directory."""
    write_lines(
        Path("prompts.jsonl"), ({"text": TEXT[n : n + 60], "source": str(n)} for n in range(40))
    )
    return [
        f"pair.target={pair_folders[0]}",
        f"pair.draft={pair_folders[1]}",
        "prompts.file=prompts.jsonl",
        *SIZES,
    ]


def test_written_texts_have_a_look_ahead_with_a_tree_behind_it(given: list[str]) -> None:
    """12 prompt tokens, 469 labelled ones, 15 of look-ahead and 16 of a tree."""
    load_pair(demo_config(*given, "data.tokens=469"))
    with pytest.raises(InputError, match="ask for up to 513 positions; the pair has 512"):
        load_pair(demo_config(*given, "data.tokens=470"))


def test_a_log_is_checked_up_to_its_longest_text(
    given: list[str], pair_folders: tuple[str, str]
) -> None:
    """The target's positions change behind 100 tokens, which no text of the run's own prompts
    reaches."""
    scaling = {**LONGROPE, "partial_rotary_factor": 1.0, "original_max_position_embeddings": 100}
    changes: dict[str, Any] = {
        "vocab_size": 300,
        "original_max_position_embeddings": 100,
        "rope_parameters": scaling,
    }
    target = Path("target")
    model_of("Phi-3, longrope", **changes, max_position_embeddings=512).save_pretrained(target)
    for file in Path(pair_folders[0]).glob("tokenizer*"):
        (target / file.name).write_bytes(file.read_bytes())

    def texts(count: int) -> Lines:
        return [
            {"prompt": [n] * 12, "completion": [7] * count, "source": str(n)} for n in range(40)
        ]

    config = demo_config(*given, "pair.target=./target", *log_of(texts(88), 1.0))
    pair = load_pair(config)
    assert sum(len(work.given) for work in shards(config, pair).values()) == 40
    log_of(texts(89), 1.0)
    with pytest.raises(
        InputError, match=r"^./target: a pass over a token tree is not what plain passes give"
    ):
        shards(config, pair)
