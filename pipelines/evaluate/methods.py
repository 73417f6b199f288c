"""The methods that `evaluate` compares under one sampling setting: how each decodes, and how it is replayed.

A *clock* says what a method's time is: `wall`, this machine's; or a latency profile of another machine, on which
methods are replayed alone. What is tuned is tuned on the training texts, for its clock.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from data_gen.decoding import decoder_for
from data_gen.decoding.loop import Chooser, Features, FixedTree
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.verification import get_verifier
from pipelines.evaluate.assisted import Assistant
from selector.actions import EMPTY, Action, ActionSpace, Choice
from selector.decision import Mode
from selector.latency import LatencyProfile
from selector.runtime.selector import Tuned
from selector.schema import MATCH
from selector.train.data import Texts, Timed
from selector.train.module import SelectorModule
from selector.train.replay import Replayed
from selector.train.rules import AcceptanceRule
from selector.train.tuning import StaticTable, replay_mode, static_replay

WALL, SYNTHETIC = "wall", "gpu_like"  # further clocks are named after the profile: gpu_like_1/20
AUTOREGRESSIVE, SELECTOR, STATIC = "autoregressive", "selector", "static"
AT_ROOT = f"{STATIC} traversal at the root"
BRANCHING = f"{STATIC}, branching"
BEST_STATIC, BEST_BY_KIND = f"best {STATIC}", f"best {STATIC} by kind"
RULE, COPYING = "recent acceptance", "lookup or tree"
ASSISTED, ASSISTED_CONSTANT = "assisted generation", "assisted generation, constant"
PROMPT_LOOKUP = "prompt lookup, constant"
SPACE = ActionSpace.with_lookups()
Tree = tuple[str, Action]  # a verifier and a static tree


@dataclass(frozen=True)
class Task:
    """A prompt's token ids and kind, new tokens at most, and the seed."""

    prompt: list[int]
    kind: str
    limit: int
    seed: int


@dataclass
class Decoding:
    """What a method made of one prompt.

    `tokens` are those up to the limit, as replay counts them; `block_tokens` are all that its steps yield.

    Attributes:
        text: the new tokens, up to the limit; empty where the method's steps are not ours to see, as is what follows.
        step_roots: where each step began, counted from the last prompt token.
        seconds_of_steps: what each took.
    """

    tokens: int
    seconds: float
    steps: int
    block_tokens: int
    step_seconds: float
    select_seconds: float
    actions: dict[str, int] = field(default_factory=dict)
    text: list[int] = field(default_factory=list)
    step_roots: list[int] = field(default_factory=list)
    seconds_of_steps: list[float] = field(default_factory=list)


class Method(ABC):
    """A way of decoding under one sampling setting."""

    name: str
    verifier: str
    action: Action | None  # where there is one for all steps

    @property
    def identity(self) -> Hashable:
        """Equal for methods that decode alike."""
        return self.name

    @property
    def verifiers(self) -> tuple[str, ...]:
        """Whose labels replay needs."""
        return (self.verifier,)

    @abstractmethod
    def decode(self, pair: ModelPair, sampling: Sampling, task: Task) -> Decoding:
        """Continue one prompt."""

    def replay(self, texts: Texts, profile: LatencyProfile) -> Replayed | None:
        """Its time on labelled texts, by a machine's profile; None where that takes decoding."""
        return None


def decodes_as(verifier: str, tree: Action, rule: Hashable = None) -> Hashable:
    """Equal for static trees and rules that decode alike. Which verifier there is matters where a tree is drafted: one
    verifier checks all copies."""
    return "" if tree == EMPTY else verifier, tree, rule


class Speculative(Method):
    """Our own loop."""

    name: str

    def trees(self, kind: str) -> tuple[str, Chooser]:
        """Verifier and chooser for one kind of prompts."""
        raise AssertionError

    def decode(self, pair: ModelPair, sampling: Sampling, task: Task) -> Decoding:
        verifier, chooser = self.trees(task.kind)
        decoder = decoder_for(pair, sampling, get_verifier(verifier), chooser, len(task.prompt) + task.limit)
        generator = torch.Generator(device=pair.device).manual_seed(task.seed)
        start = time.perf_counter()
        decoded = decoder.decode(task.prompt, task.limit, generator)
        seconds = time.perf_counter() - start
        actions: dict[str, int] = {}
        for step in decoded.steps:
            actions[str(step.action)] = actions.get(str(step.action), 0) + 1
        block_tokens = sum(step.accepted + 1 for step in decoded.steps)
        seconds_of_steps = [sum(step.seconds.values()) for step in decoded.steps]
        return Decoding(
            tokens=len(decoded.tokens),
            seconds=seconds,
            steps=len(decoded.steps),
            block_tokens=block_tokens,
            step_seconds=sum(seconds_of_steps),
            select_seconds=sum(step.seconds["select"] for step in decoded.steps),
            actions=actions,
            text=decoded.tokens,
            step_roots=[step.length - len(task.prompt) for step in decoded.steps],
            seconds_of_steps=seconds_of_steps,
        )


@dataclass
class StaticTrees(Speculative):
    """One tree for all steps; `by_kind` overrides it for some kinds of prompts."""

    name: str
    verifier: str
    tree: Action
    by_kind: dict[str, Tree] = field(default_factory=dict)

    @property
    def action(self) -> Action | None:  # type: ignore[override]
        return None if self.by_kind else self.tree

    @property
    def identity(self) -> Hashable:
        return self.name if self.by_kind else decodes_as(self.verifier, self.tree)

    @property
    def verifiers(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys((self.verifier, *(verifier for verifier, _ in self.by_kind.values()))))

    def trees(self, kind: str) -> tuple[str, Chooser]:
        verifier, action = self.by_kind.get(kind, (self.verifier, self.tree))
        return verifier, FixedTree(action)

    def replay(self, texts: Texts, profile: LatencyProfile) -> Replayed:
        own = [self.by_kind.get(kind, (self.verifier, self.tree)) for kind in texts.kind_X]
        columns = torch.zeros(3, len(texts), dtype=torch.float64)
        for verifier, action in dict.fromkeys(own):
            index = torch.tensor([x for x, tree in enumerate(own) if tree == (verifier, action)])
            found = static_replay(Timed(texts.take(index), verifier, profile), action)
            columns[:, index] = torch.stack([found.tokens_X, found.seconds_X, found.steps_X])
        return Replayed(columns[0], columns[1], columns[2], torch.zeros(0))


@dataclass
class Rule(Speculative):
    """The rule of thumb."""

    name: str
    verifier: str
    rule: AcceptanceRule
    action: Action | None = None

    def trees(self, kind: str) -> tuple[str, Chooser]:
        return self.verifier, self.rule

    def replay(self, texts: Texts, profile: LatencyProfile) -> Replayed:
        return self.rule.replay(Timed(texts, self.verifier, profile))


@dataclass
class Copying(Speculative):
    """The rule for lookups: copy where the text repeats itself, draft the static tree elsewhere."""

    name: str
    verifier: str
    mode: Mode
    action: Action | None = None

    @property
    def identity(self) -> Hashable:
        return decodes_as(self.verifier, self.mode.action, self.mode.rule)

    def trees(self, kind: str) -> tuple[str, Chooser]:
        return self.verifier, _Copying(self.mode)

    def replay(self, texts: Texts, profile: LatencyProfile) -> Replayed:
        return replay_mode(Timed(texts, self.verifier, profile), {}, self.mode)


@dataclass
class _Copying:
    """The chooser of such a rule."""

    mode: Mode
    feature_levels: tuple[str, ...] = (MATCH,)

    def select(self, features: Features | None) -> Choice:
        return self.mode.copied(float(features[MATCH])) if features else self.mode.action


@dataclass
class Selecting(Speculative):
    """The selector: as exported where it decodes, as trained where it is replayed."""

    name: str
    verifier: str
    mode: Mode
    module: SelectorModule
    tuned: Tuned | None = None
    action: Action | None = None

    @property
    def identity(self) -> Hashable:
        return self.name if self.mode.decides else decodes_as(self.verifier, self.mode.action, self.mode.rule)

    def trees(self, kind: str) -> tuple[str, Chooser]:
        assert self.tuned is not None
        return self.verifier, self.tuned

    def replay(self, texts: Texts, profile: LatencyProfile) -> Replayed:
        timed = Timed(texts, self.verifier, profile)
        return replay_mode(timed, self.module.predictions(texts, self.mode), self.mode, not self.module.is_regressor)


@dataclass
class Assisted(Method):
    """Transformers' own loop, `generate(assistant_model=draft)`."""

    name: str
    assistant: Assistant
    verifier: str = "transformers"
    action: Action | None = None

    def decode(self, pair: ModelPair, sampling: Sampling, task: Task) -> Decoding:
        new, passes, seconds = self.assistant.generate(pair, sampling, task.prompt, task.limit, task.seed)
        return Decoding(new, seconds, passes, new, seconds, 0.0)


def static_methods(texts: Texts, verifiers: Sequence[str], profile: LatencyProfile) -> list[Method]:
    """Every verifier's best static tree; the best of Traversal's that branch at the root or not at all, of those with
    branches, of all, and of all by kind."""
    tables = {name: StaticTable.of(Timed(texts, name, profile)) for name in verifiers}

    def best(index_X: torch.Tensor | slice = slice(None), allowed_A: torch.Tensor | None = None) -> Tree:
        fastest = {name: table.best(index_X, allowed_A) for name, table in tables.items()}
        name = max(fastest, key=lambda name: float(tables[name].speeds(index_X)[fastest[name]]))
        return name, SPACE.trees[fastest[name]]

    result: list[Method] = [StaticTrees(AUTOREGRESSIVE, verifiers[0], EMPTY)]
    overall = best()
    for name, table in tables.items():
        if name != overall[0]:  # that one is the best of all
            result.append(StaticTrees(f"{STATIC} {name}", name, SPACE.trees[table.best()]))
    if "traversal" in tables:
        allowed = torch.tensor([action.L1 == 0 or action.K == 1 for action in SPACE.trees])
        action = SPACE.trees[tables["traversal"].best(allowed_A=allowed)]
        result.append(StaticTrees(AT_ROOT, "traversal", action))
    result.append(StaticTrees(BRANCHING, *best(allowed_A=torch.tensor([action.K > 1 for action in SPACE.trees]))))
    result.append(StaticTrees(BEST_STATIC, *overall))
    kinds = {
        kind: best(torch.tensor([x for x, own in enumerate(texts.kind_X) if own == kind]))
        for kind in sorted(set(texts.kind_X))
    }
    return [*result, StaticTrees(BEST_BY_KIND, *overall, by_kind=kinds)]


def row_of(method: Method, decoding: Decoding) -> dict[str, Any]:
    """A method's part of a journal row."""
    return {
        "method": method.name,
        "verifier": method.verifier,
        "action": None if method.action is None else list(method.action),
        **vars(decoding),
    }
