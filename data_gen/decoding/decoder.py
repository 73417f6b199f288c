"""The decoder: delayed trees of any style and all verifiers, on caches that grow with the text.

Each step chooses an action, drafts its tree, runs the target over it, verifies and commits. The
target's KV cache ends before the root (the last committed token), which its next forward pass
covers. The draft's cache may lag further behind; its forward pass over the root also covers what it
lacks.

Legend: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, field

import torch
from torch import Tensor

from data_gen.decoding.loop import Chooser, Decoded, Step, Stopwatch
from data_gen.drafting.lookup import LookupIndex
from data_gen.drafting.sampled import Draft, draft_tree
from data_gen.features.root import BLOCK, RootKnowledge
from data_gen.models.pair import CachedModel, ModelPair
from data_gen.models.rows import ModelRows
from data_gen.models.sampling import Sampling
from data_gen.verification import CERTAIN, Verdict, Verifier, at_every_level, styled
from data_gen.verification.distributions import sample
from selector.actions import Action
from selector.schema import FULL, LIGHT, MATCH


class Text:
    """A text that is being decoded: its committed tokens, the models' caches, and `knowledge` of
    features if the chooser needs them. The target's cache begins with the prompt without its last
    token."""

    # the draft's distribution, after its first forward pass over a root
    root_probs_V: Tensor | None = None
    root_logits_V: Tensor | None = None

    def __init__(
        self,
        pair: ModelPair,
        prompt: Sequence[int],
        sampling: Sampling,
        levels: tuple[str, ...],
        generator: torch.Generator,
    ) -> None:
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self.generator = generator
        self.knowledge: RootKnowledge | None = None
        if levels:
            self.knowledge = RootKnowledge(prompt, sampling, levels)
            self._index = self.knowledge.text.index
        else:
            self._index = LookupIndex()
        self.target = CachedModel(pair.target)
        self.draft = CachedModel(pair.draft)
        self.target.fill(prompt[:-1])

    def proposal(self, length: int) -> list[int]:
        """The tokens of a lookup; none where the last token is new."""
        self._index.extend(self.tokens[len(self._index) :])
        return self._index.proposal(length)


@dataclass(eq=False)
class Decoder:
    """Decodes one prompt at a time. Trees are sampled with `sampling.draft`, their branches in the
    verifier's style.

    Attributes:
        chooser: chooses the action of each step: a `FixedTree`, or a selector under a sampling
            setting (`Selector.at`).
        timed: wait for a GPU after each part of a step, so that `Step.seconds` is exact.
    """

    pair: ModelPair
    sampling: Sampling
    verifier: Verifier
    chooser: Chooser
    timed: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        self.draft_sampling = self.sampling.draft
        self._longest = getattr(self.chooser, "longest", 0) or math.inf

    @torch.inference_mode()
    def decode(
        self, prompt: Sequence[int], max_new_tokens: int, generator: torch.Generator
    ) -> Decoded:
        """Continue a prompt of token ids up to an end-of-sequence token, with at most
        `max_new_tokens` new tokens. The text follows the target's law under the sampling setting.
        The generator lives on the pair's device. ValueError for an empty prompt; InputError where a
        logit is not finite."""
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
    def steps(
        self, prompt: Sequence[int], generator: torch.Generator
    ) -> Generator[tuple[Step, list[int]]]:
        """Endless steps and their tokens. The caller must close the generator, which may raise
        `decode`'s error."""
        text = Text(self.pair, prompt, self.sampling, self.chooser.feature_levels, generator)
        try:
            while True:
                yield self._step(text)
        finally:
            text.target.check()
            text.draft.check()

    def _step(self, text: Text) -> tuple[Step, list[int]]:
        stopwatch = Stopwatch(self.pair.device, self.timed)
        length = len(text.tokens)
        action = self._choose(text, stopwatch)
        stopwatch.lap("select")
        drafted = self._draft(text, action, stopwatch)
        stopwatch.lap("draft")
        rows = self._target(text, drafted)
        stopwatch.lap("target")
        verdict = self._verify(text, action, drafted, rows)
        stopwatch.lap("verify")
        tokens = self._commit(text, drafted, rows, verdict)
        stopwatch.lap("commit")
        step = Step(length, action, len(tokens) - 1, len(drafted.tree), stopwatch.seconds)
        return step, tokens

    def _choose(self, text: Text, stopwatch: Stopwatch) -> Action:
        knowledge = text.knowledge
        levels = self.chooser.feature_levels
        if knowledge is not None and len(text.tokens) > text.prompt_length:
            if len(text.tokens) > self._longest:
                levels = (MATCH,)
                knowledge.keep_match_alone()
            for level in levels:
                if level in (LIGHT, FULL):
                    self._forward_root(text, stopwatch)
                    stopwatch.lap("draft")
                action = self.chooser.select(knowledge.features(level))
                if action is not None:
                    return action
        action = self.chooser.select(None)
        assert action is not None
        return action

    def _forward_root(self, text: Text, stopwatch: Stopwatch) -> None:
        """The draft's forward pass up to the root, which a decision may need."""
        draft = text.draft
        prompt = text.tokens[draft.committed : text.prompt_length - 1]
        if prompt:
            draft.fill(prompt)
            stopwatch.skip()  # the prompt does not count as time of the step
        if text.knowledge is None or not text.knowledge.needs_draft:
            draft.fill(text.tokens[draft.committed : -BLOCK])
        # after many copies, the draft may lack more than memory holds
        while draft.committed < len(text.tokens):
            end = min(draft.committed + BLOCK, len(text.tokens))
            rows = self._extended(text, end)
            text.root_probs_V = rows.probs_NV[-1]
            text.root_logits_V = rows.logits_NV[-1]
            if text.knowledge is not None:
                text.knowledge.passed(rows.each())

    def _extended(self, text: Text, end: int) -> ModelRows:
        """The draft's outputs in one forward pass over the tokens that it lacks before `end`."""
        first = text.draft.committed
        draft_pass = text.draft.extend(text.tokens[first:end])
        return draft_pass.rows(
            self.draft_sampling, lambda: [text.tokens[: n + 1] for n in range(first, end)]
        )

    def _draft(self, text: Text, action: Action, stopwatch: Stopwatch) -> Draft:
        if action.drafts:
            self._forward_root(text, stopwatch)
        return draft_tree(
            text.draft,
            text.root_probs_V,
            action,
            self.draft_sampling,
            text.generator,
            verifier_of(self.verifier, action).style,
            text.tokens,
            text.root_logits_V,
            text.proposal(action.copied) if action.copied else (),
        )

    def _target(self, text: Text, drafted: Draft) -> ModelRows:
        tree = drafted.tree
        tokens_N = tree.tokens_N.clone()
        tokens_N[0] = text.tokens[-1]
        target_pass = text.target.forward(tokens_N, tree.depths_N, tree.ancestors_NN())

        def texts() -> list[list[int]]:
            texts_to_nodes = []
            for node in range(len(tree)):
                drafted_tokens = [tree.token(passed_node) for passed_node in tree.path_to(node)]
                texts_to_nodes.append(text.tokens + drafted_tokens)
            return texts_to_nodes

        return target_pass.rows(self.sampling, texts)

    def _verify(self, text: Text, action: Action, drafted: Draft, rows: ModelRows) -> Verdict:
        if len(drafted.tree) == 1:
            return Verdict(0, int(sample(rows.probs_NV[0], 1, text.generator)))
        return verifier_of(self.verifier, action).verify(
            drafted.tree, rows.probs_NV, drafted.probs_NV, text.generator
        )

    def _commit(self, text: Text, drafted: Draft, rows: ModelRows, verdict: Verdict) -> list[int]:
        """Keep the accepted path in both caches; the step's tokens."""
        path = drafted.tree.path_to(verdict.node)
        passed = [node for node in path if node in drafted.row_of]
        text.target.keep([0, *path])
        text.draft.keep([drafted.row_of[node] for node in passed])
        tokens = [drafted.tree.token(node) for node in path] + [verdict.token]
        if text.knowledge is not None:
            text.knowledge.passed(drafted.rows(passed))
            text.knowledge.committed(rows, [0, *path], tokens)
        text.tokens += tokens
        return tokens


def verifier_of(verifier: Verifier, action: Action) -> Verifier:
    """The verifier of an action's trees, where `verifier` verifies i.i.d. ones."""
    if action.is_certain:
        return CERTAIN
    if action.children:
        return at_every_level(verifier)
    if action.distinct:
        return styled(verifier, action.style_name)
    return verifier
