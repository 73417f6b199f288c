"""Texts that another engine wrote: `data.log`, from transformers' `generate` to a trained selector."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import torch

from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.text_labels.labels import TextLabeller
from data_gen.texts.given import read_log
from data_gen.texts.labelled import Work, label, make_shard
from data_gen.texts.plausibility import Plausibility
from data_gen.texts.recorded import texts_of
from data_gen.texts.written import Text, finished
from pipelines.config import Config, load_config
from pipelines.data import stage as data
from pipelines.pair.loading import encode, prompts_of, recipe
from pipelines.train import stage as train
from selector.actions import ActionSpace
from selector.schema import InputError, survival_column
from tests.pipelines.runs import ROOT, SMALL, espalier
from tests.pipelines.test_refusals import contents, failure, refusal

DEMO = ROOT / "configs" / "demo.yaml"
SPACE = ActionSpace.recorded()
SETTINGS = (Sampling(0.0), Sampling(0.2), Sampling(1.0), Sampling(1.0, 0.9123456789, top_k=100, min_p=0.01))
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
                identity = f"{prompt.id} {setting}"
                line = {
                    "id": identity,
                    "source": prompt.source,
                    "kind": prompt.kind,
                    "temperature": setting.temperature,
                }
                if setting.top_p < 1:
                    line |= {"top_p": setting.top_p, "top_k": setting.top_k, "min_p": setting.min_p}
                lines.append({**line, "prompt": tokens, "completion": generated(pair, tokens, setting)})
    as_text(pair, lines)
    write(folder / "log.jsonl", lines)
    return folder


def generated(pair: ModelPair, prompt: list[int], setting: Sampling) -> list[int]:
    """As any user of transformers would."""
    sampled = {"do_sample": True, "temperature": setting.temperature, "top_p": setting.top_p, "top_k": setting.top_k}
    output = pair.target.generate(
        torch.tensor([prompt]),
        max_new_tokens=NEW,
        pad_token_id=0,
        min_p=setting.min_p or None,
        **(sampled if setting.temperature else {"do_sample": False}),
    )
    return output[0, len(prompt) :].tolist()


def as_text(pair: ModelPair, lines: Lines) -> None:
    """Where the tokenizer gives back the tokens, their text stands in the log."""
    for line in lines:
        for key in ("prompt", "completion"):
            text = pair.tokenizer.decode(line[key])
            if pair.tokenizer(text, add_special_tokens=key == "prompt")["input_ids"] == line[key]:
                line[key] = text


def write(path: Path, lines: Lines) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read(path: Path) -> Lines:
    return [json.loads(line) for line in path.read_text().splitlines()]


def options(folder: Path, name: str = "logged") -> list[str]:
    """Of a run on the log."""
    names = "temperature", "top_p", "top_k", "min_p"
    settings = ", ".join(str({name: getattr(setting, name) for name in names}) for setting in SETTINGS)
    return [*SMALL, f"name={name}", f"sampling=[{settings}]", f"data.log={folder / 'log.jsonl'}"]


def config_of(folder: Path) -> Config:
    return load_config(DEMO, options(folder))


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
    return np.asarray(row[survival_column(verifier)], dtype=np.float64).reshape(row["roots"], len(SPACE.sums_SA))


def test_every_text_of_the_log_is_labelled(logged: Path, labelled: tuple[pa.Table, str], pair: ModelPair) -> None:
    table, output = labelled
    rows = {row["prompt"]: row for row in table.to_pylist()}
    lines = read(logged / "log.jsonl")
    texts = read_log(logged / "log.jsonl", pair)
    assert len(rows) == len(lines) == len(SETTINGS) * sum(COUNTS.values())
    assert sum(isinstance(line["completion"], str) for line in lines) > 5
    for line, text in zip(lines, texts, strict=True):
        row = rows[line["id"]]
        kept = finished(pair, text.prompt_tokens, text.completion)
        assert row["tokens"] == kept.tokens and row["start"] == kept.start == len(text.prompt_tokens) - 1
        assert row["roots"] == max(0, len(kept.tokens) - kept.start - SPACE.depth)
        assert (row["source"], row["kind"]) == (line["source"], line["kind"])
        assert row["temperature"] == pytest.approx(line["temperature"])
        assert row["top_p"] == pytest.approx(line.get("top_p", 1.0))
        assert (row["top_k"], row["min_p"]) == pytest.approx((line.get("top_k", 0), line.get("min_p", 0.0)))
        assert row["step_verifier"] is None and row["step_root"] == []
    assert f"{len(lines)} texts" in output and "the texts of " in output


@torch.no_grad()
def test_labels_are_those_of_plain_passes(labelled: tuple[pa.Table, str], pair: ModelPair) -> None:
    """One pass of each model over a whole text, and chains' survivals from it."""
    compared = 0
    for row in labelled[0].to_pylist():
        if row["roots"] == 0:
            continue
        setting = Sampling(row["temperature"], row["top_p"], None, row["top_k"], row["min_p"])
        tokens = torch.tensor([row["tokens"]])
        rows = [setting.probabilities(model(tokens).logits[0, row["start"] :]) for model in (pair.target, pair.draft)]
        labeller = TextLabeller(tokens[0, row["start"] :], VERIFIERS)
        labeller.add(*rows)
        chains = labeller.survivals()[:, :, : SPACE.depth].numpy()
        for verifier, expected in zip(VERIFIERS, chains, strict=True):
            np.testing.assert_allclose(survivals_of(row, verifier)[:, : SPACE.depth], expected, atol=2e-3)
        compared += row["roots"]
    assert compared > 1000


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_labels_agree_with_those_of_our_own_texts(
    demo: tuple[Path, str], labelled: tuple[pa.Table, str], temperature: float
) -> None:
    """Mean tokens of a chain of eight, over texts: the demo's own prompts are others of the same files."""
    shards = sorted((demo[0] / "runs" / "demo" / "traces").rglob("*.parquet"))
    own = pa.concat_tables([pq.read_table(shard) for shard in shards])
    means = []
    for table in (own, labelled[0]):
        rows = [row for row in table.to_pylist() if row["temperature"] == pytest.approx(temperature) and row["roots"]]
        rows = [row for row in rows if row["top_p"] == 1]
        of_text = np.array([survivals_of(row, "traversal")[:, :8].sum(-1).mean() for row in rows])
        assert len(of_text) >= 12
        means.append((of_text.mean(), of_text.std(ddof=1) / math.sqrt(len(of_text))))
    (first, first_error), (second, second_error) = means
    assert abs(first - second) < 4 * math.hypot(first_error, second_error)


def test_features_are_those_of_the_text(labelled: tuple[pa.Table, str]) -> None:
    texts = texts_of(labelled[0].filter(pc.greater(labelled[0]["roots"], 0)), [])
    known_R, top_p_X = ~texts.unknown_R, torch.tensor([top_p for _, top_p in texts.settings])[texts.setting_X]
    assert torch.equal(texts.scalar("context_length")[known_R], texts.length_R[known_R].float())
    assert torch.equal(texts.scalar("top_p")[known_R], top_p_X[texts.text_R][known_R])
    assert not texts.scalars_RF[~known_R].any()


def test_a_selector_is_trained_on_a_log(
    demo: tuple[Path, str],
    logged: Path,
    labelled: tuple[pa.Table, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(logged)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{logged}/mlruns/mlflow.db")
    data.run(config_of(logged))
    assert "data: reusing" in capsys.readouterr().out
    shutil.copy(demo[0] / "runs" / "demo" / "latency.json", logged / "runs" / "logged")
    train.run(config_of(logged))
    assert "replayed: speed over the best static tree" in capsys.readouterr().out
    result = json.loads((logged / "runs" / "logged" / "training" / "result.json").read_text())
    assert [(m["temperature"], m["top_p"]) for m in result["selectors"]["regressor-light"]["modes"]] == [
        (setting.temperature, setting.top_p) for setting in SETTINGS
    ]


def test_the_plan_names_the_log(logged: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(logged)
    line, _ = data.plan(config_of(logged))
    assert line == f"the texts of {logged / 'log.jsonl'}, one teacher-forced pass of each model over each"


Spoil = Callable[[Lines], None]


def at(number: int, **values: Any) -> Spoil:
    """Changes one line of the log."""
    return lambda lines: lines[number - 1].update(values)


def without(key: str) -> Spoil:
    def spoil(lines: Lines) -> None:
        del lines[2][key]

    return spoil


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (at(3, completion=[]), ":3: `completion` is neither a text nor a list of token ids, or is empty"),
        (at(3, completion=[1, True]), ":3: `completion` is neither a text nor a list of token ids"),
        (at(3, prompt=[1, "two"]), ":3: `prompt` is neither a text nor a list of token ids"),
        (at(3, completion=[1, 10**6]), ":3: `completion` holds a token id beyond the vocabulary of "),
        (at(3, prompt=[-1]), ":3: `prompt` holds a token id beyond the vocabulary"),
        (without("completion"), ":3: `completion` is neither"),
        (without("temperature"), ":3: `temperature` is missing or no number"),
        (at(3, temperature="hot"), ":3: `temperature` is missing or no number"),
        (at(3, temperature=math.nan), ":3: `temperature` is missing or no number"),
        (at(3, temperature=-1), ":3: temperature -1, top_p 1, top_k 0, min_p 0 is no sampling setting"),
        (at(3, top_p=0), "is no sampling setting"),
        (at(3, temperature=0.7), ":3: T=0.7 is not among the run's sampling settings"),
        (at(5, top_p=0.95), ":5: T=0, top-p=0.95 is not among the run's sampling settings"),
        (at(5, top_k=20), ":5: T=0, top-k=20 is not among the run's sampling settings"),
        (at(3, completion=[7] * 5000), ":3: 5012 tokens; the pair has "),
        (lambda lines: lines.__setitem__(3, lines[2]), "log.jsonl: two texts have the same id"),
        (
            lambda lines: lines.__delitem__(slice(12, 16)),
            "sources falls to test: add some, or change a share",
        ),
        (lambda lines: lines.clear(), "log.jsonl: holds no texts"),
    ],
)
def test_a_line_that_does_not_fit_is_named(
    logged: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    spoil: Spoil,
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = read(logged / "log.jsonl")
    spoil(lines)
    write(tmp_path / "log.jsonl", lines)
    assert message in refusal(capsys, monkeypatch, "data", *options(logged), "data.log=log.jsonl")
    assert contents() == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{not JSON}\n", "log.jsonl:1: not JSON"),
        (b"\n\n[" * 3, "log.jsonl:3: not JSON"),
        (b"[1, 2]\n", "log.jsonl:1: expected a JSON object with `prompt` and `completion`"),
        (b'{"prompt": "\xff"}\n', "log.jsonl:1: not UTF-8 text"),
        (b"[" * 100_000, "log.jsonl:1: not JSON"),
    ],
)
def test_a_file_that_is_no_log_is_named(tmp_path: Path, pair: ModelPair, content: bytes, message: str) -> None:
    (tmp_path / "log.jsonl").write_bytes(content)
    with pytest.raises(InputError) as error:
        read_log(tmp_path / "log.jsonl", pair)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_token_that_cannot_be_the_targets_is_named_and_the_log_can_be_mended(
    logged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, pair: ModelPair
) -> None:
    """A greedy text with a token that is not the best one."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    lines = read(logged / "log.jsonl")
    number = next(n for n, line in enumerate(lines) if line["temperature"] == 0)
    right, own = lines[number]["completion"], read_log(logged / "log.jsonl", pair)[number]
    prompt, tokens = own.prompt_tokens, own.completion
    logits = pair.target(torch.tensor([prompt + tokens[:9]])).logits[0, -1]
    worst = int(logits.argmin())
    lines[number]["completion"] = [*tokens[:9], worst, *tokens[10:]]
    write(tmp_path / "log.jsonl", lines)
    arguments = [*options(logged), "data.log=log.jsonl"]
    said = failure(capsys, monkeypatch, "data", *arguments)
    assert f"log.jsonl:{number + 1}: token {len(prompt) + 9} of the text ({worst}) has probability 0 under the" in said
    assert said.endswith("the text is not the target's own under T=0")
    lines[number]["completion"] = right
    write(tmp_path / "log.jsonl", lines)
    assert "made from other inputs (log: " in refusal(capsys, monkeypatch, "data", *arguments)
    shutil.rmtree(tmp_path / "runs" / "logged" / "traces")
    data.run(load_config(DEMO, arguments))
    assert f"{len(lines)} texts" in capsys.readouterr().out


@pytest.mark.parametrize("place", [12, 30])
@torch.no_grad()
def test_a_token_at_the_very_edge_of_the_nucleus_ends_the_text(logged: Path, pair: ModelPair, place: int) -> None:
    """Another pass may round to the other side; a token well beyond the edge is an error, all the same."""
    config, start = config_of(logged), 7
    tokens = list(range(30, 38))
    for _ in range(40):  # greedy, so that nothing else is in the way
        tokens.append(int(pair.target(torch.tensor([tokens])).logits[0, -1].argmax()))
    probs, order = pair.target(torch.tensor([tokens[:place]])).logits[0, -1].double().softmax(-1).sort(descending=True)
    tokens[place] = int(order[5])
    before = float(probs[:5].sum())
    text = Text(list(tokens), start)
    columns = label(pair, recipe(config), text, Sampling(1.0, before - 5e-4), Plausibility())
    assert text.tokens == tokens[:place]
    assert len(columns["target_prob"]) == max(0, place - start - SPACE.depth)
    with pytest.raises(InputError, match=f"^token {place} of the text \\({tokens[place]}\\) has probability 0"):
        label(pair, recipe(config), Text(list(tokens), start), Sampling(1.0, before - 5e-3), Plausibility())


def test_texts_of_another_temperature_are_conspicuous(logged: Path, pair: ModelPair) -> None:
    """Many more unlikely tokens than there should be; as many as that, where the setting is right."""
    config = config_of(logged)
    texts = tuple(text for text in read_log(logged / "log.jsonl", pair) if text.sampling == Sampling(1.0))
    for setting, right in ((Sampling(1.0), True), (Sampling(0.1), False)):
        seen = make_shard(pair, recipe(config), Work("train", setting, (), given=texts)).plausibility
        assert 0.8 * NEW * len(texts) < seen.tokens <= NEW * len(texts)
        assert seen.is_foreign == (not right)
        assert f"{seen.expected / seen.tokens:.2%} are to be expected" in str(seen)
