from __future__ import annotations

import pytest
import torch

from data_gen.drafting import draft_supertrees, draft_topology, draft_tree, draw_children
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
    widths = []
    forward = CachedModel.forward
    monkeypatch.setattr(
        CachedModel,
        "forward",
        lambda model, tokens, *rest: (widths.append(tokens.shape[1]), forward(model, tokens, *rest))[1],
    )
    draft_tree(draft, root, Action(3, 2, 4), SAMPLING, torch.Generator().manual_seed(1))
    assert widths == [1, 1, 3, 3, 3]  # the pass over the root token has been made: L1 + L2 in all


def test_supertree_rows_are_the_drafts_own_distributions(pair: ModelPair) -> None:
    draft, root = rooted(pair)
    generator = torch.Generator().manual_seed(2)
    space = ActionSpace(3, 2, 3)
    drafts = draft_supertrees(draft.prefix(len(CONTEXT), 2), root, 2, space, SAMPLING, generator)
    assert drafts[0][0].tokens_N.tolist() != drafts[1][0].tokens_N.tolist()
    for supertree, probs_NV in drafts:
        for action in (Action(1, 2, 3), Action(3, 1, 3), Action(2, 2, 2)):
            tree, rows = supertree.subtree(action)
            for node in range(len(tree)):
                if tree.children(node):
                    path = [tree.token(n) for n in tree.path_to(node)]
                    assert torch.allclose(probs_NV[rows[node]], reference(pair, path), atol=1e-5)


def test_first_tokens_of_the_branches_follow_the_draft(pair: ModelPair) -> None:
    """Chi-square over 400 supertrees; false-alarm rate 1e-5."""
    from scipy import stats

    draft, root = rooted(pair)
    generator = torch.Generator().manual_seed(3)
    counts = torch.zeros(len(root))
    for _ in range(10):
        for tree, _ in draft_supertrees(
            draft.prefix(len(CONTEXT), 40), root, 40, ActionSpace(3, 0, 1), SAMPLING, generator
        ):
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
