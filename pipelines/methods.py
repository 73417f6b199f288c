"""The methods that `evaluate` compares: what each one decodes with, tuned on training data alone.

A *clock* says what a method's time is: `wall`, this machine's; or the name of a latency profile of another machine, by
which every step that was really decoded is charged. What is tuned is tuned for its clock.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from data_gen.choosers import EntropyStop, RootChooser, SelectorChooser, StoppingHead, chooser_of
from data_gen.decoding import Chooser, Decoded, Decoder, Fixed
from data_gen.models import ModelPair
from data_gen.sampling import Sampling
from data_gen.verification import get_verifier
from pipelines.assisted import Assistant
from pipelines.tuning import STATIC, Tuning
from selector.actions import EMPTY, Action
from selector.runtime import LatencyProfile, Selector, Tuned
from selector.stopping import StoppingModule, TokenAcceptance

WALL, SYNTHETIC = "wall", "gpu_like"  # further clocks are named after the profile: gpu_like_1/20
AUTOREGRESSIVE, SELECTOR = "autoregressive", "selector"
AT_ROOT = f"{STATIC} traversal at the root"
BEST_STATIC, BEST_BY_KIND = f"best {STATIC}", f"best {STATIC} by kind"
ENTROPY_STOP, STOPPING_HEAD = "entropy stop", "stopping head (SpecDec++)"
ASSISTED, ASSISTED_CONSTANT = "assisted generation", "assisted generation, constant"


@dataclass(frozen=True)
class Task:
    """A prompt's token ids and kind, new tokens at most, and the seed.

    `decoded`: with one verifier and one tree throughout, by these. Other machines' times need no decoding of their own.
    """

    prompt: list[int]
    kind: str
    limit: int
    seed: int
    decoded: dict[tuple[str, Action], Decoded] = field(default_factory=dict)


@dataclass
class Decoding:
    """What a method made of one prompt.

    `tokens` are all that its steps yield: what the last one yields beyond the limit was paid for, and would be kept
    in a longer text. `seconds` are those of its clock.
    """

    tokens: int
    seconds: float
    steps: int
    block_tokens: int
    step_seconds: float
    select_seconds: float
    actions: dict[str, int] = field(default_factory=dict)


class Method(ABC):
    """A way of decoding under one sampling setting, on one clock."""

    name: str
    clock: str
    verifier: str
    action: Action | None  # where there is one for all steps

    @abstractmethod
    def decode(self, pair: ModelPair, sampling: Sampling, task: Task) -> Decoding:
        """Continue one prompt."""


@dataclass
class Speculative(Method):
    """Our own loop; `by_kind` overrides verifier and chooser for some kinds of prompts."""

    name: str
    verifier: str
    chooser: Chooser
    clock: str = WALL
    profile: LatencyProfile | None = None  # None: the clock on the wall
    action: Action | None = None
    by_kind: dict[str, tuple[str, Chooser]] = field(default_factory=dict)
    of_action: dict[Action, str] = field(default_factory=dict)  # verifiers, where trees have their own
    shown: str | None = None  # in place of the verifier, where there are several

    def decode(self, pair: ModelPair, sampling: Sampling, task: Task) -> Decoding:
        verifier, chooser = self.by_kind.get(task.kind, (self.verifier, self.chooser))
        key = self._always(verifier, chooser)
        if self.profile is not None and key in task.decoded:
            decoded, seconds = task.decoded[key], 0.0
        else:
            named = {name: get_verifier(name) for name in {verifier, *self.of_action.values()}}
            own = {action: named[name] for action, name in self.of_action.items()}
            decoder = Decoder(pair, sampling, own or named[verifier], chooser)
            generator = torch.Generator(device=pair.device).manual_seed(task.seed)
            start = time.perf_counter()
            decoded = decoder.decode(task.prompt, task.limit, generator)
            seconds = time.perf_counter() - start
        if key is not None:
            task.decoded[key] = decoded
        step_seconds = sum(sum(step.seconds.values()) for step in decoded.steps)
        select_seconds = sum(step.seconds["select"] for step in decoded.steps)
        if self.profile is not None:
            revising = chooser.tuned.first if isinstance(chooser, SelectorChooser) else None
            decided = chooser.latency is not None, revising
            times = [
                [
                    self.profile.action_seconds(
                        *(step.action, step.length, self.of_action.get(step.action, verifier), *decides),
                        filtered=sampling.top_p < 1,
                    )
                    for step in decoded.steps
                ]
                for decides in (decided, (False, None))
            ]
            seconds = step_seconds = sum(times[0])
            select_seconds = seconds - sum(times[1])
        actions: dict[str, int] = {}
        for step in decoded.steps:
            actions[str(step.action)] = actions.get(str(step.action), 0) + 1
        block_tokens = sum(step.accepted + 1 for step in decoded.steps)
        ended = decoded.tokens[-1] in pair.eos_ids
        tokens = len(decoded.tokens) if ended else block_tokens
        return Decoding(tokens, seconds, len(decoded.steps), block_tokens, step_seconds, select_seconds, actions)

    def _always(self, verifier: str, chooser: Chooser) -> tuple[str, Action] | None:
        """The verifier and the tree of every step, where nothing is decided."""
        if isinstance(chooser, Fixed):
            return verifier, chooser.action
        if isinstance(chooser, RootChooser) and not chooser.tuned.decides:
            action = chooser.select(None)
            return self.of_action[action], action
        return None


@dataclass
class Assisted(Method):
    """Transformers' own loop, `generate(assistant_model=draft)`."""

    name: str
    assistant: Assistant
    verifier: str = "transformers"
    clock: str = WALL
    action: Action | None = None

    def decode(self, pair: ModelPair, sampling: Sampling, task: Task) -> Decoding:
        new, passes, seconds = self.assistant.generate(pair, sampling, task.prompt, task.limit, task.seed)
        return Decoding(new, seconds, passes, new, seconds, 0.0)


def wall_methods(
    tuning: Tuning,
    selector: Selector,
    others: Mapping[str, Selector],
    head: StoppingModule,
    sampling: Sampling,
    verifiers: Sequence[str],
    constant: Assistant | None,
) -> list[Method]:
    """Everything that is compared on this machine's clock, under one sampling setting."""
    best = tuning.best(verifiers)
    result: list[Method] = [Speculative(AUTOREGRESSIVE, verifiers[0], Fixed(EMPTY), action=EMPTY)]
    for verifier in verifiers:
        action = tuning.static(verifier).action
        result.append(Speculative(f"{STATIC} {verifier}", verifier, Fixed(action), action=action))
    result += _common(tuning, verifiers, WALL, None)
    entropy, longest = tuning.entropy_stop()
    result.append(Speculative(ENTROPY_STOP, "block", EntropyStop(entropy, longest)))
    rejected, longest = tuning.stopping_head(head)
    stopping = StoppingHead(TokenAcceptance(head.network), rejected, longest, sampling)
    result.append(Speculative(STOPPING_HEAD, "block", stopping))
    if constant is not None:
        result += [Assisted(ASSISTED, Assistant()), Assisted(ASSISTED_CONSTANT, constant)]
    result += _selectors(selector, others, sampling, WALL, None)
    return [method for method in result if method.name != f"{STATIC} {best.verifier}"]  # it is `best static`


def profile_methods(
    name: str,
    profile: LatencyProfile,
    tuning: Tuning,
    selector: Selector,
    others: Mapping[str, Selector],
    sampling: Sampling,
    verifiers: Sequence[str],
) -> list[Method]:
    """What is compared on another machine's clock: the static trees that count, and the selectors, tuned for it."""
    result = _common(tuning, verifiers, name, profile)
    for verifier in others:
        action = tuning.static(verifier).action
        result.append(Speculative(f"{STATIC} {verifier}", verifier, Fixed(action), name, profile, action))
    return result + _selectors(selector, others, sampling, name, profile)


def _common(tuning: Tuning, verifiers: Sequence[str], clock: str, profile: LatencyProfile | None) -> list[Method]:
    """Traversal's best tree that branches at the root, and the best static tree of the best verifier, twice."""
    best = tuning.best(verifiers)
    result: list[Method] = []
    if "traversal" in verifiers:
        action = tuning.static("traversal", at_root=True).action
        result.append(Speculative(AT_ROOT, "traversal", Fixed(action), clock, profile, action))
    result.append(Speculative(BEST_STATIC, best.verifier, Fixed(best.action), clock, profile, best.action))
    by_kind = {kind: tuning.best(verifiers, kind) for kind in tuning.kinds}
    choosers: dict[str, tuple[str, Chooser]] = {kind: (b.verifier, Fixed(b.action)) for kind, b in by_kind.items()}
    result.append(
        Speculative(BEST_BY_KIND, best.verifier, Fixed(best.action), clock, profile, by_kind=choosers, shown="by kind")
    )
    return result


def _selectors(
    selector: Selector, others: Mapping[str, Selector], sampling: Sampling, clock: str, profile: LatencyProfile | None
) -> list[Method]:
    named = {SELECTOR: selector, **{selector_of(name): each for name, each in others.items()}}
    return [
        speculative(name, each, each.at(sampling.temperature, sampling.top_p), sampling, clock, profile)
        for name, each in named.items()
    ]


def speculative(
    name: str, selector: Selector, tuned: Tuned, sampling: Sampling, clock: str, profile: LatencyProfile | None
) -> Speculative:
    """Decoding as a selector decides, on the clock on the wall if `profile` is None."""
    own = dict(zip(selector.actions, tuned.verifiers, strict=True))
    chooser = chooser_of(tuned, sampling)
    return Speculative(name, tuned.verifiers[0], chooser, clock, profile, of_action=own, shown=selector.verifier)


def selector_of(verifier: str) -> str:
    """The method that is a verifier's own selector, of `train.others`."""
    return f"{SELECTOR} of {verifier}"


def row_of(method: Method, decoding: Decoding) -> dict[str, Any]:
    """A method's part of a journal row."""
    return {
        "clock": method.clock,
        "method": method.name,
        "verifier": getattr(method, "shown", None) or method.verifier,
        "action": None if method.action is None else list(method.action),
        **vars(decoding),
    }
