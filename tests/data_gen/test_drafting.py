"""Drafts: trees drawn from the draft model, and tokens copied from the text, as brute force finds
them."""

from __future__ import annotations

from collections import Counter
from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from data_gen.drafting.lookup import LookupIndex
from data_gen.drafting.ranked import LOWEST_RANK, most_likely, ranks_of
from data_gen.drafting.sampled import EVERY, distinct_nodes, draft_tree
from data_gen.models.pair import CachedModel, ModelPair
from data_gen.models.sampling import Sampling, probabilities
from data_gen.trees import DraftTree
from data_gen.verification import CERTAIN
from selector.actions import Action, ActionSpace
from tests.data_gen.by_definition import earlier_ends, longest_match
from tests.data_gen.worlds import KINDS, World

CONTEXT = [5, 17, 203, 44, 91]
SAMPLING = Sampling(0.7)


@torch.inference_mode()
def reference(pair: ModelPair, path: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and last hidden state of the draft at the end of a path."""
    output = pair.draft(torch.tensor([CONTEXT + path]), output_hidden_states=True)
    return output.logits[0, -1], output.hidden_states[-1][0, -1]


SHAPES = [(1, 0, 0), (1, 1, 0), (1, 8, 4), (2, 0, 3), (3, 2, 2), (4, 0, 8)]


# at 0.05 most prefixes are equal
@pytest.mark.parametrize("sampling", [SAMPLING, Sampling(0.05)], ids=str)
@pytest.mark.parametrize("action", SHAPES, ids=str)
def test_rows_are_the_drafts_own(
    pair: ModelPair, action: tuple[int, int, int], sampling: Sampling
) -> None:
    """Distributions after all inner nodes; and logits and hidden states after those that it has
    passed."""
    draft = CachedModel(pair.draft)
    root = probabilities(draft.extend(CONTEXT).logits_WV[-1], sampling)
    widths = list[int]()  # of the passes
    with pair.draft.register_forward_pre_hook(lambda _, inputs: widths.append(inputs[0].shape[1])):
        drafted = draft_tree(
            draft, root, Action(*action), sampling, torch.Generator().manual_seed(1)
        )
    K, L1, L2 = action
    tree = drafted.tree
    # equal branches share their passes, and the root has been passed
    assert widths == [len(nodes) for nodes in tree.nodes_by_depth[1:-1]]
    assert max(widths, default=0) <= K
    assert int(tree.depths_N.max()) == L1 + L2
    assert len(drafted.node_of) == 1 + Action(*action).nodes
    inner = [node for node in range(1, len(tree)) if tree.children(node)]
    assert set(drafted.row_of) == set(inner)
    assert torch.equal(drafted.probs_NV[0], root)
    if inner:
        chosen = inner[::-1]  # in any order
        for node, (probs_V, logits_V, hidden_D) in zip(chosen, drafted.rows(chosen), strict=True):
            own_logits_V, own_hidden_D = reference(
                pair, [tree.token(n) for n in tree.path_to(node)]
            )
            assert torch.equal(probs_V, drafted.probs_NV[node])
            assert torch.allclose(probs_V, probabilities(own_logits_V, sampling), atol=2e-5)
            assert torch.allclose(logits_V, own_logits_V, atol=1e-4)
            assert torch.allclose(hidden_D, own_hidden_D, atol=1e-4)
    for node in range(1, len(tree)):
        assert tree.children(node) or not drafted.probs_NV[node].any()


def test_children_are_drawn_as_the_style_says(pair: ModelPair) -> None:
    """Pairs without replacement against their exact law (4 sigma); greedy ones hold the top token
    and another."""
    probs_V = torch.tensor([0.5, 0.3, 0.2, 0.0])
    draft = CachedModel(pair.draft)  # which passes nothing
    generator = torch.Generator().manual_seed(2)

    def drawn(style: str, count: int = 2, logits_V: Tensor | None = None) -> tuple[int, ...]:
        action = Action(count, 0, 1, style)
        drafted = draft_tree(draft, probs_V, action, SAMPLING, generator, root_logits_V=logits_V)
        return tuple(drafted.tree.tokens_N.tolist()[1:])

    pairs = Counter(drawn("without_replacement") for _ in range(4000))
    for x, y in [(0, 1), (1, 0), (2, 1)]:
        expected = float(probs_V[x] * probs_V[y] / (1 - probs_V[x]))
        assert abs(pairs[x, y] / 4000 - expected) < 4 * (expected / 4000) ** 0.5
    assert {drawn("greedy") for _ in range(200)} == {(0, 1), (0, 2)}
    for style in ("without_replacement", "greedy"):
        assert sorted(drawn(style, 4)) == [0, 1, 2]
    assert drawn("greedy", 4, torch.arange(4.0)) == (0, 1, 2, 3)


def test_how_many_nodes_of_branches_differ(pair: ModelPair) -> None:
    """One at temperature 0. Else the first level has, on average, the tokens' chances to be drawn
    at all."""
    texts = [([*range(5, 60)], 3), ([7] * 40, 1)]
    space = ActionSpace(2, 0, 8, wide=(4,))
    same = distinct_nodes(pair.draft, texts, Sampling(0), 0, space)
    assert same == {"2": [1.0] * 8, "4": [1.0] * 3}
    nodes = distinct_nodes(pair.draft, texts, Sampling(0.5), 0, space)
    nodes_KD = torch.tensor([nodes["2"][:3], nodes["4"]])
    assert (nodes_KD[:, 1:] >= nodes_KD[:, :-1]).all()
    assert (nodes_KD[1:] >= nodes_KD[:-1]).all()
    chances: list[torch.Tensor] = []
    for tokens, start in texts:
        logits_TV = pair.draft(torch.tensor([tokens])).logits[0, start::EVERY]
        missed_TV = 1 - (logits_TV / 0.5).softmax(-1)
        chances.append(torch.stack([(1 - missed_TV**K).sum(-1) for K in (2, 4)], dim=-1))
    # twelve roots of at most three nodes more or less: the standard error is below 0.3
    assert (nodes_KD[:, 0] - torch.cat(chances).mean(0)).abs().max() < 0.9


TOKENS = st.integers(1, 4).flatmap(lambda top: st.lists(st.integers(0, top), max_size=40))
PROMPT = [5, 17, 203, 44, 91, 5, 17, 203]


@settings(max_examples=200, deadline=None, derandomize=True)
@given(TOKENS, st.integers(0, 40), st.integers(1, 50))
def test_the_longest_match_is_that_of_brute_force(
    tokens: list[int], given_first: int, length: int
) -> None:
    """After every token, however many of them are there from the start; overlaps included. What is
    proposed is what followed one of its earlier places, as far as the text went there, and then
    what was proposed itself."""
    index = LookupIndex(tokens[:given_first])
    for n in range(len(index), len(tokens) + 1):
        begun = tokens[:n]
        assert (list(index.tokens), index.match) == (begun, longest_match(begun))
        proposal = index.proposal(length)
        assert len(proposal) == (length if index.match else 0)
        if proposal:
            whole, end = begun + proposal, index.match_end + 1
            assert (
                end in earlier_ends(begun, index.match) and proposal == whole[end : end + length]
            ), begun
        if n < len(tokens):
            rest = tokens[n:][: len(proposal)]
            assert index.agreement(rest) == next(
                (i for i, x in enumerate(rest) if x != proposal[i]), len(rest)
            )
            index.extend([tokens[n]])
            assert index.predicted[n] == (proposal[:1] == [tokens[n]])
            assert (index.match_ends[n], index.matches[n]) == (index.match_end, index.match)


PROPOSALS = ([], [0], [2, 1], [1, 1, 1], [0, 2, 1])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_certain_is_verified_without_loss(kind: str) -> None:
    """A copy, a shape, or both in one tree, whatever their tokens: what the verifier says at a node
    is the target's law there, less the node's children, and no draft's rows are read."""
    world = World(3, 3, kind, 5)
    for shape, proposal in product(([], [(0,)], [(1,), (0,), (0, 2)], [(0,), (0, 0)]), PROPOSALS):
        tree = DraftTree()
        node_of = {(): 0}
        for path in sorted(shape, key=len):
            node_of[path] = tree.add(node_of[path[:-1]], path[-1])
        node = 0
        for token in proposal:
            node = tree.add(node, token)
        target_NV, draft_NV = world.rows(tree)
        law_NV = CERTAIN.law(tree, target_NV, draft_NV)
        paths = [[tree.token(passed) for passed in tree.path_to(node)] for node in range(len(tree))]
        reached = sum(world.target_probability(tuple(path)) for path in paths)
        mean = CERTAIN.block_efficiency(tree, target_NV, draft_NV)
        assert mean == pytest.approx(reached, abs=1e-12)  # the root's path is sure to be reached
        for node in range(len(tree)):
            prefix = tuple(tree.token(passed) for passed in tree.path_to(node))
            expected_V = world.target_probability(prefix) * world.target[prefix].double()
            expected_V[[tree.token(child) for child in tree.children(node)]] = 0.0
            torch.testing.assert_close(law_NV[node], expected_V, atol=1e-12, rtol=0)
        generator = torch.Generator().manual_seed(1)
        draws_NV = torch.zeros_like(law_NV)
        for _ in range(500):
            draws_NV[CERTAIN.verify(tree, target_NV, torch.zeros(0), generator)] += 1
        error_NV = (law_NV * (1 - law_NV) / 500).sqrt() + 1e-9
        # by chance beyond five errors less often than once in 10,000 runs of this test
        assert ((draws_NV / 500 - law_NV).abs() <= 5 * error_NV).all()


def test_ranks_are_those_that_are_drafted() -> None:
    """Equal numbers rank by token id, whatever comes first in memory; a token that the draft cannot
    write has the lowest rank, and none of its kind is drafted."""
    logits_NV = torch.randint(4, (50, 9), generator=torch.Generator().manual_seed(2)).bfloat16()
    logits_NV[:, 3] = -torch.inf
    for logits_V in logits_NV:
        ordered = most_likely(logits_V, 9)
        assert ordered == sorted(range(9), key=lambda token: -float(logits_V[token]))[:8]
        for rank, token in enumerate(ordered):
            assert ranks_of(logits_V.unsqueeze(0), [token]) == [rank]
        assert ranks_of(logits_V.unsqueeze(0), [3]) == [LOWEST_RANK]


def test_a_shape_lacks_the_ranks_that_the_draft_cannot_write(pair: ModelPair) -> None:
    """And what stands below them; a copy stands there, whatever the draft can write."""
    draft = CachedModel(pair.draft)
    root_V = torch.full_like(draft.extend([5, 17]).logits_WV[-1], -torch.inf)
    root_V[[40, 7]] = torch.tensor([1.0, 2.0])
    probs_V = root_V.softmax(-1)
    ranks = [(0,), (1,), (2,), (3,), (3, 0), (1, 0)]
    action = Action.ranked(ranks, copied=2)
    drafted = draft_tree(
        draft, probs_V, action, SAMPLING, root_logits_V=root_V, proposal=[3, 4], text=[5, 17]
    )
    assert drafted.tree.tokens_N.tolist()[:4] == [-1, 7, 40, 3]
    assert drafted.tree.parents_N.tolist() == [-1, 0, 0, 0, 2, 3]
    assert drafted.tree.token(5) == 4 and list(drafted.row_of) == [2]


def test_a_tree_that_branches_at_every_level_has_children_for_each_drafted_token(
    pair: ModelPair,
) -> None:
    """Of equal tokens the children stand together at one node; each inner node has the draft's
    distribution of its path."""
    text = [5, 17, 203]
    action = Action.branching((4, 2, 2))
    for seed in range(4):
        draft = CachedModel(pair.draft)
        sampling = Sampling(0.2)  # some tokens are drawn twice
        root_rows = draft.extend(text).rows(sampling, lambda: [])
        generator = torch.Generator().manual_seed(seed)
        drafted = draft_tree(draft, root_rows.probs_NV[-1], action, sampling, generator)
        tree = drafted.tree
        tokens_of = {0: 1}
        for nodes, count in zip(tree.nodes_by_depth, action.children, strict=False):
            for node in nodes:
                children = tree.children(node)
                assert len(children) == count * tokens_of[node]
                tokens_of |= Counter(children)
                path = [tree.token(passed) for passed in tree.path_to(node)]
                logits_V = pair.draft(torch.tensor([text + path])).logits[0, -1]
                expected_V = (logits_V / 0.2).softmax(-1)
                torch.testing.assert_close(drafted.probs_NV[node], expected_V, atol=1e-4, rtol=0)
        assert len(tree.nodes_by_depth) == 4


def test_a_shape_is_the_drafts_tokens_of_its_ranks(pair: ModelPair) -> None:
    """Each node is its parent's token of the node's rank, by a forward pass over the whole path; a
    copied path shares the nodes with which it begins alike, and every node with a row in the cache
    has the distribution of its path."""
    text = [5, 17, 203, 44, 91, 5, 17]
    ranks = [(0,), (1,), (3,), (0, 0), (0, 2), (1, 1), (0, 2, 0)]

    def after(path: list[int]) -> torch.Tensor:
        return pair.draft(torch.tensor([text + path])).logits[0, -1]

    def token_of(path: tuple[int, ...]) -> list[int]:
        tokens: list[int] = []
        for rank in path:
            tokens.append(most_likely(after(tokens), rank + 1)[rank])
        return tokens

    begins_alike = [*token_of((0, 2)), 7, 8]
    for proposal in ([], [9, 9], begins_alike):
        draft = CachedModel(pair.draft)
        root_V = draft.extend(text).logits_WV[-1]
        drafted = draft_tree(
            draft,
            root_V.softmax(-1),
            Action.ranked(ranks, len(proposal)),
            Sampling(1.0),
            root_logits_V=root_V,
            proposal=proposal,
            text=text,
        )
        tree = drafted.tree
        expected = {tuple(token_of(path)) for path in ranks}
        expected |= {tuple(proposal[:end]) for end in range(1, len(proposal) + 1)}
        paths = [tuple(map(tree.token, tree.path_to(node))) for node in range(1, len(tree))]
        assert sorted(paths) == sorted(expected)
        inner = {path[:-1] for path in ranks if len(path) > 1}
        assert {tuple(map(tree.token, tree.path_to(node))) for node in drafted.row_of} == {
            tuple(token_of(path)) for path in inner
        }
        for node in drafted.row_of:
            (row,) = drafted.rows([node])
            passed = [tree.token(passed) for passed in tree.path_to(node)]
            torch.testing.assert_close(row.logits_V, after(passed), atol=1e-4, rtol=0)


def test_equal_prefixes_are_one_node_and_child_lists_keep_duplicates_in_order() -> None:
    tree = DraftTree.from_paths([7], [[1, 2], [3, 4], [1, 5]])
    assert tree.tokens_N.tolist() == [-1, 7, 1, 2, 3, 4, 5]
    assert tree.parents_N.tolist() == [-1, 0, 1, 2, 1, 4, 2]
    assert tree.depths_N.tolist() == [0, 1, 2, 3, 2, 3, 3]
    a, b = tree.node_of([7, 1]), tree.node_of([7, 3])
    assert (tree.node_of([]), tree.children(0), tree.children(1)) == (0, [1], [a, b, a])
    assert tree.children(a) == [tree.node_of([7, 1, 2]), tree.node_of([7, 1, 5])]


def test_absent_paths_and_branches_of_different_lengths_are_refused() -> None:
    with pytest.raises(KeyError):
        DraftTree.from_paths([1], [[2]]).node_of([1, 3])
    with pytest.raises(ValueError, match="differ in length"):
        DraftTree.from_paths([], [[1], [1, 2]])
