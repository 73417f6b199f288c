"""Decisions that traces promise to pay, tried in decoding."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data_gen.decoding import Decoder
from data_gen.models import ModelPair
from pipelines.config import load_config
from pipelines.confirm import Trial
from pipelines.methods import Decoding
from selector.actions import EMPTY, Action
from selector.latency import LatencyProfile, Table
from selector.modes import Judged
from selector.runtime import Mode
from tests.selector.synthetic import SPACE, Traces, module, profile

ROOT = Path(__file__).parents[2]
PROFILE = profile()
DEAR = replace(PROFILE, target=Table([10, 100], [1, 33], [[0.005, 0.5], [0.005, 0.5]]))
WIDTHS = [32, 32, 32]  # the pair's
SHORT, HUGE = Action(1, 1, 0), Action(4, 8, 8)
NEVER, ALWAYS = 1e9, 1e-9  # tokens a second is charged at: nothing is drafted then, or as much as there is


@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory, pair: ModelPair) -> Trial:
    prompts = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = ({"text": f"the quick brown fox number {n} jumps over", "source": f"file {n // 2}"} for n in range(80))
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    overrides = [f"prompts.file={prompts}", "prompts.tokens=8", "data.tokens=12", "train.confirm=4"]
    return Trial(load_config(ROOT / "configs" / "demo.yaml", overrides), pair)


def ways(static: Action, gain: float, ratio: float = 1.5, error: float = 0.1) -> list[Judged]:
    """Decisions at the root that the traces promise so much of, and none."""
    mode = Mode(1.0, 1.0, static, False, False, gain)
    return [Judged(replace(mode, at_root=True), ratio, error, {}), Judged(mode, 1.0, 0.0, {})]


def confirmed(trial: Trial, judged: list[Judged], times: LatencyProfile = PROFILE) -> list[Judged]:
    traces = Traces(64, WIDTHS)
    traces.profile = times
    (result,) = trial.confirmed(module("regressor", widths=WIDTHS), traces, [judged])  # type: ignore[arg-type]
    return result


def test_what_decoding_confirms_is_kept(trial: Trial) -> None:
    """Where many tokens are very dear to verify, nothing at all is faster than a tree of 40."""
    kept, static = confirmed(trial, ways(HUGE, NEVER), DEAR)
    assert kept.mode.at_root and kept.decoded is not None and kept.decoded.prompts == 4
    assert kept.decoded.ratio > 2
    assert kept.assured == kept.decoded.ratio - 2 * kept.decoded.error
    assert kept.row()["decoded"]["ratio"] == kept.decoded.ratio
    assert static.decoded is None and static.assured == 1


def test_what_decoding_refutes_is_dropped(trial: Trial) -> None:
    """On a machine where they are not, that tree is the better one: the draft is nearly as good as the target."""
    kept, dropped = confirmed(trial, ways(HUGE, NEVER))
    assert kept.static
    assert dropped.decoded is not None and dropped.decoded.ratio < 1 < dropped.ratio - 2 * dropped.error


def test_time_is_that_of_the_profile(trial: Trial) -> None:
    """Without a draft every token takes one step, whose time is known."""
    static, never = (PROFILE.action_seconds(EMPTY, 20, "traversal", at_root) for at_root in (False, True))
    (kept, dropped) = confirmed(trial, ways(EMPTY, NEVER))
    assert kept.static and dropped.decoded is not None
    assert dropped.decoded.ratio == pytest.approx(static / never, rel=0.05)  # lengths differ a little


def test_only_what_is_promised_is_tried(trial: Trial) -> None:
    """The better of two ways, and not the other one; along the trunk, what the selector stops at is decoded."""
    promised, static = ways(HUGE, NEVER)
    further = tuple(SPACE.index(SPACE.chain(t)) for t in range(4))
    along = replace(promised, mode=replace(promised.mode, at_root=False, on_trunk=True, further=further))
    doubtful = replace(promised, ratio=1.1, error=0.06)
    tried = confirmed(trial, [along, doubtful, static], DEAR)
    assert [way.decoded is not None for way in tried] == [True, False, False]
    assert tried[0].mode.on_trunk and tried[0].decoded.ratio > 2  # type: ignore[union-attr]
    assert confirmed(trial, [static, doubtful]) == [static, doubtful]


def test_errors_are_over_sources_whose_prompts_are_alike(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens and seconds that are known: sums over sums, without each source in turn."""
    sources = [prompt.source for prompt in trial.prompts]
    tokens = [10.0 * (1 + int(source.split()[1]) % 3) for source in sources]

    def decode(selector: object, profile: object, mode: Mode, *_: object) -> list[Decoding]:
        seconds = [1.0 + 0.1 * n * mode.at_root for n in range(len(sources))]
        return [Decoding(t, s, 1, 1, s, 0.0) for t, s in zip(tokens, seconds, strict=True)]  # type: ignore[arg-type]

    monkeypatch.setattr(trial, "decode", decode)
    found = next(way.decoded for way in confirmed(trial, ways(SHORT, ALWAYS)) if way.decoded)
    groups = [[n for n, own in enumerate(sources) if own != left] for left in sorted(set(sources))]
    values = [len(group) / sum(1.0 + 0.1 * n for n in group) for group in groups]
    mean = sum(values) / len(values)
    assert len(values) > 1 and found.ratio == pytest.approx(
        len(sources) / sum(1 + 0.1 * n for n in range(len(sources)))
    )
    spread = sum((value - mean) ** 2 for value in values)
    assert found.error == pytest.approx(((len(values) - 1) / len(values) * spread) ** 0.5)


def test_a_static_tree_is_decoded_once(trial: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh, decoded = Trial(trial.config, trial.pair), []
    decode = Decoder.decode
    monkeypatch.setattr(Decoder, "decode", lambda self, *args: decoded.append(self) or decode(self, *args))
    confirmed(fresh, ways(SHORT, ALWAYS))
    once = len(decoded)
    confirmed(fresh, ways(SHORT, ALWAYS), DEAR)  # another clock
    assert once == 8 and len(decoded) == 12


def test_threads_are_as_they_were(trial: Trial) -> None:
    pair = trial.config.pair.model_copy(update={"threads": 2})
    other = Trial(trial.config.model_copy(update={"pair": pair}), trial.pair)
    before = torch.get_num_threads()
    confirmed(other, ways(SHORT, ALWAYS))
    assert torch.get_num_threads() == before != 2


def test_it_can_be_turned_off(trial: Trial) -> None:
    train = trial.config.train.model_copy(update={"confirm": 0})
    off = Trial(trial.config.model_copy(update={"train": train}), trial.pair)
    judged = ways(SHORT, ALWAYS)
    assert confirmed(off, judged) == judged
