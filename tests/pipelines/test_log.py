"""An engine's log as a pair's texts (`data.log`), from transformers' `generate` to labels."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling, generation_arguments, probabilities
from data_gen.text_labels.labels import TextLabeller
from data_gen.texts.generated import finished
from data_gen.texts.labelled import make_shard
from data_gen.texts.logs import LoggedText
from data_gen.texts.written import Work
from pipelines.cli import app
from pipelines.config import Config
from pipelines.pair.stage import encode, load_pair, prompts_of, recipe
from selector.actions import ActionSpace
from selector.schema import InputError, survival_column
from tests.pipelines.runs import (
    SMALL,
    command,
    contents,
    demo_config,
    espalier,
    failure,
    refusal,
    write_lines,
)

SPACE = ActionSpace.recorded()
GREEDY = Sampling(0.0)
CUT = Sampling(1.0, 0.9123456789, top_k=100, min_p=0.01)
COUNTS = {"train": 8, "validation": 4, "test": 4}
NEW = 40
VERIFIERS = ("specinfer", "traversal", "lifted_uniform")
Lines = list[dict[str, Any]]


def options(sampling: Sampling, log: Path) -> list[str]:
    """Of a run on a log."""
    return [*SMALL, "name=logged", f"sampling=[{json.dumps(asdict(sampling))}]", f"data.log={log}"]


def config_of(sampling: Sampling) -> Config:
    return demo_config(*options(sampling, Path("log.jsonl")))


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    config = config_of(GREEDY)
    return ModelPair.load(config.pair.target, config.pair.draft, device="cpu")


@pytest.fixture(scope="module", params=[GREEDY, CUT], ids=str)
def sampling(request: pytest.FixtureRequest) -> Sampling:
    return request.param


def lines_of(pair: ModelPair, sampling: Sampling) -> Lines:
    """Lines of texts that transformers wrote, as any user of it would."""
    config = config_of(sampling)
    torch.manual_seed(5)
    lines: Lines = []
    for split, count in COUNTS.items():
        for prompt in prompts_of(config, pair, split, count):
            tokens = encode(config, pair, prompt)
            output = pair.target.generate(
                torch.tensor([tokens]),
                max_new_tokens=NEW,
                pad_token_id=0,
                **generation_arguments(sampling),
            )
            lines.append(
                {
                    "id": prompt.id,
                    "source": prompt.source,
                    "kind": prompt.kind,
                    "prompt_token_ids": tokens,
                    "generated_token_ids": output[0, len(tokens) :].tolist(),
                }
            )
    return lines


@pytest.fixture(scope="module")
def labelled(
    tmp_path_factory: pytest.TempPathFactory, pair: ModelPair, sampling: Sampling
) -> tuple[Lines, pa.Table]:
    """The lines of a log and their traces, all splits."""
    folder = tmp_path_factory.mktemp("logged")
    lines = lines_of(pair, sampling)
    log = write_lines(folder / "log.jsonl", lines)
    assert f"the texts of {log}" in espalier(folder, "data", *options(sampling, log))
    shards = sorted((folder / "runs" / "logged" / "traces").rglob("*.parquet"))
    return lines, pa.concat_tables([pq.read_table(shard) for shard in shards])


def survivals_of(row: dict[str, Any], verifier: str) -> np.ndarray:
    """[R, S]."""
    values = np.asarray(row[survival_column(verifier)], dtype=np.float64)
    return values.reshape(row["roots"], len(SPACE.sums_SA))


@torch.no_grad()
def test_labels_are_those_of_plain_passes(
    labelled: tuple[Lines, pa.Table], pair: ModelPair, sampling: Sampling
) -> None:
    """Of every text; one pass of each model over it, and chains' survivals from that."""
    lines, table = labelled
    rows = {row["prompt"]: row for row in table.to_pylist()}
    assert len(rows) == len(lines) == sum(COUNTS.values())
    chains = ActionSpace(1, SPACE.max_L1, SPACE.max_L2)
    for line in lines:
        row = rows[line["id"]]
        text = finished(pair, line["prompt_token_ids"], line["generated_token_ids"])
        assert (row["tokens"], row["start"]) == (text.tokens, text.start)
        assert row["roots"] == max(0, len(text.tokens) - text.start - SPACE.depth)
        assert (row["source"], row["kind"]) == (line["source"], line["kind"])
        assert {name: row[name] for name in asdict(sampling)} == asdict(sampling)
        assert row["step_verifier"] is None and row["step_root"] == []
        if row["roots"] == 0:
            continue
        tokens = torch.tensor([row["tokens"]])
        laws = []
        for model in (pair.target, pair.draft):
            laws.append(probabilities(model(tokens).logits[0, row["start"] :], sampling))
        labeller = TextLabeller(tokens[0, row["start"] :], VERIFIERS, space=chains)
        labeller.add(*laws)
        expected = labeller.survivals()[:, :, : SPACE.depth].numpy()
        for verifier, expected_RS in zip(VERIFIERS, expected, strict=True):
            chains_RS = survivals_of(row, verifier)[:, : SPACE.depth]
            np.testing.assert_allclose(chains_RS, expected_RS, atol=2e-3)
    assert sum(row["roots"] for row in rows.values()) > 250


def without_ids(lines: Lines) -> None:
    for line in lines:
        line["prompt"] = "text alone"
        del line["prompt_token_ids"], line["generated_token_ids"]


@pytest.mark.parametrize(
    ("spoil", "more", "message"),
    [
        (lambda lines: None, "sampling=[{temperature: 0}, {temperature: 1}]", "data.log: "),
        (lambda lines: lines[2].update(generated_token_ids=[7] * 5000), "", ":3: 5012 tokens"),
        (lambda lines: lines[2].update(generated_token_ids=[300]), "", ":3: a token beyond"),
        (lambda lines: lines.__delitem__(slice(1, None)), "", "log.jsonl: 1 sources"),
        (without_ids, "", "log.jsonl:1: no token ids"),
    ],
)
def test_a_log_that_does_not_fit_the_run_is_refused(
    labelled: tuple[Lines, pa.Table],
    sampling: Sampling,
    inside: Path,
    spoil: Callable[[Lines], None],
    more: str,
    message: str,
) -> None:
    """Before anything is written."""
    lines = [dict(line) for line in labelled[0]]
    spoil(lines)
    log = write_lines(Path("log.jsonl"), lines)
    assert message in refusal("data", *options(sampling, log), *filter(None, [more]))
    assert contents() == {}


def test_a_token_that_cannot_be_the_targets_is_named(pair: ModelPair, store: str) -> None:
    """A greedy text with a token that is not the best one."""
    lines = lines_of(pair, GREEDY)
    prompt, tokens = lines[4]["prompt_token_ids"], lines[4]["generated_token_ids"]
    logits = pair.target(torch.tensor([prompt + tokens[:9]])).logits[0, -1]
    worst = int(logits.argmin())
    changed = {**lines[4], "generated_token_ids": [*tokens[:9], worst, *tokens[10:]]}
    log = write_lines(Path("log.jsonl"), [*lines[:4], changed, *lines[5:]])
    output = failure("data", *options(GREEDY, log))
    assert f"log.jsonl:5: token {len(prompt) + 9} of the text ({worst}) has probability 0" in output
    assert not Path("runs").exists()  # nothing of a log that was mended meanwhile
    write_lines(log, lines)
    assert CliRunner().invoke(app, command("data", *options(GREEDY, log))[3:]).exit_code == 0


@torch.no_grad()
def test_a_token_at_the_very_edge_of_the_nucleus_ends_the_text(pair: ModelPair) -> None:
    """Another pass may round to the other side; a token well beyond the edge is an error. Texts
    beside it stay."""
    start, at = 7, 30
    greedy = list(range(30, 38))
    for _ in range(40):  # greedy, so that nothing else is in the way
        greedy.append(int(pair.target(torch.tensor([greedy])).logits[0, -1].argmax()))
    logits_V = pair.target(torch.tensor([greedy[:at]])).logits[0, -1].double()
    probs, order = logits_V.softmax(-1).sort(descending=True)
    text = [*greedy[:at], int(order[5]), *greedy[at + 1 :]]
    before = float(probs[:5].sum())

    def rows(top_p: float) -> list[dict[str, Any]]:
        texts = []
        for number, tokens in enumerate((greedy, text, greedy), 1):
            texts.append(LoggedText("a", "a", "a", tokens, start + 1, {}, f"log:{number}"))
        work = Work("test", Sampling(1.0, top_p), (), logged=tuple(texts))
        full = replace(recipe(config_of(GREEDY)), hidden=True)
        return make_shard(pair, full, work).to_pylist()

    first, cut, last = rows(before - 5e-4)
    assert cut["tokens"] == text[:at] and first["tokens"] == last["tokens"] == greedy
    for row in (first, cut):
        assert len(row["target_prob"]) == max(0, len(row["tokens"]) - start - SPACE.depth)
    chains = [survivals_of(row, "traversal")[:, : SPACE.depth] for row in (first, last)]
    np.testing.assert_allclose(*chains, rtol=1e-12)
    with pytest.raises(InputError, match=f"^log:2: token {at} of the text "):
        rows(before - 5e-3)


def test_written_texts_have_a_look_ahead_with_a_tree_behind_it(
    pair_folders: tuple[str, str],
) -> None:
    """12 prompt tokens, 469 labelled ones, 15 of look-ahead and 16 of a tree."""
    models = [f"pair.target={pair_folders[0]}", f"pair.draft={pair_folders[1]}", *SMALL[2:]]
    load_pair(demo_config(*models, "data.tokens=469"))
    with pytest.raises(InputError, match="ask for up to 513 positions; the pair has 512"):
        load_pair(demo_config(*models, "data.tokens=470"))
