"""Decoding beside replay along the very texts that were decoded."""

from __future__ import annotations

import random

import pytest
import torch

from data_gen.models.pair import ModelPair
from data_gen.texts.prompts import Prompt
from pipelines.config import SamplingSetting
from pipelines.data.recorded import against_labels, z_of
from pipelines.evaluate.assisted import Assistant
from pipelines.evaluate.methods import BEST_STATIC, BRANCHING, COPYING, PLAIN, Method, Task, row_of
from pipelines.evaluate.own_texts import own_texts
from pipelines.pair.loading import encode
from selector.actions import EMPTY, Action, ActionSpace
from selector.decision import LookupRule, Mode
from selector.latency import LatencyProfile
from selector.schema import MATCH
from selector.train.replay import lawful, outcomes
from tests.pipelines.test_methods import CONFIG, PROFILE, static

TEMPERATURES = (0.0, 0.8)
SLOW = {PLAIN: 1.0, BEST_STATIC: 1.25, BRANCHING: 1.5, COPYING: 1.0}  # steps decoded over steps by the profile
METHODS: list[Method] = [
    static(PLAIN, "specinfer", EMPTY),
    static(BEST_STATIC, "traversal", Action(1, 4, 0)),
    static(BRANCHING, "traversal", Action(3, 1, 3)),
    Method(COPYING, "traversal", Mode(0.8, 1.0, Action(1, 2, 0), (MATCH,), rule=LookupRule(1, 8))),
]
SETTINGS = [SamplingSetting(temperature=t) for t in TEMPERATURES]
OWN = CONFIG.model_copy(update={"sampling": SETTINGS, "data": CONFIG.data.model_copy(update={"siblings": 4})})
TOKENS, PROMPTS = 26, 16


@pytest.fixture(scope="module")
def prompts(pair: ModelPair) -> list[Prompt]:
    words, generator = pair.tokenizer.decode(range(260, 290)).split(), random.Random(7)
    return [Prompt(f"p{n}", " ".join(generator.choices(words, k=8)), "words", f"s{n // 2}") for n in range(PROMPTS)]


@pytest.fixture(scope="module")
def rows(pair: ModelPair, prompts: list[Prompt]) -> list[dict]:
    """What all methods decode, with times that are `SLOW` times those of the profile."""
    found = []
    for setting in SETTINGS:
        for number, prompt in enumerate(prompts):
            for method in METHODS:
                task = Task(encode(OWN, pair, prompt), TOKENS, seed=number)
                row = row_of(method, [method.decode(pair, setting.build(), task)])
                place = {"prompt": prompt.id, "temperature": setting.temperature, "top_p": setting.top_p}
                seconds = [SLOW[method.name] * _seconds(PROFILE, method, row, root) for root in row["step_roots"]]
                found.append({**row, **place, "seconds_of_steps": seconds})
    return found


def _seconds(profile: LatencyProfile, method: Method, row: dict, root: int) -> float:
    """Of a step of a static tree; the rule's times are not looked at here."""
    return profile.action_seconds(method.action or EMPTY, 10.0 + root, method.verifier)


def compared(
    pair: ModelPair, prompts: list[Prompt], rows: list[dict], settings: list[SamplingSetting] = SETTINGS
) -> dict[tuple[str, float], dict]:
    contenders = {(setting.temperature, setting.top_p): METHODS for setting in settings}
    found = own_texts(OWN.model_copy(update={"sampling": settings}), pair, prompts, contenders, rows, PROFILE)
    return {(row["method"], row["temperature"]): row for row in found}


@pytest.fixture(scope="module")
def found(pair: ModelPair, prompts: list[Prompt], rows: list[dict]) -> dict[tuple[str, float], dict]:
    return compared(pair, prompts, rows)


def test_steps_are_as_many_as_replay_says(found: dict[tuple[str, float], dict]) -> None:
    """Exactly where a text leaves nothing to chance: without drafts, and for chains and lookups at temperature 0."""
    assert found.keys() == {(method.name, t) for method in METHODS for t in TEMPERATURES}
    certain = [(PLAIN, 0.8), *((name, 0.0) for name in (PLAIN, BEST_STATIC, COPYING))]
    for key, row in found.items():
        assert row["steps"] > PROMPTS
        assert abs(row["z"]) < 4  # by chance once in 10,000 runs, and the seeds are fixed
        if key in certain:
            assert row["replayed_steps"] == pytest.approx(row["steps"], abs=1e-3)


def test_steps_that_take_longer_than_the_profile_says_are_found(found: dict[tuple[str, float], dict]) -> None:
    """Beside the best static tree, whose steps take 1.25 times as long as predicted."""
    for (name, temperature), row in found.items():
        if name == COPYING:
            continue
        assert row["step_time"]["value"] == pytest.approx(SLOW[name] / SLOW[BEST_STATIC], rel=0.1)
        if (name, temperature) == (PLAIN, 0.0):  # as many steps as replay says, in this and in the other
            assert row["step_time"]["value"] == pytest.approx(SLOW[name] / SLOW[BEST_STATIC], rel=1e-4)


@pytest.mark.parametrize("count", [10, PROMPTS])
def test_a_decoder_that_needs_more_steps_than_it_should_is_found(
    pair: ModelPair, prompts: list[Prompt], rows: list[dict], count: int
) -> None:
    """Every second step stands twice; ten prompts are enough to see it, with trees as with chains."""
    damaged = [
        {**row, **{key: [x for n, x in enumerate(row[key]) for _ in range(1 + n % 2)] for key in doubled}}
        for doubled in (("step_roots", "seconds_of_steps", "drafted"),)
        for row in rows
    ]
    found = compared(pair, prompts[:count], damaged)
    assert len(found) == len(METHODS) * len(SETTINGS) and all(row["z"] > 4 for row in found.values())


def test_z_of_steps_that_follow_their_labels_is_normal() -> None:
    """With 25 steps, which begin wherever the last one ended; an alarm at 3 is false once in 370 cases."""
    rng, space, trials = torch.Generator().manual_seed(2), ActionSpace.of_pairs(), 2000
    survivals_RS = lawful(torch.rand(40, len(space.sums_SA), generator=rng), space)
    action_N = torch.randint(len(space), (25,), generator=rng)
    found = []
    for _ in range(trials):
        roots, tokens = [0], []
        for action in action_N:
            law_J = outcomes(survivals_RS[roots[-1:]], action[None], space)[0].clamp(min=0)
            tokens.append(int(torch.multinomial(law_J, 1, generator=rng)) + 1)
            roots.append((roots[-1] + tokens[-1]) % 40)
        found.append(z_of(against_labels(survivals_RS[roots[:-1]], action_N, torch.tensor(tokens), space)))
    z = torch.tensor(found)
    assert abs(float(z.mean())) < 0.1 and float(z.std()) == pytest.approx(1, abs=0.06)
    assert float((z.abs() > 3).double().mean()) < 3 / 370


def test_texts_without_a_look_ahead_are_left_out(
    pair: ModelPair, prompts: list[Prompt], rows: list[dict], found: dict[tuple[str, float], dict]
) -> None:
    short = [{**row, "text": row["text"][:15]} for row in rows]
    assert compared(pair, prompts, short) == {}
    some = [{**row, "text": row["text"][: 15 if row["prompt"] == prompts[0].id else None]} for row in rows]
    fewer = compared(pair, prompts, some, SETTINGS[:1])
    assert len(fewer) == len(METHODS) and all(0 < row["steps"] < found[key]["steps"] for key, row in fewer.items())


def test_transformers_own_loop_shows_no_steps(pair: ModelPair, prompts: list[Prompt], rows: list[dict]) -> None:
    theirs = Assistant()
    more = [{**row, "method": theirs.name, "text": []} for row in rows if row["method"] == PLAIN]
    greedy = OWN.model_copy(update={"sampling": SETTINGS[:1]})
    found = own_texts(greedy, pair, prompts, {(0.0, 1.0): [*METHODS, theirs]}, [*rows, *more], PROFILE)
    assert {row["method"] for row in found} == {method.name for method in METHODS}


def test_a_text_that_cannot_be_the_targets_own_is_named_and_left_out(
    pair: ModelPair, prompts: list[Prompt], rows: list[dict], capsys: pytest.CaptureFixture[str]
) -> None:
    """At temperature 0 every other token is impossible; the other methods are compared all the same."""
    wrong = [
        {**row, "text": [(row["text"][0] + 1) % pair.vocabulary, *row["text"][1:]]}
        if (row["method"], row["temperature"], row["prompt"]) == (BRANCHING, 0.0, prompts[3].id)
        else row
        for row in rows
    ]
    assert compared(pair, prompts, wrong, SETTINGS[:1]).keys() == {
        (method.name, 0.0) for method in METHODS if method.name != BRANCHING
    }
    assert f"{BRANCHING}: prompt {prompts[3].id}: " in " ".join(capsys.readouterr().out.split())
