"""The eager decoder: delayed trees of any style and all verifiers, on caches that grow with the text.

The target's KV cache ends before the root (the last committed token), which its next forward pass covers. The draft's
cache may lag further behind; its forward pass over the root also covers what it lacks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from data_gen.decoding.loop import Clock, Loop, Outcome, Text
from data_gen.drafting.sampled import Draft, draft_lookup, draft_tree
from data_gen.features.root import BLOCK, Accepted
from data_gen.models.pair import CachedModel, ModelRows
from data_gen.verification import COPIED, Verdict, Verifier, styled
from data_gen.verification.distributions import sample
from selector.actions import Action


class Decoder(Loop["_CachedText"]):
    """Decodes eagerly: Python reads every drafted token."""

    def _open(self, prompt: Sequence[int], generator: torch.Generator) -> _CachedText:
        text = _CachedText(prompt, self.sampling, self.chooser.feature_levels, generator)
        text.target, text.draft = CachedModel(self.pair.target), CachedModel(self.pair.draft)
        text.target.fill(prompt[:-1])
        return text

    def _close(self, text: _CachedText) -> None:
        text.target.check()
        text.draft.check()

    def _forward_root(self, text: _CachedText, clock: Clock) -> None:
        # the prompt does not count as time of the step; after many copies, the draft may lack more than memory holds
        draft, tokens, knowledge = text.draft, text.tokens, text.knowledge
        if before := tokens[draft.committed : text.prompt_length - 1]:
            draft.fill(before)
            clock.skip()
        if knowledge is None or not knowledge.needs_draft:
            draft.fill(tokens[draft.committed : -BLOCK])
        while draft.committed < len(tokens):
            first, end = draft.committed, min(draft.committed + BLOCK, len(tokens))
            rows = draft.extend(tokens[first:end]).rows(
                self.draft_sampling,
                lambda: [tokens[: n + 1] for n in range(first, end)],  # noqa: B023
            )
            text.root_probs_V, text.root_logits_V = rows.probs_NV[-1], rows.logits_NV[-1]
            if knowledge is not None:
                knowledge.passed(rows.each())

    def _run(self, text: _CachedText, action: Action, clock: Clock) -> Outcome:
        drafted = self._draft(text, action, clock)
        clock.lap("draft")
        rows = self._target(text, drafted)
        clock.lap("target")
        verdict = self._verify(text, action, drafted, rows)
        clock.lap("verify")
        return self._commit(text, drafted, rows, verdict)

    def _draft(self, text: _CachedText, action: Action, clock: Clock) -> Draft:
        if action.drafts:
            self._forward_root(text, clock)
            style = self._verifier_of(action).style
            return draft_tree(
                *(text.draft, text.root_probs_V, action, self.draft_sampling, text.generator, style, text.tokens),
                root_logits_V=text.root_logits_V,
            )
        copied = text.proposal(action.L1) if action.copies else []
        return draft_lookup(copied, self.pair.vocabulary, self.pair.device)

    def _target(self, text: _CachedText, drafted: Draft) -> ModelRows:
        tree = drafted.tree
        tokens_N = tree.tokens_N.clone()
        tokens_N[0] = text.tokens[-1]
        return text.target.forward(tokens_N, tree.depths_N, tree.ancestors_NN()).rows(
            self.sampling,
            lambda: [text.tokens + [tree.token(n) for n in tree.path_to(node)] for node in range(len(tree))],
        )

    def _verify(self, text: _CachedText, action: Action, drafted: Draft, rows: ModelRows) -> Verdict:
        if len(drafted.tree) == 1:
            return Verdict(0, int(sample(rows.probs_NV[0], 1, text.generator)))
        return self._verifier_of(action).verify(drafted.tree, rows.probs_NV, drafted.probs_NV, text.generator)

    def _verifier_of(self, action: Action) -> Verifier:
        if action.copies:
            return COPIED
        return styled(self.verifier, action.style) if action.distinct else self.verifier

    def _commit(self, text: _CachedText, drafted: Draft, rows: ModelRows, verdict: Verdict) -> Outcome:
        path = drafted.tree.path_to(verdict.node)
        passed = [node for node in path if node in drafted.row_of]
        text.target.keep([0, *path])
        text.draft.keep([drafted.row_of[node] for node in passed])
        if text.knowledge is not None:
            text.knowledge.passed(drafted.rows(passed))
        tokens = [drafted.tree.token(node) for node in path] + [verdict.token]
        return Outcome(tokens, len(drafted.tree), Accepted(rows, [0, *path]))


class _CachedText(Text):
    target: CachedModel
    draft: CachedModel
    root_probs_V: Tensor  # the draft's, after its forward pass over the root
    root_logits_V: Tensor
