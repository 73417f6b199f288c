"""The methods that `evaluate` compares under one sampling setting: how each decodes, and how it is replayed.

Static trees are chosen on the training texts, with the latency profile that the methods are compared on.

Legend: X texts, A actions.
"""

from __future__ import annotations

import time
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

import torch

from data_gen.decoding import decoder_for
from data_gen.decoding.loop import Chooser
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.verification import get_verifier
from selector import decision
from selector.actions import EMPTY, IID, Action
from selector.decision import Mode
from selector.latency import LatencyProfile
from selector.runtime.selector import Tuned
from selector.train.data import Texts, Timed
from selector.train.module import SelectorModule
from selector.train.replay import Replayed
from selector.train.tuning import StaticTable, replay_mode

PLAIN, SELECTOR, STATIC = "plain decoding", "selector", "static tree"
AT_ROOT = f"{STATIC}, traversal at the root"
CHAIN, BRANCHING = "static chain", f"{STATIC} with branches"
BEST_STATIC, COPYING, NETWORK = f"best {STATIC}", "lookup rule", "network"


@dataclass(frozen=True)
class Task:
    """A prompt's token ids, the largest number of new tokens, and the seed."""

    prompt: list[int]
    limit: int
    seed: int


@dataclass
class Decoding:
    """A method's continuation of one prompt. The lists by step are empty where the steps cannot be observed.

    Attributes:
        tokens: the number of new tokens up to the limit, as replay counts them.
        block_tokens: the number of tokens that the steps yield, including those beyond the limit.
        text: the new tokens, up to the limit.
        drafted: the action of each step.
        step_roots: where each step began, counted from the last prompt token.
    """

    tokens: int
    seconds: float
    steps: int
    block_tokens: int
    select_seconds: float = 0.0
    text: list[int] = field(default_factory=list)
    drafted: list[Action] = field(default_factory=list)
    step_roots: list[int] = field(default_factory=list)
    seconds_of_steps: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Method:
    """A way of decoding that replay can follow.

    Attributes:
        mode: the static tree, the lookup rule, or how the network decides.
        network: the trained module, whose predictions replay uses.
        chooser: makes the decisions in decoding where the mode alone cannot.
    """

    name: str
    verifier: str
    mode: Mode
    network: SelectorModule | None = None
    chooser: Chooser | None = None

    @property
    def action(self) -> Action | None:
        """The tree that is drafted at every step, or None."""
        return self.mode.action if self.mode.decider == decision.STATIC else None

    @property
    def drafts(self) -> str:
        """What every step drafts, in words; empty where that differs between steps."""
        return "" if self.action is None else str(self.action)

    @property
    def is_decoded(self) -> bool:
        """Whether it is decoded, too: not the trees that only tell more of how the best one was found."""
        return self.name == AT_ROOT or not self.name.startswith((BRANCHING, f"{STATIC}, "))

    @property
    def identity(self) -> Hashable:
        """Equal for methods that decode alike. Without drafted trees the verifier makes no difference."""
        if self.mode.decider == decision.NETWORK:
            return self.name
        return "" if self.mode.action == EMPTY else self.verifier, self.mode.action, self.mode.rule

    def decode(self, pair: ModelPair, sampling: Sampling, task: Task) -> Decoding:
        """Continue one prompt."""
        chooser, length = self.chooser or Tuned(self.mode), len(task.prompt) + task.limit
        decoder = decoder_for(pair, sampling, get_verifier(self.verifier), chooser, length)
        generator = torch.Generator(device=pair.device).manual_seed(task.seed)
        start = time.perf_counter()
        decoded = decoder.decode(task.prompt, task.limit, generator)
        seconds = time.perf_counter() - start
        steps = decoded.steps
        return Decoding(
            tokens=len(decoded.tokens),
            seconds=seconds,
            steps=len(steps),
            block_tokens=sum(step.accepted + 1 for step in steps),
            select_seconds=sum(step.seconds["select"] for step in steps),
            text=decoded.tokens,
            drafted=[step.action for step in steps],
            step_roots=[step.length - len(task.prompt) for step in steps],
            seconds_of_steps=[step.total for step in steps],
        )

    def replay(self, texts: Texts, profile: LatencyProfile) -> Replayed:
        """Expected steps and time on labelled texts of one sampling setting, by a machine's latency profile."""
        timed, module = Timed(texts, self.verifier, profile), self.network
        if module is None:
            return replay_mode(timed, {}, self.mode)
        return replay_mode(timed, module.predictions(texts, self.mode), self.mode, not module.is_regressor)


def static_methods(texts: Texts, verifiers: Sequence[str], profile: LatencyProfile) -> list[Method]:
    """Plain decoding, and the fastest static trees: with each verifier, with Traversal on chains and trees without a
    trunk, on chains, on trees with branches, and over all of these.

    Args:
        texts: training texts of one sampling setting.
    """
    timed = {name: Timed(texts, name, profile) for name in verifiers}
    tables, trees_A = {name: StaticTable.of(own) for name, own in timed.items()}, timed[verifiers[0]].space.trees

    def best(allowed_A: torch.Tensor | None = None) -> tuple[str, Action]:
        fastest = {name: table.best(allowed_A=allowed_A) for name, table in tables.items()}
        name = max(fastest, key=lambda name: float(tables[name].speeds()[fastest[name]]))
        return name, trees_A[fastest[name]]

    overall = best()
    trees: dict[str, tuple[str, Action]] = {PLAIN: (verifiers[0], EMPTY)}
    for name, table in tables.items():
        if name != overall[0]:  # the tree of that verifier is the best static one
            trees[f"{STATIC}, {name}"] = name, trees_A[table.best()]
    if "traversal" in tables:
        allowed_A = torch.tensor([action.style == IID and (action.L1 == 0 or action.K == 1) for action in trees_A])
        trees[AT_ROOT] = "traversal", trees_A[tables["traversal"].best(allowed_A=allowed_A)]
    trees[CHAIN] = best(torch.tensor([action.K == 1 and action != EMPTY for action in trees_A]))
    if trees_A[-1].K > 1:  # the trees ascend
        trees[BRANCHING] = best(torch.tensor([action.K > 1 for action in trees_A]))
    trees[BEST_STATIC] = overall
    sampling = timed[verifiers[0]].sampling
    return [Method(name, verifier, Mode(sampling, action)) for name, (verifier, action) in trees.items()]


def row_of(method: Any, decodings: Sequence[Decoding]) -> dict[str, Any]:
    """A method's part of a journal row: the decoding of the first round, with the mean times of the rounds whose steps
    are the same; and as `rounds` the tokens and the seconds of each."""
    first = decodings[0]
    alike = [each for each in decodings if (each.text, each.step_roots) == (first.text, first.step_roots)]
    action = method.action and list(method.action)
    return {
        **{"method": method.name, "verifier": method.verifier, "action": action, "drafts": method.drafts},
        **vars(first),
        "select_seconds": fmean(each.select_seconds for each in alike),
        "seconds_of_steps": list(map(fmean, zip(*(each.seconds_of_steps for each in alike), strict=True))),
        "rounds": [[each.tokens, each.seconds] for each in decodings],
    }
