"""The loop of speculative decoding: choose an action, draft its tree, run the target over it, verify, commit.

`decoder.Decoder` and `graph.GraphDecoder` do all but the first, in `_run`.
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from data_gen.drafting.lookup import LookupIndex
from data_gen.features.root import Accepted, RootKnowledge
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.verification import Verifier
from selector.actions import Action
from selector.schema import FULL, LIGHT, MATCH

Features = dict[str, Tensor]
PARTS = ("draft", "select", "target", "verify", "commit")


class Chooser(Protocol):
    """Chooses the action of a step.

    `select` gets the features of each of the `feature_levels` in turn, until it returns an action. After the last
    level, and at the first root, it gets None and must answer. If it has an attribute `longest` that is not 0, it gets
    the match alone once the text has more tokens.
    """

    @property
    def feature_levels(self) -> tuple[str, ...]: ...

    def select(self, features: Features | None) -> Action | None: ...


@dataclass
class FixedTree:
    action: Action
    feature_levels: tuple[str, ...] = ()

    def select(self, features: Features | None) -> Action:
        return self.action


@dataclass
class Random:
    actions: Sequence[Action]
    generator: torch.Generator
    feature_levels: tuple[str, ...] = ()

    def select(self, features: Features | None) -> Action:
        return self.actions[int(torch.randint(len(self.actions), (), generator=self.generator))]


@dataclass
class Rehearsal:
    """Asks a chooser and drafts other actions, in turn: decisions can then be timed, and graphs be recorded."""

    chooser: Chooser
    actions: Iterator[Action]

    @property
    def feature_levels(self) -> tuple[str, ...]:
        return self.chooser.feature_levels

    def select(self, features: Features | None) -> Action:
        self.chooser.select(features)
        return next(self.actions)


@dataclass
class Step:
    """One decoding step. Unless the decoder is `timed`, a part that queues work on a GPU takes little time, and the
    part that reads its result takes the rest."""

    length: int  # committed tokens before the step, the root token included
    action: Action
    accepted: int  # tau, the number of accepted drafted tokens
    nodes: int  # of the drafted tree, the root included
    seconds: dict[str, float]  # wall-clock time by part (`PARTS`)

    @property
    def total(self) -> float:
        return sum(self.seconds.values())


@dataclass
class Decoded:
    tokens: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


class Clock:
    """Seconds by part of a step. If it `waits`, a lap begins with a host synchronisation."""

    def __init__(self, device: torch.device, waits: bool) -> None:
        self._device, self._waits = device, waits and device.type == "cuda"
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._last = self._now()

    def _now(self) -> float:
        if self._waits:
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def skip(self) -> None:
        self._last = self._now()

    def lap(self, part: str) -> None:
        now = self._now()
        self.seconds[part] += now - self._last
        self._last = now


class Text:
    """A text that is being decoded: its committed tokens, and `knowledge` of features if the chooser needs them."""

    def __init__(
        self, prompt: Sequence[int], sampling: Sampling, levels: tuple[str, ...], generator: torch.Generator
    ) -> None:
        self.tokens, self.prompt_length, self.generator = list(prompt), len(prompt), generator
        self.knowledge = RootKnowledge(prompt, sampling, levels) if levels else None
        self._index = LookupIndex() if self.knowledge is None else self.knowledge.text.index

    def proposal(self, length: int) -> list[int]:
        """The tokens of a lookup; none where the last token is new."""
        self._index.extend(self.tokens[len(self._index) :])
        return self._index.proposal(length)


OwnText = TypeVar("OwnText", bound=Text)


class Outcome(NamedTuple):
    tokens: list[int]  # the accepted ones and the extra one
    nodes: int  # of the tree, the root included
    accepted: Accepted


@dataclass(eq=False)
class Loop(ABC, Generic[OwnText]):
    """Decodes one prompt at a time. Trees are sampled with `sampling.draft`, their branches in the verifier's style.

    If it is `timed`, it waits for a GPU after each part of a step, so that `Step.seconds` is exact.
    """

    pair: ModelPair
    sampling: Sampling
    verifier: Verifier
    chooser: Chooser
    timed: bool = field(default=False, kw_only=True)

    slow_steps = 1  # at the beginning of a text

    def __post_init__(self) -> None:
        self.draft_sampling = self.sampling.draft
        self._longest = getattr(self.chooser, "longest", 0) or math.inf

    @torch.inference_mode()
    def decode(self, prompt: Sequence[int], max_new_tokens: int, generator: torch.Generator) -> Decoded:
        """Continue a prompt up to an end-of-sequence token, with at most `max_new_tokens` new tokens. The generator
        lives on the pair's device. ValueError for an empty prompt; InputError where a logit is not finite."""
        if not prompt:
            raise ValueError("the prompt holds no tokens")
        result = Decoded()
        with closing(self.steps(prompt, generator)) as steps:
            while len(result.tokens) < max_new_tokens:
                step, tokens = next(steps)
                result.steps.append(step)
                for token in tokens[: max_new_tokens - len(result.tokens)]:
                    result.tokens.append(token)
                    if token in self.pair.eos_ids:
                        return result
        return result

    @torch.inference_mode()
    def steps(self, prompt: Sequence[int], generator: torch.Generator) -> Generator[tuple[Step, list[int]]]:
        """Endless steps and their tokens. The caller must close the generator, which may raise `decode`'s error."""
        text = self._open(prompt, generator)
        try:
            while True:
                yield self._step(text)
        finally:
            self._close(text)

    def _step(self, text: OwnText) -> tuple[Step, list[int]]:
        clock = Clock(self.pair.device, self.timed)
        length = len(text.tokens)
        action = self._choose(text, clock)
        clock.lap("select")
        outcome = self._run(text, action, clock)
        if text.knowledge is not None:
            text.knowledge.committed(outcome.accepted, outcome.tokens)
        text.tokens += outcome.tokens
        clock.lap("commit")
        return Step(length, action, len(outcome.tokens) - 1, outcome.nodes, clock.seconds), outcome.tokens

    def _choose(self, text: OwnText, clock: Clock) -> Action:
        knowledge, levels = text.knowledge, self.chooser.feature_levels
        if knowledge is not None and len(text.tokens) > text.prompt_length:
            if len(text.tokens) > self._longest:
                levels = (MATCH,)
                knowledge.keep_match_alone()
            for level in levels:
                if level in (LIGHT, FULL):
                    self._forward_root(text, clock)
                    clock.lap("draft")
                action = self.chooser.select(knowledge.features(level))
                if action is not None:
                    return action
        action = self.chooser.select(None)
        assert action is not None
        return action

    @abstractmethod
    def _open(self, prompt: Sequence[int], generator: torch.Generator) -> OwnText:
        """A text to decode; the target's cache holds the prompt without its last token."""

    @abstractmethod
    def _close(self, text: OwnText) -> None: ...

    @abstractmethod
    def _forward_root(self, text: OwnText, clock: Clock) -> None:
        """The draft's forward pass up to the root, which a decision needs."""

    @abstractmethod
    def _run(self, text: OwnText, action: Action, clock: Clock) -> Outcome:
        """Draft, run the target, verify and commit."""
