"""The random numbers of decoding: each is used once, and what they decide has the joint law of text
and steps.

Given the text, every step's accepted length has the law that the labels say, whatever happened
before. This is what replay, and the comparison of decoding with it, build on.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice, product
from typing import Any

import pytest
import torch
from torch import Tensor

from data_gen.decoding.decoder import Decoder
from data_gen.decoding.loop import FixedTree, Random
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling, probabilities
from data_gen.trees import DraftTree
from data_gen.verification import base, distributions, get_verifier
from selector.actions import EMPTY, Action
from tests.data_gen.families import nameless, random_llama

PROMPT, SAMPLING = [1, 0, 1], Sampling(0.7)
CHOICES: list[Action] = [
    Action(1, 4, 0),
    Action(2, 1, 3),
    Action(4, 0, 5),
    Action(1, 1, 0),
    Action.copy(3),
    EMPTY,
]
Invert = Callable[[Tensor, Tensor], Tensor]


@pytest.fixture(scope="module")
def pair() -> ModelPair:
    """In float64."""
    return nameless(random_llama(2, 2, 0, 256).double(), random_llama(2, 1, 1, 256).double())


def made(pair: ModelPair, verifier: str, chooser: FixedTree | Random) -> Decoder:
    return Decoder(pair, SAMPLING, get_verifier(verifier), chooser)


@pytest.mark.parametrize("verifier", ["specinfer", "traversal", "lifted_uniform"])
def test_every_random_number_is_used_once(
    verifier: str, pair: ModelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the generator's order: those of the drafted tokens, then one for the verifier's decision
    at each node, then that of its extra token."""
    used: list[float] = []

    def watched(probs_V: Tensor, u: Tensor, own: Invert = distributions.invert) -> Tensor:
        if probs_V.shape[-1] > 1:  # a root without drafts leaves no choice of the last node
            used.extend(u.flatten().tolist())
        return own(probs_V, u)

    def decided(tree: DraftTree, p_NV: Tensor, q_NV: Tensor, uniform_N: list[float]) -> base.Walk:
        used.extend(uniform_N)
        return walk_of(tree, p_NV, q_NV, uniform_N)

    walk_of = base.Walk
    monkeypatch.setattr(distributions, "invert", watched)
    monkeypatch.setattr(base, "Walk", decided)
    chooser = Random(CHOICES, torch.Generator().manual_seed(3))
    made(pair, verifier, chooser).decode(PROMPT, 60, torch.Generator().manual_seed(5))
    stream = torch.rand(
        len(used), generator=torch.Generator().manual_seed(5), dtype=torch.float64
    ).tolist()
    assert len(used) > 100 and used == stream


class Scripted:
    """Stands for the uniform numbers: it takes every outcome of every draw in turn, with its
    probability."""

    def __init__(self) -> None:
        self.script: list[int] = []  # the outcome of each draw
        self.walk_of = base.Walk

    def begin(self) -> None:
        self.probability, self.at, self.open = 1.0, 0, []

    def __call__(self, probs_V: Tensor, u: Tensor) -> Tensor:
        rows = probs_V.expand(*u.shape[:-1], probs_V.shape[-1]).reshape(-1, probs_V.shape[-1])
        drawn = [self._draw(row_V) for row_V in rows for _ in range(u.shape[-1])]
        return torch.tensor(drawn).view(u.shape)

    def walk(self, tree: DraftTree, p_NV: Tensor, q_NV: Tensor, _: object) -> base.Walk:
        numbers: list[Any] = [Number(self) for _ in range(len(tree))]
        return self.walk_of(tree, p_NV, q_NV, numbers)

    def _draw(self, probs_V: Tensor) -> int:
        probs_V = probs_V.double() / probs_V.double().sum()
        return self.choose(probs_V)

    def choose(self, probs_V: Tensor) -> int:
        outcomes = (probs_V > 0).nonzero()[:, 0].tolist()
        if self.at == len(self.script):
            self.script.append(0)
        choice = self.script[self.at]
        self.open.append(choice + 1 < len(outcomes))
        self.at += 1
        self.probability *= float(probs_V[outcomes[choice]])
        return outcomes[choice]

    def advance(self) -> bool:
        """To the next script; False after the last."""
        del self.script[self.at :]
        while self.script and not self.open[len(self.script) - 1]:
            self.script.pop()
        if self.script:
            self.script[-1] += 1
        return bool(self.script)


class Number:
    """A uniform number of a verifier's decision, known only as far as it was compared."""

    def __init__(self, draws: Scripted) -> None:
        self.draws, self.low, self.high = draws, 0.0, 1.0

    def __lt__(self, limit: float) -> bool:
        below = (min(max(limit, self.low), self.high) - self.low) / (self.high - self.low)
        is_below = self.draws.choose(torch.tensor([1 - below, below], dtype=torch.float64)) == 1
        if is_below:
            self.high = min(self.high, limit)
        else:
            self.low = max(self.low, limit)
        return is_below

    def __ge__(self, limit: float) -> bool:
        return not self < limit


def enumerated(
    decoder: Decoder, steps: int, draws: Scripted
) -> dict[tuple[tuple[int, ...], ...], float]:
    """The probability of each sequence of steps, as the tokens that each of them commits."""
    chances: dict[tuple[tuple[int, ...], ...], float] = defaultdict(float)
    more = True
    while more:
        draws.begin()
        with (
            closing(decoder.steps(PROMPT, torch.Generator().manual_seed(0))) as decoding,
            torch.inference_mode(),
        ):
            committed = tuple(tuple(tokens) for _, tokens in islice(decoding, steps))
        chances[committed] += draws.probability
        more = draws.advance()
    return chances


def rows_along(pair: ModelPair, text: list[int]) -> Iterator[tuple[float, float]]:
    """p and q of each token of the text after the prompt."""
    tokens = torch.tensor([[*PROMPT, *text]])
    with torch.inference_mode():
        p_TV, q_TV = (
            probabilities(model(tokens).logits[0], SAMPLING) for model in (pair.target, pair.draft)
        )
    for at, token in enumerate(text, len(PROMPT) - 1):
        yield float(p_TV[at, token]), float(q_TV[at, token])


def survivals(rows: list[tuple[float, float]], length: int, bottom_up: bool) -> list[float]:
    """`P(tau >= t | text)` of a chain of `length` tokens, t = 0 .. length, as far as the text
    goes."""
    chances, drafted, weight = [1.0], 1.0, 1.0
    for p, q in rows[:length]:
        drafted *= q / p
        weight = min(1.0, weight * p / q) if bottom_up else weight * min(1.0, p / q)
        chances.append(drafted * weight)
    return chances


@pytest.mark.parametrize(
    ("verifier", "length", "steps"),
    [("specinfer", 1, 2), ("traversal", 2, 2), ("lifted_uniform", 3, 1)],
)
def test_steps_and_text_have_the_law_of_the_labels(
    verifier: str, length: int, steps: int, pair: ModelPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chains, exactly: P(text, accepted lengths) = P(text) times the labels' P(tau | text) of every
    step."""
    draws = Scripted()
    monkeypatch.setattr(distributions, "invert", draws)
    monkeypatch.setattr(base, "Walk", draws.walk)
    chances = enumerated(made(pair, verifier, FixedTree(Action(1, length, 0))), steps, draws)
    blocks = [
        block for n in range(1, length + 2) for block in product(range(pair.vocabulary), repeat=n)
    ]
    sequences = list(product(blocks, repeat=steps))
    assert chances.keys() <= set(sequences)
    for committed in sequences:
        rows = list(rows_along(pair, [token for block in committed for token in block]))
        expected = math.prod(p for p, _ in rows)
        for block in committed:
            reached = [*survivals(rows[: len(block)], length, verifier != "specinfer"), 0.0]
            expected *= reached[len(block) - 1] - reached[len(block)]
            rows = rows[len(block) :]
        assert chances.get(committed, 0.0) == pytest.approx(expected, abs=1e-12)
