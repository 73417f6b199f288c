"""Speculative decoding: choose an action, draft its tree, one target pass, verify, commit; again.

Both caches hold the context. The target's ends before the root token (the last committed one), which its next tree
pass covers; the draft's may also lack accepted tokens that it never passed, which its next root pass covers.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from data_gen.decoding.clock import Clock
from data_gen.drafting.lookup import LookupIndex
from data_gen.drafting.sampled import Draft, draft_lookup, draft_tree
from data_gen.features.root import Accepted, ModelRow, ModelRows, RootKnowledge
from data_gen.models.pair import CachedModel, ModelPair, Pass
from data_gen.models.sampling import Sampling
from data_gen.trees import DraftTree
from data_gen.verification import COPIED, Verifier
from data_gen.verification.base import IID
from data_gen.verification.distributions import sample
from selector.actions import EMPTY, Choice, Lookup
from selector.schema import FULL, LIGHT

Features = dict[str, Tensor]
PARTS = ("draft", "select", "target", "verify", "commit")


class Chooser(Protocol):
    """Picks the action of a step.

    `feature_levels` is what it is asked with, of `selector.schema.FEATURES` or the match alone, in turn until it
    answers: asked with early features it may give None, so that the draft passes the root and it is asked again. At
    the first root, where there are no features, and where `feature_levels` is empty, `select` gets None and answers.
    """

    @property
    def feature_levels(self) -> tuple[str, ...]: ...

    def select(self, features: Features | None) -> Choice | None: ...


@dataclass
class Fixed:
    """Always the same action."""

    action: Choice
    feature_levels: tuple[str, ...] = ()

    def select(self, features: Features | None) -> Choice:
        return self.action


@dataclass
class Random:
    """One of several actions, drawn at every step from a stream of its own."""

    actions: Sequence[Choice]
    generator: torch.Generator
    feature_levels: tuple[str, ...] = ()

    def select(self, features: Features | None) -> Choice:
        return self.actions[int(torch.randint(len(self.actions), (), generator=self.generator))]


@dataclass
class Step:
    """One decoding step.

    Attributes:
        length: committed tokens before the step, the root token included.
        accepted: tau, the number of drafted tokens the verifier accepted.
        seconds: by part of the step (`PARTS`), as Python meets them unless the decoder is `timed`.
    """

    length: int
    action: Choice
    accepted: int
    nodes: int
    seconds: dict[str, float]


@dataclass
class Decoded:
    """New tokens (without the prompt), and the steps that wrote them."""

    tokens: list[int] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)


class Decoder:
    """Decodes one prompt at a time with a pair, a verifier of drafted trees and a chooser of actions.

    Args:
        draft_sampling: of the draft; `sampling.draft` if None.
        style: how a tree's branches are drawn; the verifier must be for it.
        timed: wait for a GPU after each part of a step, so that `Step.seconds` are its own; that costs time itself.

    Raises:
        ValueError: the verifier is for another style.
    """

    def __init__(
        self,
        pair: ModelPair,
        sampling: Sampling,
        verifier: Verifier,
        chooser: Chooser,
        draft_sampling: Sampling | None = None,
        style: str = IID,
        timed: bool = False,
    ) -> None:
        if verifier.style != style:
            raise ValueError(f"{verifier.name} verifies drafts of style {verifier.style!r}, not {style!r}")
        self.pair, self.sampling, self.verifier, self.chooser = pair, sampling, verifier, chooser
        self.draft_sampling, self.style = draft_sampling or sampling.draft, style
        self.timed = timed

    @torch.inference_mode()
    def decode(self, prompt: Sequence[int], max_new_tokens: int, generator: torch.Generator) -> Decoded:
        """Continue a prompt until an end-of-sequence token or `max_new_tokens` new tokens, whichever comes first.

        Args:
            prompt: token ids, at least one.
            generator: lives on the pair's device.

        Raises:
            ValueError: an empty prompt.
            InputError: a model gives something else than finite numbers.
        """
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
        """One step after another, without end, each with the tokens that it commits. Close it: that looks at the
        numbers that the models have given, and raises as `decode` does."""
        context = _Context(self.pair, self.sampling, self.draft_sampling, list(prompt), self.chooser.feature_levels)
        try:
            while True:
                yield self._step(context, generator)
        finally:
            context.check()

    def _step(self, context: _Context, generator: torch.Generator) -> tuple[Step, list[int]]:
        clock = Clock(self.pair.device, PARTS, self.timed)
        length = len(context.tokens)

        def pass_root(level: str) -> None:
            if level in (LIGHT, FULL):
                context.draft_root(clock)
                clock.lap("draft")

        action = self._choose(context.knowledge, length, context.prompt_length, pass_root)
        clock.lap("select")
        draft = self._draft(context, action, generator, clock)
        tree = DraftTree.from_paths([], [[]]) if draft is None else draft.tree
        clock.lap("draft")
        target = context.target_pass(tree)
        clock.lap("target")
        if draft is None:
            node, extra = 0, int(sample(target.probs_NV[0], 1, generator))
        else:
            verifier = COPIED if isinstance(action, Lookup) else self.verifier
            node, extra = verifier.verify(tree, target.probs_NV, draft.probs_NV, generator)
        clock.lap("verify")
        path = tree.path_to(node)
        tokens = [tree.token(n) for n in path] + [extra]
        context.commit(path, tokens, target, draft)
        clock.lap("commit")
        return Step(length, action, len(path), len(tree), clock.seconds), tokens

    def _choose(
        self, knowledge: RootKnowledge | None, length: int, prompt_length: int, before: Callable[[str], None]
    ) -> Choice:
        """What the chooser says; `before` is called with what it is to see, before it is asked with that."""
        for level in self.chooser.feature_levels if length > prompt_length else ():
            before(level)
            assert knowledge is not None
            action = self.chooser.select(knowledge.features(level, length))
            if action is not None:
                return action
        action = self.chooser.select(None)
        assert action is not None
        return action

    def _draft(self, context: _Context, action: Choice, generator: torch.Generator, clock: Clock) -> Draft | None:
        """The tree of an action; None where nothing is drafted."""
        if isinstance(action, Lookup):
            proposal = context.proposal(action.length)
            return draft_lookup(proposal, self.pair.vocabulary, self.pair.device) if proposal else None
        if action == EMPTY:
            return None
        root_V = context.draft_root(clock)
        return draft_tree(context.draft, root_V, action, self.draft_sampling, generator, self.style, context.tokens)


class _Context:
    """Committed tokens and what both models know of them.

    Args:
        feature_levels: what the chooser asks for.
    """

    def __init__(
        self,
        pair: ModelPair,
        sampling: Sampling,
        draft_sampling: Sampling,
        prompt: list[int],
        feature_levels: tuple[str, ...],
    ) -> None:
        self.tokens, self.prompt_length = prompt, len(prompt)
        self.sampling, self.draft_sampling = sampling, draft_sampling
        self.device = pair.device
        self.target, self.draft = CachedModel(pair.target), CachedModel(pair.draft)
        self.knowledge = RootKnowledge(prompt, sampling, feature_levels) if feature_levels else None
        self._index = LookupIndex() if self.knowledge is None else self.knowledge.text.index
        self._root_probs_V: Tensor | None = None  # the draft's, once it has passed the root token
        if len(prompt) > 1:
            self.target.fill(prompt[:-1])

    def check(self) -> None:
        self.target.check()
        self.draft.check()

    def proposal(self, length: int) -> list[int]:
        """A lookup's tokens, `length` of them; none where the last token is new."""
        self._index.extend(self.tokens[len(self._index) :])
        return self._index.proposal(length)

    def draft_root(self, clock: Clock) -> Tensor:
        """The draft's distribution after the root token, [V]; passes what it has not seen yet. The prompt's pass is no
        part of a step, as that of the target."""
        pending = self.tokens[self.draft.committed :]
        if pending:
            before = max(0, self.prompt_length - 1 - self.draft.committed)  # prompt tokens, which nothing is known of
            if before:
                self.draft.fill(pending[:before])
                clock.skip()
            first = self.draft.committed
            output = self.draft.extend(pending[before:])
            rows = _rows(
                output,
                self.draft_sampling,
                lambda: [self.tokens[: n + 1] for n in range(first, len(self.tokens))],
            )
            self._root_probs_V = rows.probs_NV[-1]
            if self.knowledge is not None:
                self.knowledge.passed(ModelRow(*row) for row in zip(*rows, strict=True))
        assert self._root_probs_V is not None
        return self._root_probs_V

    def target_pass(self, tree: DraftTree) -> ModelRows:
        """The target after every node, in one pass."""
        tokens_N = tree.tokens_N.clone()
        tokens_N[0] = self.tokens[-1]
        output = self.target.forward(
            tokens_N.unsqueeze(0).to(self.device), tree.depths_N.to(self.device), tree.ancestors_NN()
        )
        return _rows(
            output,
            self.sampling,
            lambda: [self.tokens + [tree.token(n) for n in tree.path_to(node)] for node in range(len(tree))],
        )

    def commit(self, path: list[int], tokens: list[int], target: ModelRows, draft: Draft | None) -> None:
        """Keep the accepted path in both caches and append its tokens and the extra one."""
        self.target.keep([0, *path])
        if self.knowledge is not None:
            self.knowledge.committed(Accepted(target, [0, *path]), tokens)
        if draft is not None:
            passed = [node for node in path if node in draft.row_of]
            self.draft.keep([draft.row_of[node] for node in passed])
            if self.knowledge is not None:
                self.knowledge.passed(draft.rows(passed))
        self.tokens += tokens


def _rows(output: Pass, sampling: Sampling, texts: Callable[[], list[list[int]]]) -> ModelRows:
    """What a pass gave; `texts` as in `Sampling.after`."""
    logits_WV = output.logits_BWV[0]
    return ModelRows(sampling.after(texts, logits_WV), logits_WV, output.hidden_BWD[0])
