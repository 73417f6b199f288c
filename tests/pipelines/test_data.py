"""The data stage against what happens to long runs: kills, broken models; its plan; and its
labels."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data_gen.models.pair import ModelPair
from data_gen.texts.labelled import make_shard
from data_gen.traces import TraceStore, read_texts
from pipelines.config import Config
from pipelines.data.recorded import against_labels, realised, samplings_of, z_of
from pipelines.data.stage import shards
from pipelines.pair.source import source_of
from pipelines.pair.stage import recipe
from selector.actions import GREEDY, Action, ActionSpace
from selector.train.data import SPLITS
from selector.train.ranked import balanced
from selector.train.replay import monotone, outcomes
from tests.pipelines.runs import SMALL, demo_config, espalier, outcome, patch, started

SHARDS = 2 * (7 + 2 + 3)  # texts of the three splits under both settings, one a shard
TRACES = Path("runs/demo/traces")
FEW = [*SMALL, "data.texts=12", "data.tokens=16", "data.texts_per_shard=1"]
FEW += ["sampling=[{temperature: 0.7}, {temperature: 1.0}]"]
SPACE = ActionSpace.recorded()


def config_of(*overrides: str) -> Config:
    return demo_config(*FEW, *overrides)


def files(folder: Path) -> dict[str, bytes]:
    """All files of the store."""
    store = folder / TRACES
    return {
        str(path.relative_to(store)): path.read_bytes()
        for path in sorted(store.rglob("*"))
        if path.is_file()
    }


def shard_count(folder: Path) -> int:
    return len(list((folder / TRACES).rglob("*.parquet")))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The store of an undisturbed run."""
    folder = tmp_path_factory.mktemp("whole")
    espalier(folder, "data", *FEW)
    hashes = files(folder)
    assert sum(name.endswith(".parquet") for name in hashes) == SHARDS
    assert set(hashes) - {"manifest.json"} == set(json.loads(hashes["manifest.json"])["shards"])
    return hashes


def broken_after_a_shard() -> None:
    """In the process of a stage: once there is a shard, every pass of the target gives NaN."""

    def spoilt(forward: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *arguments: Any, **named: Any) -> Any:
            result = forward(self, *arguments, **named)
            if len(self.model.layers) == 2 and shard_count(Path()):
                result.logits[..., 7] = float("nan")
            return result

        return call

    patch("transformers.LlamaForCausalLM.forward", spoilt)


def test_whatever_ends_it_the_same_command_goes_on(whole: dict[str, bytes], tmp_path: Path) -> None:
    """A broken model and SIGKILL: what is finished stays, and the store ends as the undisturbed
    run's, to a byte."""
    output_path, line = tmp_path / "said", ["data", *FEW]
    code, output = outcome(tmp_path, *line, prepare=broken_after_a_shard)
    assert code == 2 and "Traceback" not in output, output
    last = output.strip().splitlines()[-1]
    assert re.match(r"espalier: .*prompt .*: .*/target: .* not finite", last), last
    assert shard_count(tmp_path) == 1

    process = started(tmp_path, output_path, *line)
    while shard_count(tmp_path) < 4 and process.is_alive():
        time.sleep(0.002)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL and 4 <= shard_count(tmp_path) < SHARDS
    kept = {name: content for name, content in files(tmp_path).items() if name.endswith(".parquet")}
    assert kept.items() <= whole.items()

    espalier(tmp_path, *line, "processes=2")
    assert files(tmp_path) == whole
    assert {path.name for path in (tmp_path / "mlruns").glob("mlflow.db*")} <= {"mlflow.db"}


def test_a_clock_ends_it_once_there_are_texts_of_every_kind(tmp_path: Path) -> None:
    line = ["data", *FEW, "data.texts=400", "data.seconds=1"]
    espalier(tmp_path, *line)
    store, config = files(tmp_path), config_of("data.texts=400", "data.seconds=1")
    assert 6 <= shard_count(tmp_path) < 400, "of 800 shards"
    for split in SPLITS:
        texts = read_texts(tmp_path / TRACES, split, config.verifiers)
        assert {texts.samplings[at] for at in texts.sampling_X.tolist()} == set(
            samplings_of(config)
        )
    assert "reusing" in espalier(tmp_path, *line) and files(tmp_path) == store


TREES = Action(1, 5, 0), Action(2, 0, 4), Action(3, 2, 3), Action(4, 1, 2), Action(4, 0, 8)
DIFFERENT = tuple(action._replace(style=GREEDY) for action in TREES[1:])
SHAPES = balanced(6, 3), balanced(24, 4), Action.ranked(balanced(6, 2).ranks, copied=6)


EVERY_LEVEL = Action.branching((2, 2)), Action.branching((3, 1, 2)), Action.branching((2, 2, 2))


@pytest.mark.parametrize("behaviour", [TREES, DIFFERENT, SHAPES, EVERY_LEVEL])
def test_what_decoding_accepts_is_what_the_labels_say(
    pair: ModelPair, inside: Path, behaviour: tuple[Action, ...]
) -> None:
    """Over a hundred steps with every verifier, also where the draft has its own temperature: a
    token would show. What shapes by rank and copies yield is certain, so there it is the same."""
    settings = "sampling=[{temperature: 0.7, draft_temperature: 0.8}, {temperature: 1.0}]"
    config = config_of("data.texts=90", "data.texts_per_shard=32", "data.siblings=4", settings)
    store = TraceStore(config.folder / "traces", {})
    ranked = tuple(action for action in behaviour if action.ranks)
    children = tuple(action.children for action in behaviour if action.children)
    space = replace(config.data.space, ranked=ranked, children=children)
    for name, work in shards(config, source_of(config)).items():
        if work.split == "train":
            decoded = replace(work, decoded=True)
            store.write(
                name,
                make_shard(
                    pair, replace(recipe(config), space=space, behaviour=behaviour), decoded
                ),
            )
    rows = realised(config)
    assert {row["verifier"] for row in rows} == {"specinfer", "traversal", "lifted_uniform"}
    for row in rows:
        assert abs(row["z"]) < 4 and row["steps"] > 60, row
        if ranked:
            assert row["realised"] == row["expected"] > 1.05
            continue
        error = abs((row["realised"] - row["expected"]) / row["z"])
        assert row["realised"] > 2 and error < 0.3, row


def test_z_of_steps_that_follow_their_labels_is_normal() -> None:
    """With 25 steps, which begin wherever the last one ended; an alarm at 3 is false once in 370
    cases."""
    rng, trials = torch.Generator().manual_seed(2), 2000
    survivals_RS = monotone(torch.rand(40, len(SPACE.sums_SA), generator=rng), SPACE)
    root_X, steps = torch.zeros(trials, dtype=torch.int64), []
    for action in torch.randint(len(SPACE), (25,), generator=rng):
        labels = survivals_RS[root_X], action.expand(trials)
        tokens_X = 1 + outcomes(*labels, SPACE).clamp(min=0).multinomial(1, generator=rng)[:, 0]
        steps.append(against_labels(*labels, tokens_X, SPACE))
        root_X = (root_X + tokens_X) % 40
    z = torch.tensor([z_of(own_N3) for own_N3 in torch.stack(steps, dim=1)])
    assert abs(float(z.mean())) < 0.1 and float(z.std()) == pytest.approx(1, abs=0.06)
    assert float((z.abs() > 3).double().mean()) < 3 / 370


def test_a_mean_beyond_what_a_tree_yields_is_not_taken_for_certain() -> None:
    """One draw of siblings may give a tree of six levels a mean of 13 tokens. Within its bounds a
    mean without variance is certain: a step that yields another number is an alarm."""
    action = SPACE.index(Action(1, 6, 0))
    chain = SPACE.sums_SA[:, action] > 0
    for survival, quiet in ((2.0, True), (1.0, False)):
        survivals_1S = torch.where(chain, survival, 0.0)[None]
        steps_13 = against_labels(survivals_1S, torch.tensor([action]), torch.tensor([4]), SPACE)
        assert float(steps_13[0, 1]) == pytest.approx(1 + 6 * survival)
        assert (abs(z_of(steps_13)) < 4) == quiet
