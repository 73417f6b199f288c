from __future__ import annotations

import pytest
import torch

from data_gen.drafting import draft_supertrees, draft_topology, draft_tree, draw_children, nodes_of
from data_gen.models import CachedModel, ModelPair
from data_gen.sampling import Sampling
from data_gen.trees import Topology
from selector.actions import Action, ActionSpace

CONTEXT = [5, 17, 203, 44, 91]
SAMPLING = Sampling(0.7)


def rooted(pair: ModelPair) -> tuple[CachedModel, torch.Tensor]:
    draft = CachedModel(pair.draft)
    root = SAMPLING.probabilities(draft.extend(CONTEXT).logits_BWV[0, -1])
    return draft, root


@torch.inference_mode()
def reference(pair: ModelPair, path: list[int]) -> torch.Tensor:
    return SAMPLING.probabilities(pair.draft(torch.tensor([CONTEXT + path])).logits[0, -1])


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """[B, W] of every pass from now on."""
    shapes: list[tuple[int, ...]] = []
    forward = CachedModel.forward
    monkeypatch.setattr(
        CachedModel,
        "forward",
        lambda model, tokens, *rest: (shapes.append(tuple(tokens.shape)), forward(model, tokens, *rest))[1],
    )
    return shapes


@pytest.mark.parametrize("action", [(1, 3, 0), (1, 8, 4), (2, 0, 3), (3, 2, 2), (4, 1, 1), (4, 0, 8)], ids=str)
def test_rows_are_the_drafts_own_distributions(pair: ModelPair, action: tuple[int, int, int]) -> None:
    draft, root = rooted(pair)
    drafted = draft_tree(draft, root, Action(*action), SAMPLING, torch.Generator().manual_seed(1))
    K, L1, L2 = action
    tree = drafted.tree
    assert int(tree.depths_N.max()) == L1 + L2
    assert len(tree.branch_nodes) == (K if L2 else 1)
    for node in range(len(tree)):
        if tree.children(node):
            path = [tree.token(n) for n in tree.path_to(node)]
            assert torch.allclose(drafted.probs_NV[node], reference(pair, path), atol=1e-5)
            assert node == 0 or node in drafted.row_of
        else:
            assert node not in drafted.row_of


def test_a_tree_takes_as_many_passes_as_it_is_deep(pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    draft, root = rooted(pair)
    shapes = recorded(monkeypatch)
    draft_tree(draft, root, Action(3, 2, 4), SAMPLING, torch.Generator().manual_seed(1))
    assert [width for _, width in shapes] == [
        1,
        1,
        3,
        3,
        3,
    ]  # the pass over the root token has been made: L1 + L2 in all


def uniforms(samples: int, space: ActionSpace, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(samples, nodes_of(space), generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("sampling", [SAMPLING, Sampling(0.05)], ids=str)  # at 0.05 most prefixes are equal
def test_supertree_rows_are_the_drafts_own_distributions(pair: ModelPair, sampling: Sampling) -> None:
    """Supertrees at roots of different lengths, drafted side by side."""
    draft = CachedModel(pair.draft)
    logits_TV = draft.extend(CONTEXT).logits_BWV[0]
    space = ActionSpace(3, 2, 3)
    lengths = [len(CONTEXT), 2, len(CONTEXT)]
    roots_SV = torch.stack([sampling.probabilities(logits_TV[length - 1]) for length in lengths])
    trees, probs_SNV, hidden_STD = draft_supertrees(
        draft.prefixes(lengths), roots_SV, space, sampling, uniforms(3, space, 2)
    )
    same = trees[0].tokens_N.tolist() == trees[2].tokens_N.tolist()
    assert same == (sampling.temperature < 0.1)
    for length, supertree, probs_NV in zip(lengths, trees, probs_SNV, strict=True):
        for action in (Action(1, 2, 3), Action(3, 1, 3), Action(2, 2, 2), Action(3, 0, 3)):
            tree, rows = supertree.subtree(action)
            for node in range(len(tree)):
                if tree.children(node):
                    path = [tree.token(n) for n in tree.path_to(node)]
                    with torch.inference_mode():
                        own = pair.draft(torch.tensor([CONTEXT[:length] + path])).logits[0, -1]
                    assert torch.allclose(probs_NV[rows[node]], sampling.probabilities(own), atol=1e-5)
    for length, supertree, hidden_TD in zip(lengths, trees, hidden_STD, strict=True):
        trunk = supertree.tokens_N[supertree.trunk_D[1:]].tolist()
        with torch.inference_mode():
            output = pair.draft(torch.tensor([CONTEXT[:length] + trunk]), output_hidden_states=True)
        assert torch.allclose(hidden_TD, output.hidden_states[-1][0, length:-1], atol=1e-4)


def test_a_supertree_takes_a_pass_per_depth(pair: ModelPair, monkeypatch: pytest.MonkeyPatch) -> None:
    draft, root = rooted(pair)
    shapes = recorded(monkeypatch)
    space = ActionSpace.default()
    draft_supertrees(draft.prefixes([5] * 2), root.expand(2, -1), space, SAMPLING, uniforms(2, space, 1))
    # at depth d: the trunk, and three branches from each of the trunk depths above it that are not yet 8 long
    assert shapes == [(2, 1 + 3 * sum(0 < depth - L1 < 8 for L1 in range(9))) for depth in range(1, 16)]


def test_first_tokens_of_the_branches_follow_the_draft(pair: ModelPair) -> None:
    """Chi-square over 400 supertrees; false-alarm rate 1e-5."""
    from scipy import stats

    draft, root = rooted(pair)
    space = ActionSpace(3, 0, 1)
    trees, _, _ = draft_supertrees(
        draft.prefixes([len(CONTEXT)] * 400), root.expand(400, -1), space, SAMPLING, uniforms(400, space, 3)
    )
    counts = torch.zeros(len(root))
    for tree in trees:
        for branch in tree.branches_LKD[0]:
            counts[tree.tokens_N[branch[1]]] += 1
    top = root.topk(5).indices
    observed = torch.cat([counts[top], counts.sum()[None] - counts[top].sum()])
    expected = counts.sum() * torch.cat([root[top], 1 - root[top].sum()[None]])
    statistic = float(((observed - expected) ** 2 / expected).sum())
    assert stats.chi2.sf(statistic, 5) > 1e-5


@pytest.mark.parametrize("style", ["iid", "without_replacement", "greedy"])
def test_trees_of_any_shape_have_the_drafts_own_distributions(pair: ModelPair, style: str) -> None:
    topology = Topology.from_paths([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]])
    for seed in range(5):
        draft, root = rooted(pair)
        tree, probs_NV = draft_topology(draft, root, topology, SAMPLING, torch.Generator().manual_seed(seed), style)
        assert sum(len(tree.children(node)) for node in range(len(tree))) == (7 if style == "iid" else len(tree) - 1)
        for node in range(len(tree)):
            if tree.children(node):
                path = [tree.token(n) for n in tree.path_to(node)]
                assert torch.allclose(probs_NV[node], reference(pair, path), atol=1e-5)


def test_children_are_drawn_as_the_style_says() -> None:
    """Pairs without replacement against their exact law (4 sigma); greedy ones hold the top token and another."""
    probs_V = torch.tensor([0.5, 0.3, 0.2, 0.0])
    generator = torch.Generator().manual_seed(2)
    drawn = [tuple(draw_children(probs_V, 2, "without_replacement", generator)) for _ in range(4000)]
    for x, y in [(0, 1), (1, 0), (2, 1)]:
        expected = float(probs_V[x] * probs_V[y] / (1 - probs_V[x]))
        assert abs(drawn.count((x, y)) / 4000 - expected) < 4 * (expected / 4000) ** 0.5
    assert {tuple(draw_children(probs_V, 2, "greedy", generator)) for _ in range(200)} == {(0, 1), (0, 2)}
    assert sorted(draw_children(probs_V, 4, "without_replacement", generator)) == [0, 1, 2]
    assert sorted(draw_children(probs_V, 4, "greedy", generator)) == [0, 1, 2]
