from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, product
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from data_gen.decoding import loop
from data_gen.decoding.decoder import Decoder
from data_gen.decoding.loop import PARTS, Decoded, FixedTree, Random
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.verification import VERIFIERS, get_verifier
from selector.actions import EMPTY, GREEDY, Action
from selector.schema import FEATURES, PAIR, SCALARS_KEY
from selector.train.ranked import balanced
from tests.data_gen import decodes
from tests.data_gen.decodes import generated

PROMPT = [5, 17, 203, 44, 91]
ACTIONS = [Action(1, 4, 0), Action(2, 1, 3), Action(4, 0, 5), Action(3, 2, 1), Action(1, 0, 0)]
DIFFERENT = [Action(3, 1, 3, GREEDY), Action(4, 0, 2, GREEDY)]

LEVELS = [
    balanced(12, 4),
    Action.ranked(balanced(6, 3).ranks, copied=16),
    Action.branching((3, 2, 1)),
]


def decode(
    pair: ModelPair,
    action: Action | None = None,
    verifier: str = "traversal",
    temperature: float = 1.0,
    prompt: Sequence[int] = PROMPT,
    tokens: int = 24,
    level: str | None = None,
) -> Decoded:
    asked = (level,) if level else ()
    chooser = (
        FixedTree(action, asked)
        if action
        else Random(ACTIONS, torch.Generator().manual_seed(0), asked)
    )
    return decodes.decode(pair, chooser, prompt, tokens, Sampling(temperature), verifier)


@pytest.mark.parametrize(
    ("action", "verifier", "prompt"),
    [
        *((None, name, PROMPT) for name in VERIFIERS),
        *product(DIFFERENT, ("specinfer", "traversal"), [PROMPT]),
        *product((Action(2, 1, 2), *LEVELS), ("traversal",), ([9], PROMPT * 3)),
    ],
    ids=str,
)
def test_greedy_decoding_equals_generate(
    pair: ModelPair, action: Action | None, verifier: str, prompt: list[int]
) -> None:
    """None: all of `ACTIONS` in turns. A prompt of one token works, too."""
    decoded = decode(pair, action, verifier, temperature=0, prompt=prompt, tokens=40).tokens
    assert decoded == generated(pair.target, prompt, 40)


def test_the_empty_tree_makes_no_draft_pass(
    pair: ModelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair.draft, "forward", lambda *_, **__: pytest.fail("the draft was called"))
    assert len(decode(pair, Action(1, 0, 0), tokens=5).steps) == 5


@pytest.mark.parametrize("action", [None, DIFFERENT[0]], ids=str)
def test_keeping_what_a_selector_may_know_changes_no_token(
    pair: ModelPair, action: Action | None
) -> None:
    """Features at every root, with the draft's pass over it: the same draws, and the same text."""
    plain = decode(pair, action, tokens=40)
    for level in FEATURES:
        knowing = decode(pair, action, tokens=40, level=level)
        assert knowing.tokens == plain.tokens
        assert [step.action for step in knowing.steps] == [step.action for step in plain.steps]


def test_steps_say_what_was_drafted_and_where(pair: ModelPair) -> None:
    length = len(PROMPT)
    for step in decode(pair, tokens=40, level="light").steps:
        assert step.length == length
        assert 0 <= step.accepted <= step.action.L1 + step.action.L2
        assert 1 <= step.nodes <= 1 + step.action.nodes
        length += step.accepted + 1
    assert length >= len(PROMPT) + 40


class Late:
    """Asks for the draft's rows at the 80th step, and drafts then; before, it never does."""

    def __init__(self, levels: tuple[str, ...], action: Action, always: bool = False) -> None:
        self.feature_levels, self.action, self.always = levels, action, always
        self.steps = 0
        self.last: dict[str, Tensor] = {}

    def select(self, features: dict[str, Tensor] | None) -> Action | None:
        if features is not None and len(features.get(SCALARS_KEY, ())) == PAIR.first:
            if self.always or self.steps == 80:
                return None
        elif features is not None:
            self.last = {key: values.clone() for key, values in features.items()}
        self.steps += 1
        return Action(2, 1, 2) if self.steps > 80 else self.action


@pytest.mark.parametrize(
    ("levels", "action"), [((), EMPTY), (("early", "full"), Action(1, 2, 0))], ids=str
)
def test_a_draft_that_lags_behind_catches_up_in_small_passes(
    pair: ModelPair, levels: tuple[str, ...], action: Action
) -> None:
    """None gives more than 64 rows of the vocabulary; and the features are those of a chooser that
    always asks."""
    rows: list[int] = []
    choosers = Late(levels, action), Late(levels, action, always=True)
    with pair.draft.register_forward_hook(
        lambda _, __, output: rows.append(output.logits.shape[1])
    ):
        for chooser in choosers:
            decoder = Decoder(pair, Sampling(0.0), get_verifier("traversal"), chooser)
            list(islice(decoder.steps(PROMPT, torch.Generator().manual_seed(0)), 81))
    late, always = choosers
    assert max(rows) <= 64
    assert late.last.keys() == always.last.keys() and bool(late.last) == bool(levels)
    for key, values in always.last.items():
        torch.testing.assert_close(late.last[key], values, atol=1e-5, rtol=1e-5)


class Short(Late):
    """Asks for the draft's rows, but on texts of at most 40 tokens."""

    longest = 40

    def __init__(self) -> None:
        super().__init__(("early", "light"), Action(1, 2, 0), always=True)
        self.seen: list[set[str] | None] = []

    def select(self, features: dict[str, Tensor] | None) -> Action | None:
        self.seen.append(None if features is None else set(features))
        return (
            super().select(features) if features is None or SCALARS_KEY in features else self.action
        )


def test_on_long_texts_a_chooser_gets_the_match_alone(pair: ModelPair) -> None:
    """The same that a lookup rule gets there. Short and long texts keep the draft's cache right."""
    short = Short()
    decoded = decodes.decode(pair, short, PROMPT * 2, 60)
    expected = decodes.decode(pair, Action(1, 2, 0), PROMPT * 2, 60)
    asked = iter(short.seen[1:])
    for step in decoded.steps[1:]:
        if step.length > 40:
            assert next(asked) == {"match"}
        else:
            assert [next(asked), next(asked)] == [{SCALARS_KEY}, {SCALARS_KEY}]
    assert {step.length > 40 for step in decoded.steps[1:]} == {False, True}
    assert decoded.tokens == expected.tokens
    assert [step.accepted for step in decoded.steps] == [step.accepted for step in expected.steps]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_greedy_decoding_equals_generate_on_a_gpu(pair_folders: tuple[str, str]) -> None:
    pair = ModelPair.load(*pair_folders, device="cuda")
    assert decode(pair, Action(2, 1, 3), temperature=0, tokens=40).tokens == generated(
        pair.target, PROMPT, 40
    )


@pytest.mark.parametrize("level", [None, "light"])
def test_the_passes_over_the_prompt_are_no_part_of_a_step(
    pair: ModelPair, monkeypatch: pytest.MonkeyPatch, level: str | None
) -> None:
    """By a clock that the tokens of every pass move on. A step of a chain of two passes three nodes
    through the target, and through the draft its first token and at most two that it lacks."""
    now = [0.0]
    monkeypatch.setattr(loop, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def tick(_: object, inputs: tuple[Tensor, ...]) -> None:
        now[0] += inputs[0].shape[1]

    prompt = list(range(5, 45))
    with pair.target.register_forward_pre_hook(tick), pair.draft.register_forward_pre_hook(tick):
        steps = decode(pair, Action(1, 2, 0), prompt=prompt, level=level).steps
    for step in steps:
        assert set(step.seconds) == set(PARTS) and step.nodes == step.seconds["target"] == 3
        assert 2 <= step.seconds["draft"] <= 3
        assert sum(step.seconds.values()) == step.seconds["target"] + step.seconds["draft"]
    assert now[0] == sum(sum(step.seconds.values()) for step in steps) + 2 * (len(prompt) - 1)
