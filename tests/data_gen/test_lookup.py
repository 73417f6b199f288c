"""Drafts copied from the text: which tokens, as brute force finds them; and that they are verified without loss."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from data_gen.decoding.decoder import Decoder
from data_gen.decoding.loop import FixedTree
from data_gen.drafting.lookup import LookupIndex
from data_gen.drafting.sampled import draft_lookup
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.trees import DraftTree
from data_gen.verification import VERIFIERS, Verdict, get_verifier
from data_gen.verification.traversal import Traversal
from selector.actions import Action
from tests.data_gen.by_definition import earlier_ends, longest_match
from tests.data_gen.decodes import decode, generated
from tests.data_gen.worlds import KINDS, World

TOKENS = st.integers(1, 4).flatmap(lambda top: st.lists(st.integers(0, top), max_size=40))
PROMPT = [5, 17, 203, 44, 91, 5, 17, 203]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(TOKENS, st.integers(0, 40), st.integers(1, 50))
def test_the_longest_match_is_that_of_brute_force(tokens: list[int], given_first: int, length: int) -> None:
    """After every token, however many of them are there from the start; overlaps included. What is proposed is what
    followed one of its earlier places, as far as the text went there, and then what was proposed itself."""
    index = LookupIndex(tokens[:given_first])
    for n in range(len(index), len(tokens) + 1):
        known = tokens[:n]
        assert (index.tokens, index.match) == (known, longest_match(known))
        proposal = index.proposal(length)
        assert len(proposal) == (length if index.match else 0)
        if proposal:
            whole, end = known + proposal, index.source + 1
            assert end in earlier_ends(known, index.match) and proposal == whole[end : end + length], known
        if n < len(tokens):
            rest = tokens[n:][: len(proposal)]
            assert index.agreement(rest) == next((i for i, x in enumerate(rest) if x != proposal[i]), len(rest))
            index.extend([tokens[n]])
            assert index.predicted[n] == (proposal[:1] == [tokens[n]])
            assert (index.sources[n], index.matches[n]) == (index.source, index.match)


@pytest.mark.parametrize("name", VERIFIERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_lookup_is_verified_without_loss(name: str, kind: str) -> None:
    """Whatever is proposed: the law of the verifier, continued from the target, is the target's."""
    world, verifier = World(3, 3, kind, 5), get_verifier(name)
    for proposal in ([0], [2, 1], [1, 1, 1], [0, 2, 1]):
        draft = draft_lookup(proposal, 3, torch.device("cpu"))
        target_NV, _ = world.rows(draft.tree)
        law_NV = verifier.law(draft.tree, target_NV, draft.probs_NV)
        for depth in range(len(proposal) + 1):
            prefix = tuple(proposal[:depth])
            expected_V = world.target_probability(prefix) * world.target[prefix].double()
            if depth < len(proposal):
                expected_V[proposal[depth]] = 0.0  # it is on the path
            torch.testing.assert_close(law_NV[draft.tree.node_of(list(prefix))], expected_V, atol=1e-12, rtol=0)


def test_copies_are_not_given_to_the_verifier_of_trees(pair: ModelPair) -> None:
    """One verifier checks copies, whatever verifies the trees."""

    class ForTrees(Traversal):
        def verify(self, tree: DraftTree, *rest: Any) -> Verdict:
            raise AssertionError("a copy")

    copies, chains = (
        Decoder(pair, Sampling(0.0), ForTrees(), FixedTree(action)) for action in (Action.copy(4), Action(1, 2, 0))
    )
    assert any(step.accepted for step in copies.decode(PROMPT, 60, torch.Generator()).steps)
    with pytest.raises(AssertionError, match="a copy"):
        chains.decode(PROMPT, 60, torch.Generator())


@pytest.mark.parametrize("feature_levels", [(), ("light",)], ids=str)
def test_greedy_text_is_that_of_generate(pair: ModelPair, feature_levels: tuple[str, ...]) -> None:
    """With copies in the loop, of a text that repeats itself; whatever the chooser asks for."""
    decoded = decode(pair, FixedTree(Action.copy(16), feature_levels), PROMPT, 60)
    assert decoded.tokens == generated(pair.target, PROMPT, 60)
    assert any(step.accepted > 1 for step in decoded.steps)
