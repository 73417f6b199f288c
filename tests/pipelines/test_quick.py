"""Stage `quick`: what it checks first, what it compares, and what becomes of its promise."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.texts.labelled import Recipe, Work, make_shard
from data_gen.texts.prompts import Form, Prompt
from data_gen.texts.recorded import texts_of
from pipelines.config import load_config
from pipelines.quick.candidates import best_of, candidates
from pipelines.quick.in_time import InTime
from pipelines.quick.machine import with_different
from pipelines.quick.sizes import LEAST, Prices, Sizes, fitting
from selector.actions import EMPTY, Action
from selector.latency import gpu_like
from selector.schema import InputError
from tests.copying import copying_model
from tests.pipelines.runs import ROOT, SMALL, SMALL_PAIR, UNTEMPLATED, espalier, outcome
from tests.selector.synthetic import texts
from tests.tiny import TEXT, train_tokenizer

RESULTS = ROOT / "configs" / "results.yaml"
VERIFIERS = ("naive", "block", "traversal")
LARGE = [
    *(*UNTEMPLATED, "prompts.tokens=256"),
    *("pair.target=some/large", "pair.draft=some/small", "data.tokens=256"),
    "sampling=[{temperature: 0.0}, {temperature: 0.6}, {temperature: 1.0}]",
]


def test_quick_answers_for_every_setting(demo: tuple[Path, str], tmp_path: Path) -> None:
    shutil.copytree(demo[0] / "runs", tmp_path / "runs")
    shutil.copytree(demo[0] / "mlruns", tmp_path / "mlruns")
    said = espalier(tmp_path, "quick", *SMALL, "quick.texts=8", "quick.minutes=60")
    before, _, after = said.partition("a pass of the target takes")
    assert " are longer than prompts.tokens=12 and are cut to their start" in before
    assert "Does a selector pay here?" in after
    quick = json.loads((tmp_path / "runs/demo/quick.json").read_text())
    assert [row["temperature"] for row in quick["settings"]] == [0.0, 1.0]
    for row in quick["settings"]:
        assert f"quick: {Sampling(row['temperature'])}: speculation" in said
        assert row["promise"] in row["candidates"] and row["promise"]["error"] >= 0
        assert sum(each["copies"] for each in row["candidates"]) == 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "prompts.jsonl: No such file or directory"),
        ('{"text": "one"}\n{"texts": "two"}\n', "prompts.jsonl:2: expected a JSON object with `text`"),
        ('{"text": "one", "source": "a"}\n', "prompts of 4 sources are needed that are not held out for evaluate"),
    ],
)
def test_prompts_are_checked_before_a_model_is_loaded(
    pair_folders: tuple[str, str], tmp_path: Path, content: str | None, message: str
) -> None:
    """The weights cannot be loaded, and nobody hears of it."""
    for role, folder in zip(("target", "draft"), pair_folders, strict=True):
        shutil.copytree(folder, tmp_path / role)
        (tmp_path / role / "model.safetensors").write_bytes(b"no weights")
    if content is not None:
        (tmp_path / "prompts.jsonl").write_text(content)
    line = ["pair.target=./target", "pair.draft=./draft", "prompts.file=prompts.jsonl", "prompts.tokens=99"]
    code, said = outcome(tmp_path, "quick", *line)
    assert code == 2 and message in said and len(said.strip().splitlines()) == 1, said
    assert not (tmp_path / "mlruns").exists()


def test_a_given_pair_needs_a_config_and_nothing_else(pair_folders: tuple[str, str], tmp_path: Path) -> None:
    lines = [json.dumps({"text": TEXT[n : n + 200], "source": n}) for n in range(24)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    own = f"name: mine\npair: {{target: {pair_folders[0]}, draft: {pair_folders[1]}, device: cpu, threads: 1}}\n"
    (tmp_path / "mine.yaml").write_text(f"{own}prompts: {{file: prompts.jsonl, tokens: 40}}\ndata: {{tokens: 12}}\n")
    said = espalier(tmp_path, "quick", "--config", "mine.yaml", "quick.texts=8", "quick.minutes=60", config="")
    assert "24 of them are longer than prompts.tokens=40 and are cut" in said and "T=1: speculation" in said
    quick = json.loads((tmp_path / "runs/mine/quick.json").read_text())
    assert {each["verifier"] for each in quick["settings"][0]["candidates"]} == set(quick["sizes"]["verifiers"])
    page = (tmp_path / "runs/mine/quick.html").read_text()
    assert all(f"{each['value']:.2f} ±{each['error']:.2f}" in page for each in quick["settings"][0]["candidates"])


def test_what_cannot_end_in_time_is_refused_and_says_how_long_it_takes(
    pair_folders: tuple[str, str], tmp_path: Path
) -> None:
    lines = [json.dumps({"text": TEXT[n : n + 200], "source": n}) for n in range(24)]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    given = [f"pair.{role}={name}" for role, name in zip(("target", "draft"), pair_folders, strict=True)]
    more = [*UNTEMPLATED, "prompts.file=prompts.jsonl", "prompts.tokens=40", "data.tokens=12", "quick.minutes=0.301"]
    code, said = outcome(tmp_path, "quick", *given, *more)
    assert code == 2 and "even the least takes longer than quick.minutes=0.301: set quick.minutes=" in said


def test_sampling_settings_for_which_time_is_up_are_left_out(
    pair_folders: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first setting's few texts take all of the time; they are enough for its answer."""
    prompts = [Prompt(str(n), TEXT[n : n + 200], "text", str(n)) for n in range(24)]
    more = [*UNTEMPLATED, "prompts.tokens=40", "data.tokens=12", "sampling=[{temperature: 1.0}, {temperature: 0.5}]"]
    given = [f"pair.{role}={name}" for role, name in zip(("target", "draft"), pair_folders, strict=True)]
    config, pair = load_config(RESULTS, [*given, *more]), ModelPair.load(*pair_folders, device="cpu")
    lengths, prices = [40] * 24, Prices(1e-3, 1e-3, 1e-4, 1e-4, 1e-3)
    sizes = fitting(config, prices, lengths, 100.0)
    found = InTime(config, pair, prices, sizes, prompts, lengths, time.perf_counter()).found()
    assert [answer.texts for answer in found.answers] == [LEAST]
    assert "the sampling settings T=0.5" in found.left_out and "44 of 48 texts" not in found.left_out
    assert "20 of 24 texts" in found.left_out and found.sizes.tokens <= 12


def test_a_wrong_data_set_is_named_before_a_model_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "lines.jsonl").write_text('{"problem": "one"}\n')
    line = ["prompts.sets=[{name: gsm8k, file: lines.jsonl}]", *SMALL_PAIR]
    code, said = outcome(tmp_path, "quick", *line)
    assert code == 2 and "record 1 has not the fields of '{question}'" in said
    assert not (tmp_path / "mlruns").exists()


PRICES = Prices(0.09, 0.02, 3e-3, 4e-4, 0.02, {"priority": 0.01, "lifted_priority": 0.012})  # of 0.5B and 0.1B on a CPU


def sizes_in(
    seconds: float, *more: str, lengths: tuple[int, ...] = (900,) * 90, prices: Prices = PRICES, timed: Any = None
) -> Sizes:
    return fitting(load_config(RESULTS, [*LARGE, *more]), prices, lengths, seconds, timed)


def test_what_does_not_fit_is_left_out_and_named() -> None:
    config = load_config(RESULTS, LARGE)
    all_of_it, some, little = (sizes_in(seconds) for seconds in (1e6, 110.0, 1.0))
    assert all_of_it.left_out(config, [900] * 90, [48] * 3) == [] and all_of_it.texts == config.quick.texts
    assert some.seconds <= 110 and LEAST <= some.texts < config.quick.texts and some.tokens < config.data.tokens
    named = " ".join(some.left_out(config, [900] * 90, [9, 7]))
    for each in ("settings T=1", "41 of 48 texts", "90 of 90 are cut", "verifiers priority and lifted_priority"):
        assert each in named
    assert little.texts == LEAST and little.seconds > little.least > 1
    steps = [sizes_in(10.0 * n) for n in range(1, 60)]
    amounts = [each.texts * each.tokens for each in steps]
    assert amounts[0] < amounts[-1] and all(each.seconds <= 10 * n for n, each in enumerate(steps[20:], 21))


def test_a_large_pair_fits_where_little_is_measured() -> None:
    """0.5B and 0.1B with 152k tokens on two cores: the machine is timed once, with few trees and short prompts."""
    prices = Prices(0.11, 0.035, 0.018, 0.005, 0.03)
    sizes = sizes_in(85.0, "sampling=[{temperature: 1.0}, {temperature: 0.6}]", prices=prices)
    assert sizes.seconds <= 85 and sizes.repeats == 1 and sizes.actions < sizes_in(1e6).actions
    after = sizes_in(46.0, "sampling=[{temperature: 1.0}, {temperature: 0.6}]", prices=prices, timed=sizes)
    assert after.seconds <= 46 and (after.repeats, after.count, after.actions) == (1, sizes.count, sizes.actions)


def test_a_verifier_that_is_asked_for_is_not_left_out() -> None:
    more = ["verifiers=[priority]", "train.verifier=priority"]
    assert "priority" in sizes_in(110.0, *more).verifiers and "lifted_priority" not in sizes_in(110.0, *more).verifiers


def test_prompts_that_cannot_be_cut_leave_enough_of_them() -> None:
    drop = ["prompts.longer=drop", "quick.texts=20"]
    lengths = tuple(range(300, 900, 10))
    assert sizes_in(60.0, *drop, lengths=lengths).prompt >= lengths[19]


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
    found = candidates(texts_of(table, VERIFIERS), gpu_like("copying", VERIFIERS, 0.3), VERIFIERS)
    trees, best = found[: len(VERIFIERS)], best_of(found)
    assert best.mode.rule is not None and str(best).startswith("copy ")
    assert best.judged.pays and best.judged.ratio.value > 2 * max(each.judged.ratio.value for each in trees)


def test_only_chains_are_recommended_to_verifiers_of_the_first_path() -> None:
    """By chance branching trees may seem the fastest; their other branches are never accepted."""
    data = texts(count=16)
    data = replace(data, survivals=dict.fromkeys(VERIFIERS, data.survivals["traversal"]))
    found = candidates(data, gpu_like("pair", VERIFIERS, 0.05), VERIFIERS)
    trees = {each.verifier: each.mode.action for each in found if each.mode.rule is None}
    assert trees["traversal"].K > 1
    assert trees["naive"].K == trees["block"].K == 1 and EMPTY not in trees.values()
    assert best_of(found).verifier == "traversal"


def test_four_sources_are_needed_two_to_choose_on_and_two_to_judge_on() -> None:
    data = texts(count=6)  # two texts make a source
    with pytest.raises(InputError, match="3 sources have texts that can be labelled: four are needed"):
        candidates(data, gpu_like("pair", ["traversal"], 0.05), ["traversal"])


def test_equal_branches_are_counted_once(pair: ModelPair) -> None:
    """At temperature 0 all branches of a greedy draft are one; another setting's numbers stay."""
    text = [(torch.arange(7, 60).tolist(), 5)]
    profile = with_different(pair, gpu_like(pair.fingerprint, ["traversal"], 0.1), Sampling(1.5), text, 1, (2, 8))
    profile = with_different(pair, profile, Sampling(0.0), text, 1, (2, 8))
    tree = Action(4, 0, 8)
    assert profile.nodes(tree, (0.0, 1.0)) == 9.0
    assert 9 < profile.nodes(tree, (1.5, 1.0)) <= 33 == profile.nodes(tree, (1.0, 1.0))
