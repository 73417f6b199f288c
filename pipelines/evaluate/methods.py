"""The methods that `evaluate` compares under one sampling setting: how each decodes, and how it is replayed.

Static trees are chosen on the training texts, with the latency profile that the methods are compared on.

Legend: X texts, A actions.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from itertools import compress

import torch

from data_gen.decoding import decoder_for, rehearse
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


@dataclass
class Decoding:
    """A method's continuation of one prompt. The lists by step are empty where the steps cannot be observed."""

    tokens: int  # new ones up to the limit, as replay counts them
    seconds: float  # of all steps; the passes over the prompt do not count
    steps: int
    block_tokens: int  # that the steps yield, including those beyond the limit
    select_seconds: float = 0.0  # of all decisions
    text: list[int] = field(default_factory=list)  # up to the limit
    drafted: list[Action] = field(default_factory=list)  # by step
    step_roots: list[int] = field(default_factory=list)  # where each step began, counted from the last prompt token


@dataclass(frozen=True)
class Method:
    """A way of decoding that replay can follow."""

    name: str
    verifier: str
    mode: Mode
    network: SelectorModule | None = None  # whose predictions replay uses
    chooser: Chooser | None = None  # decides in decoding where the mode alone cannot

    @property
    def drafts(self) -> str:
        """What is drafted, in words; empty where a network decides."""
        if self.mode.decider == decision.NETWORK:
            return ""
        rule, tree = self.mode.rule, str(self.mode.action)
        return f"copies of {rule.length} after a match of {rule.least}, else {tree}" if rule else tree

    @property
    def is_decoded(self) -> bool:
        """Whether it is decoded, too: not what only tells more of how the best tree and the selector were found."""
        return self.name == AT_ROOT or not self.name.startswith((BRANCHING, NETWORK, f"{STATIC}, "))

    @property
    def identity(self) -> Hashable:
        """Equal for methods that decode alike. Without drafted trees the verifier makes no difference."""
        if self.mode.decider == decision.NETWORK:
            return self.name
        return "" if self.mode.action == EMPTY else self.verifier, self.mode.action, self.mode.rule

    def decode(self, pair: ModelPair, sampling: Sampling, prompt: list[int], limit: int, seed: int) -> Decoding:
        """Continue a prompt's token ids by at most `limit` new ones."""
        chooser, length = self.chooser or Tuned(self.mode), len(prompt) + limit
        decoder = decoder_for(pair, sampling, get_verifier(self.verifier), chooser, length)
        generator = torch.Generator(device=pair.device).manual_seed(seed)
        decoded = decoder.decode(prompt, limit, generator)
        steps = decoded.steps
        return Decoding(
            tokens=len(decoded.tokens),
            seconds=sum(step.total for step in steps),
            steps=len(steps),
            block_tokens=sum(step.accepted + 1 for step in steps),
            select_seconds=sum(step.seconds["select"] for step in steps),
            text=decoded.tokens,
            drafted=[step.action for step in steps],
            step_roots=[step.length - len(prompt) for step in steps],
        )

    def rehearse(self, pair: ModelPair, sampling: Sampling, prompt: list[int], limit: int) -> None:
        """Let a GPU record the steps of every action that it may choose."""
        mode, network = self.mode, self.network
        chosen = compress(network.space, mode.mask(network.space)) if network else ()
        actions = dict.fromkeys([EMPTY, mode.action, *chosen, *([mode.rule.lookup] if mode.rule else [])])
        chooser = self.chooser or Tuned(mode)
        rehearse(pair, sampling, get_verifier(self.verifier), chooser, actions, prompt, len(prompt) + limit)

    def replay(self, texts: Texts, profile: LatencyProfile) -> Replayed:
        """Expected steps and time on labelled texts of one sampling setting, by a machine's latency profile."""
        timed, module = Timed(texts, self.verifier, profile), self.network
        if module is None:
            return replay_mode(timed, {}, self.mode)
        return replay_mode(timed, module.predictions(texts, self.mode), self.mode, not module.is_regressor)


def static_methods(texts: Texts, verifiers: Sequence[str], profile: LatencyProfile) -> list[Method]:
    """Plain decoding, and the fastest static trees on texts of one sampling setting: with each verifier, with Traversal
    on chains and trees without a trunk, on chains, on trees with branches, and over all of these."""
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
