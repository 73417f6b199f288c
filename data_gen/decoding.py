"""Speculative decoding: choose an action, draft its tree, one target pass, verify, commit; again.

Both caches hold the context. The target's ends before the root token (the last committed one), which its next tree
pass covers; the draft's may also lack accepted tokens that it never passed, which its next root pass covers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from data_gen.clock import Clock
from data_gen.drafting import Draft, Drawn, draft_tree
from data_gen.features import Row, root_features
from data_gen.models import CachedModel, ModelPair, Pass
from data_gen.sampling import Sampling
from data_gen.trees import DraftTree
from data_gen.verification import Verifier, exchangeable
from data_gen.verification.base import IID
from data_gen.verification.profile import sample
from selector.actions import EMPTY, Action, ActionSpace
from selector.runtime import LatencyProfile

Features = dict[str, Tensor]
PARTS = ("draft", "select", "target", "verify", "commit")


class Chooser(Protocol):
    """Picks the action of a step.

    `latency` is the profile that its features are computed with, None if it needs none. `select` gets None where there
    are no features: the root token has no predecessor.
    """

    @property
    def latency(self) -> LatencyProfile | None: ...

    def select(self, features: Features | None) -> Action: ...


@runtime_checkable
class Revising(Protocol):
    """A chooser that decides again by the draft's own state: at the root, and whenever a trunk token has been drawn."""

    def revise(self, drawn: Drawn, length: int) -> Action:
        """The action from here on. Its trunk holds at least what is drafted.

        Args:
            drawn: the newest token, with the draft's state where it was drawn; or the root.
            length: committed tokens, the root token included.
        """


@dataclass
class Fixed:
    """Always the same action."""

    action: Action
    latency: LatencyProfile | None = None

    def select(self, features: Features | None) -> Action:
        return self.action


@dataclass
class Random:
    """One of several actions, drawn at every step from a stream of its own."""

    actions: Sequence[Action]
    generator: torch.Generator
    latency: LatencyProfile | None = None

    def select(self, features: Features | None) -> Action:
        return self.actions[int(torch.randint(len(self.actions), (), generator=self.generator))]


@dataclass
class Step:
    """One decoding step.

    Attributes:
        length: committed tokens before the step, the root token included.
        action: what was drafted, after all decisions.
        accepted: tau, the number of drafted tokens the verifier accepted.
        seconds: by part of the step (`PARTS`).
        stops_N, depths_N: the law of the accepted node given the tree; only when asked for.
    """

    length: int
    action: Action
    accepted: int
    nodes: int
    seconds: dict[str, float]
    stops_N: Tensor | None = None
    depths_N: Tensor | None = None


@dataclass
class Decoded:
    """New tokens (without the prompt), and the steps that wrote them."""

    tokens: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


class Decoder:
    """Decodes one prompt at a time with a pair, a verifier and a chooser of actions.

    Args:
        draft_sampling: of the draft; `sampling.draft` if None.
        verifier: one, or one for each action that the chooser may take. If these differ, and the chooser revises, they
            must be lossless in exchange (`exchangeable`).
        style: how a tree's branches are drawn; the verifiers must be for it.

    Raises:
        ValueError: a verifier is for another style, or those of a revising chooser are not lossless in exchange.
    """

    def __init__(
        self,
        pair: ModelPair,
        sampling: Sampling,
        verifier: Verifier | Mapping[Action, Verifier],
        chooser: Chooser,
        draft_sampling: Sampling | None = None,
        style: str = IID,
    ) -> None:
        self._verifier = verifier
        distinct = (
            {v.name: v for v in verifier.values()} if isinstance(verifier, Mapping) else {verifier.name: verifier}
        )
        for each in distinct.values():
            if each.style != style:
                raise ValueError(f"{each.name} verifies drafts of style {each.style!r}, not {style!r}")
        self.pair, self.sampling, self.chooser = pair, sampling, chooser
        self.draft_sampling, self.style = draft_sampling or sampling.draft, style
        self._revises = isinstance(chooser, Revising)
        if self._revises and not all(exchangeable(*two) for two in pairwise(distinct.values())):
            raise ValueError(
                f"{', '.join(sorted(distinct))}: not lossless in exchange, where the choice depends on drafted tokens"
            )

    @torch.inference_mode()
    def decode(
        self, prompt: Sequence[int], max_new_tokens: int, generator: torch.Generator, audit: bool = False
    ) -> Decoded:
        """Continue a prompt until an end-of-sequence token or `max_new_tokens` new tokens, whichever comes first.

        Args:
            prompt: token ids, at least one.
            generator: lives on the pair's device.
            audit: keep the law of every step's accepted node; its time is not counted.

        Raises:
            ValueError: an empty prompt.
            InputError: a model gives something else than finite numbers.
        """
        if not prompt:
            raise ValueError("the prompt holds no tokens")
        context = _Context(self.pair, self.sampling, self.draft_sampling, list(prompt))
        result = Decoded()
        while len(result.tokens) < max_new_tokens:
            step, tokens = self._step(context, generator, audit)
            result.steps.append(step)
            for token in tokens[: max_new_tokens - len(result.tokens)]:
                result.tokens.append(token)
                if token in self.pair.eos_ids:
                    context.check()
                    return result
        context.check()
        return result

    def _step(self, context: _Context, generator: torch.Generator, audit: bool) -> tuple[Step, list[int]]:
        clock = Clock(self.pair.device, PARTS)
        length = len(context.tokens)
        features = None
        if self.chooser.latency is not None and context.target_prev is not None:
            draft_prev, draft_root = context.draft_root()
            clock.lap("draft")
            features = root_features(
                context.target_prev, draft_prev, draft_root, length, self.sampling, self.chooser.latency
            )
        action = self.chooser.select(features)
        clock.lap("select")
        if action == EMPTY:
            draft = None
            tree = DraftTree.from_paths([], [[]])
        else:
            _, root = context.draft_root()
            revise = partial(self._revise, root, length, clock) if self._revises else None
            draft = draft_tree(context.draft, root.probs_V, action, self.draft_sampling, generator, self.style, revise)
            action, tree = (action if revise is None else ActionSpace.default().canonical(draft.action)), draft.tree
        clock.lap("draft")
        p_NV, hidden_ND = context.target_pass(tree)
        clock.lap("target")
        stops_N = None
        if draft is None:
            node, extra = 0, int(sample(p_NV[0], 1, generator))
        else:
            node, extra = self._verifier_of(action).verify(tree, p_NV, draft.probs_NV, generator)
        clock.lap("verify")
        if audit:
            stops_N = (
                torch.ones(1, dtype=torch.float64)
                if draft is None
                else self._verifier_of(action).stops(tree, p_NV, draft.probs_NV)
            )
            clock.skip()
        path = tree.path_to(node)
        tokens = [tree.token(n) for n in path] + [extra]
        context.commit(path, tokens, Row(p_NV[node], hidden_ND[node]), draft)
        clock.lap("commit")
        return Step(length, action, len(path), len(tree), clock.seconds, stops_N, tree.depths_N), tokens

    def _verifier_of(self, action: Action) -> Verifier:
        return self._verifier[action] if isinstance(self._verifier, Mapping) else self._verifier

    def _revise(self, root: Row, length: int, clock: Clock, drawn: Drawn) -> Action:
        clock.lap("draft")
        if drawn.hidden_D is None:
            drawn = drawn._replace(hidden_D=root.hidden_D)
        action = self.chooser.revise(drawn, length)  # type: ignore[attr-defined]
        clock.lap("select")
        return action


class _Context:
    """Committed tokens and what both models know of them."""

    def __init__(self, pair: ModelPair, sampling: Sampling, draft_sampling: Sampling, prompt: list[int]) -> None:
        self.tokens = prompt
        self.sampling, self.draft_sampling = sampling, draft_sampling
        self.device = pair.device
        self.target, self.draft = CachedModel(pair.target), CachedModel(pair.draft)
        self.target_prev: Row | None = None  # at the token before the root token
        self._draft_rows: list[Row] = []  # at the last two committed tokens, as far as the draft has passed them
        if len(prompt) > 1:
            self.target_prev = _row(self.target.extend(prompt[:-1]), -1, sampling)

    def check(self) -> None:
        self.target.check()
        self.draft.check()

    def draft_root(self) -> tuple[Row, Row]:
        """The draft at the previous token and at the root token; passes what it has not seen yet."""
        pending = self.tokens[self.draft.committed :]
        if pending:
            output = self.draft.extend(pending)
            new = [_row(output, index, self.draft_sampling) for index in range(-min(2, len(pending)), 0)]
            self._draft_rows = [*self._draft_rows, *new][-2:]
        return self._draft_rows[0], self._draft_rows[-1]

    def target_pass(self, tree: DraftTree) -> tuple[Tensor, Tensor]:
        """The target's distribution ([N, V]) and hidden state ([N, D]) after every node, in one pass."""
        tokens_N = tree.tokens_N.clone()
        tokens_N[0] = self.tokens[-1]
        output = self.target.forward(
            tokens_N.unsqueeze(0).to(self.device), tree.depths_N.to(self.device), tree.ancestors_NN()
        )
        return self.sampling.probabilities(output.logits_BWV[0]), output.hidden_BWD[0]

    def commit(self, path: list[int], tokens: list[int], last: Row, draft: Draft | None) -> None:
        """Keep the accepted path in both caches and append its tokens and the extra one."""
        self.target.keep([0, *path])
        self.target_prev = last
        if draft is not None:
            passed = [node for node in path if node in draft.row_of]
            self.draft.keep([draft.row_of[node] for node in passed])
            if len(passed) == len(path) and path:
                self._draft_rows = [Row(draft.probs_NV[path[-1]], draft.hidden_ND[path[-1]])]
            else:  # nothing was accepted: the root is the previous token; or the leaf is still to be passed
                self._draft_rows = self._draft_rows[-1:] if not path else []
        else:
            self._draft_rows = self._draft_rows[-1:] if self.draft.committed == len(self.tokens) else []
        self.tokens += tokens


def _row(output: Pass, index: int, sampling: Sampling) -> Row:
    return Row(sampling.probabilities(output.logits_BWV[0, index]), output.hidden_BWD[0, index])
