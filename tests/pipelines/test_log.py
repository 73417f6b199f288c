"""Texts that another engine wrote: `data.log`, from transformers' `generate` to a trained
selector."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling, probabilities
from data_gen.text_labels.labels import TextLabeller
from data_gen.texts.generated import finished
from data_gen.texts.labelled import GivenText, Work, make_shard, read_log
from data_gen.texts.prompts import Prompt
from pipelines.config import Config
from pipelines.pair.stage import encode, prompts_of, recipe
from selector.actions import ActionSpace
from selector.schema import InputError, survival_column
from tests.pipelines.runs import (
    SMALL,
    contents,
    demo_config,
    espalier,
    failure,
    refusal,
    write_lines,
)

SPACE = ActionSpace.recorded()
SETTINGS = (
    Sampling(0.0),
    Sampling(0.2),
    Sampling(1.0),
    Sampling(1.0, 0.9123456789, top_k=100, min_p=0.01),
)
COUNTS = {"train": 8, "validation": 4, "test": 4}  # texts of each setting
NEW = 40
VERIFIERS = ("specinfer", "traversal", "lifted_uniform")
Lines = list[dict[str, Any]]


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a log of texts that transformers wrote."""
    folder = tmp_path_factory.mktemp("logged")
    config = config_of(folder)
    pair = ModelPair.load(config.pair.target, config.pair.draft, device="cpu")
    torch.manual_seed(5)
    lines: Lines = []
    for setting in SETTINGS:
        for split, count in COUNTS.items():
            for prompt in prompts_of(config, pair, split, count):
                tokens = encode(config, pair, prompt)
                line = {
                    "id": f"{prompt.id} {setting}",
                    "source": prompt.source,
                    "kind": prompt.kind,
                }
                own = {
                    **numbers(setting),
                    "prompt": tokens,
                    "completion": generated(pair, tokens, setting),
                }
                lines.append({**line, **own})
    for line in lines:  # where the tokenizer gives back the tokens, their text stands in the log
        text = pair.tokenizer.decode(line["completion"])
        if pair.tokenizer(text, add_special_tokens=False)["input_ids"] == line["completion"]:
            line["completion"] = text
    write_lines(folder / "log.jsonl", lines)
    return folder


def generated(pair: ModelPair, prompt: list[int], setting: Sampling) -> list[int]:
    """As any user of transformers would."""
    sampled = {
        "do_sample": True,
        "temperature": setting.temperature,
        "top_p": setting.top_p,
        "top_k": setting.top_k,
    }
    output = pair.target.generate(
        torch.tensor([prompt]),
        max_new_tokens=NEW,
        pad_token_id=0,
        min_p=setting.min_p or None,
        **(sampled if setting.temperature else {"do_sample": False}),
    )
    return output[0, len(prompt) :].tolist()


def read(path: Path) -> Lines:
    return [json.loads(line) for line in path.read_text().splitlines()]


def numbers(setting: Sampling) -> dict[str, Any]:
    return {name: getattr(setting, name) for name in ("temperature", "top_p", "top_k", "min_p")}


def options(folder: Path) -> list[str]:
    """Of a run on the log."""
    settings = ", ".join(str(numbers(setting)) for setting in SETTINGS)
    return [*SMALL, "name=logged", f"sampling=[{settings}]", f"data.log={folder / 'log.jsonl'}"]


def config_of(folder: Path) -> Config:
    return demo_config(*options(folder))


@pytest.fixture(scope="module")
def pair(logged: Path) -> ModelPair:
    config = config_of(logged)
    return ModelPair.load(config.pair.target, config.pair.draft, device="cpu")


@pytest.fixture(scope="module")
def labelled(logged: Path) -> tuple[pa.Table, str]:
    """The traces of the log, all splits, and what the stage said."""
    output = espalier(logged, "data", *options(logged))
    shards = sorted((logged / "runs" / "logged" / "traces").rglob("*.parquet"))
    return pa.concat_tables([pq.read_table(shard) for shard in shards]), output


def survivals_of(row: dict[str, Any], verifier: str) -> np.ndarray:
    """[R, S]."""
    return np.asarray(row[survival_column(verifier)], dtype=np.float64).reshape(
        row["roots"], len(SPACE.sums_SA)
    )


def test_every_text_of_the_log_is_labelled(
    logged: Path, labelled: tuple[pa.Table, str], pair: ModelPair
) -> None:
    table, output = labelled
    rows = {row["prompt"]: row for row in table.to_pylist()}
    lines = read(logged / "log.jsonl")
    texts = read_log(logged / "log.jsonl", pair)
    assert len(rows) == len(lines) == len(SETTINGS) * sum(COUNTS.values())
    assert sum(isinstance(line["completion"], str) for line in lines) > 5
    for line, text in zip(lines, texts, strict=True):
        row = rows[line["id"]]
        kept = finished(pair, text.prompt_tokens, text.completion)
        assert (
            row["tokens"] == kept.tokens
            and row["start"] == kept.start == len(text.prompt_tokens) - 1
        )
        assert row["roots"] == max(0, len(kept.tokens) - kept.start - SPACE.depth)
        assert (row["source"], row["kind"]) == (line["source"], line["kind"])
        assert all(
            row[name] == pytest.approx(line[name])
            for name in ("temperature", "top_p", "top_k", "min_p")
        )
        assert row["step_verifier"] is None and row["step_root"] == []
    assert f"{len(lines)} texts" in output and "the texts of " in output


@torch.no_grad()
def test_labels_are_those_of_plain_passes(labelled: tuple[pa.Table, str], pair: ModelPair) -> None:
    """One pass of each model over a whole text, and chains' survivals from it."""
    compared = 0
    for row in labelled[0].to_pylist():
        if row["roots"] == 0:
            continue
        setting = Sampling(row["temperature"], row["top_p"], row["top_k"], row["min_p"])
        tokens = torch.tensor([row["tokens"]])
        rows = [
            probabilities(model(tokens).logits[0, row["start"] :], setting)
            for model in (pair.target, pair.draft)
        ]
        labeller = TextLabeller(
            tokens[0, row["start"] :], VERIFIERS, space=ActionSpace(1, SPACE.max_L1, SPACE.max_L2)
        )
        labeller.add(*rows)
        chains = labeller.survivals()[:, :, : SPACE.depth].numpy()
        for verifier, expected in zip(VERIFIERS, chains, strict=True):
            np.testing.assert_allclose(
                survivals_of(row, verifier)[:, : SPACE.depth], expected, atol=2e-3
            )
        compared += row["roots"]
    assert compared > 1000


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda lines: lines[2].update(temperature=0.7),
            ":3: T=0.7 is not among the run's sampling settings",
        ),
        (
            lambda lines: lines[4].update(top_k=20),
            ":5: T=0, top-k=20 is not among the run's sampling settings",
        ),
        (lambda lines: lines[2].update(completion=[7] * 5000), ":3: 5012 tokens; the pair has "),
        (lambda lines: lines[2].update(completion=[]), ":3: completion."),
        (
            lambda lines: lines.__delitem__(slice(12, 16)),
            "sources falls to test: add some, or change a share",
        ),
    ],
)
def test_a_line_that_does_not_fit_the_run_is_named(
    logged: Path, inside: Path, spoil: Callable[[Lines], None], message: str
) -> None:
    """Before anything is written; `tests/data_gen/test_texts.py` has the lines that fit no run."""
    lines = read(logged / "log.jsonl")
    spoil(lines)
    write_lines(Path("log.jsonl"), lines)
    assert message in refusal("data", *options(logged), "data.log=log.jsonl")
    assert contents() == {}


def test_a_token_that_cannot_be_the_targets_is_named(
    logged: Path, store: str, pair: ModelPair
) -> None:
    """A greedy text with a token that is not the best one."""
    lines = read(logged / "log.jsonl")
    number = next(n for n, line in enumerate(lines) if line["temperature"] == 0)
    right, own = lines[number]["completion"], read_log(logged / "log.jsonl", pair)[number]
    prompt, tokens = own.prompt_tokens, own.completion
    logits = pair.target(torch.tensor([prompt + tokens[:9]])).logits[0, -1]
    worst = int(logits.argmin())
    lines[number]["completion"] = [*tokens[:9], worst, *tokens[10:]]
    write_lines(Path("log.jsonl"), lines)
    arguments = [*options(logged), "data.log=log.jsonl"]
    said = failure("data", *arguments)
    assert (
        f"log.jsonl:{number + 1}: token {len(prompt) + 9} of the text ({worst}) has probability "
        "0 under the" in said
    )
    assert said.endswith("the text is not the target's own under T=0")
    lines[number]["completion"] = right
    write_lines(Path("log.jsonl"), lines)
    assert "made from other inputs (log: " in refusal("data", *arguments)


@pytest.mark.parametrize("place", [12, 30])
@torch.no_grad()
def test_a_token_at_the_very_edge_of_the_nucleus_ends_the_text(
    logged: Path, pair: ModelPair, place: int
) -> None:
    """Another pass may round to the other side; a token well beyond the edge is an error. Texts
    beside it stay."""
    config, start = config_of(logged), 7
    greedy = list(range(30, 38))
    for _ in range(40):  # greedy, so that nothing else is in the way
        greedy.append(int(pair.target(torch.tensor([greedy])).logits[0, -1].argmax()))
    probs, order = (
        pair.target(torch.tensor([greedy[:place]]))
        .logits[0, -1]
        .double()
        .softmax(-1)
        .sort(descending=True)
    )
    text = [*greedy[:place], int(order[5]), *greedy[place + 1 :]]
    before = float(probs[:5].sum())

    def rows(top_p: float) -> list[dict[str, Any]]:
        setting = Sampling(1.0, top_p)
        given = tuple(
            GivenText(
                Prompt("a", "a", "a", "a"),
                tokens[: start + 1],
                tokens[start + 1 :],
                setting,
                f"log:{number}",
            )
            for number, tokens in enumerate((greedy, text, greedy), 1)
        )
        full = replace(recipe(config), hidden=True)
        return make_shard(pair, full, Work("test", setting, (), given=given)).table.to_pylist()

    first, own, last = rows(before - 5e-4)
    assert own["tokens"] == text[:place] and first["tokens"] == last["tokens"] == greedy
    assert [len(row["target_prob"]) for row in (first, own)] == [
        max(0, len(row["tokens"]) - start - SPACE.depth) for row in (first, own)
    ]
    chains = [survivals_of(row, "traversal")[:, : SPACE.depth] for row in (first, last)]
    np.testing.assert_allclose(*chains, rtol=1e-12)
    with pytest.raises(
        InputError, match=f"^log:2: token {place} of the text \\({text[place]}\\) has probability 0"
    ):
        rows(before - 5e-3)
