"""Drafts copied from the text: which tokens, as brute force finds them; and that they are verified without loss."""

from __future__ import annotations

import random
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
from selector.actions import Action, Lookup
from tests.data_gen.worlds import KINDS, World

TOKENS = st.integers(1, 4).flatmap(lambda top: st.lists(st.integers(0, top), min_size=0, max_size=40))


def longest_match(tokens: list[int]) -> int:
    """Length of the longest end of the tokens that stands in them before, by trying all."""
    return next((length for length in range(len(tokens) - 1, 0, -1) if earlier_ends(tokens, length)), 0)


def earlier_ends(tokens: list[int], length: int) -> list[int]:
    """Positions after the earlier places where the last `length` tokens stand."""
    end = tokens[len(tokens) - length :]
    return [i + length for i in range(len(tokens) - length) if tokens[i : i + length] == end]


def proposed(tokens: list[int], length: int) -> list[int]:
    return LookupIndex(tokens).proposal(length)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(TOKENS, st.integers(0, 40), st.integers(1, 50))
def test_the_longest_match_is_that_of_brute_force(tokens: list[int], given_first: int, length: int) -> None:
    """After every token, however many of them are there from the start; overlaps included. What is proposed is what
    followed one of its earlier places, as far as the text went there, and then what was proposed itself."""
    index = LookupIndex(tokens[:given_first])
    for n in range(len(tokens[:given_first]), len(tokens) + 1):
        known = tokens[:n]
        assert index.match == longest_match(known), known
        proposal = index.proposal(length)
        assert len(proposal) == (length if index.match else 0)
        whole = known + proposal
        assert not proposal or any(
            whole[n:] == whole[end : end + length] for end in earlier_ends(known, index.match)
        ), known
        if n < len(tokens):
            rest = tokens[n:][: len(proposal)]
            assert index.agreement(rest) == next((i for i, x in enumerate(rest) if x != proposal[i]), len(rest))
            index.extend([tokens[n]])
            assert index.found_3N[:, n].tolist() == [proposal[:1] == [tokens[n]], index.source, index.match]
            assert len(index) == n + 1


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(1, 3), st.integers(0, 2**32), st.integers(1, 700))
def test_tokens_may_come_one_by_one_or_many_at_once(vocabulary: int, seed: int, at_once: int) -> None:
    """Also beyond the room that there is at first."""
    tokens = [random.Random(seed + n).randrange(vocabulary) for n in range(1300)]
    one, many = LookupIndex(tokens[:5]), LookupIndex(tokens[:5])
    for begin in range(5, len(tokens), at_once):
        chunk = tokens[begin : begin + at_once]
        many.extend(chunk)
        for token in chunk:
            one.extend([token])
        assert (many.found_3N[:, : len(many)] == one.found_3N[:, : len(one)]).all()
        assert (many.match, many.source, many.proposal(3)) == (one.match, one.source, one.proposal(3))
    assert many.tokens == one.tokens == tokens


def test_matches_and_proposals_of_known_texts() -> None:
    """`a b c a b` ends as it began; four equal tokens overlap; the later of two places is copied; where nothing repeats
    there is no proposal."""
    for tokens, length, expected in (
        ([0, 1, 2, 0, 1], 2, [2, 0, 1, 2]),
        ([7] * 4, 3, [7, 7, 7, 7]),
        ([1, 5, 1, 6, 1], 1, [6, 1, 6, 1]),
        ([3, 1, 4, 2], 0, []),
        ([5], 0, []),
        ([], 0, []),
    ):
        assert LookupIndex(tokens).match == length
        assert proposed(tokens, 4) == expected


@pytest.mark.parametrize("name", VERIFIERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_lookup_is_verified_without_loss(name: str, kind: str) -> None:
    """Whatever is proposed: the law of the verifier, continued from the target, is the target's."""
    world = World(3, 3, kind, 5)
    verifier = get_verifier(name)
    for proposal in ([0], [2, 1], [1, 1, 1], [0, 2, 1]):
        draft = draft_lookup(proposal, 3, torch.device("cpu"))
        target_NV, _ = world.rows(draft.tree)
        law_NV = verifier.law(draft.tree, target_NV, draft.probs_NV)
        for depth in range(len(proposal) + 1):
            prefix = tuple(proposal[:depth])
            node = draft.tree.node_of(list(prefix))
            reached = world.target_probability(prefix)
            for token in range(3):
                on_path = depth < len(proposal) and token == proposal[depth]
                expected = 0.0 if on_path else reached * float(world.target[prefix][token])
                assert float(law_NV[node, token]) == pytest.approx(expected, abs=1e-12)


def test_copies_are_not_given_to_the_verifier_of_trees(pair: ModelPair) -> None:
    """One verifier checks copies, whatever verifies the trees."""

    class ForTrees(Traversal):
        def verify(self, tree: DraftTree, *rest: Any) -> Verdict:
            raise AssertionError("a copy")

    prompt = [5, 17, 203, 44, 91, 5, 17, 203]
    decoder = Decoder(pair, Sampling(0.0), ForTrees(), FixedTree(Lookup(4)))
    assert any(step.accepted for step in decoder.decode(prompt, 60, torch.Generator()).steps)
    with pytest.raises(AssertionError, match="a copy"):
        Decoder(pair, Sampling(0.0), ForTrees(), FixedTree(Action(1, 2, 0))).decode(prompt, 60, torch.Generator())


@pytest.mark.parametrize("action", [Lookup(2), Lookup(16)], ids=str)
@pytest.mark.parametrize("feature_levels", [(), ("match",), ("early",), ("light",)], ids=str)
def test_greedy_text_is_that_of_generate(pair: ModelPair, action: Lookup, feature_levels: tuple[str, ...]) -> None:
    """With copies in the loop, of a text that repeats itself; whatever the chooser asks for."""
    prompt = [5, 17, 203, 44, 91, 5, 17, 203]
    expected = pair.target.generate(
        torch.tensor([prompt]), max_new_tokens=60, do_sample=False, pad_token_id=0, eos_token_id=None
    )
    decoder = Decoder(pair, Sampling(0.0), get_verifier("traversal"), FixedTree(action, feature_levels))
    decoded = decoder.decode(prompt, 60, torch.Generator().manual_seed(0))
    assert decoded.tokens == expected[0, len(prompt) :].tolist()
    assert any(step.accepted > 1 for step in decoded.steps)
