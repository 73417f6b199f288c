from __future__ import annotations

import pytest
import torch

from data_gen.drafting.sampled import EVERY, different_nodes, draft_tree, draw_children
from data_gen.models.pair import CachedModel, ModelPair
from data_gen.models.sampling import Sampling
from selector.actions import Action

CONTEXT = [5, 17, 203, 44, 91]
SAMPLING = Sampling(0.7)


@torch.inference_mode()
def reference(pair: ModelPair, path: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and last hidden state of the draft at the end of a path."""
    output = pair.draft(torch.tensor([CONTEXT + path]), output_hidden_states=True)
    return output.logits[0, -1], output.hidden_states[-1][0, -1]


SHAPES = [(1, 0, 0), (1, 1, 0), (1, 8, 4), (2, 0, 3), (3, 2, 2), (4, 0, 8)]


@pytest.mark.parametrize("sampling", [SAMPLING, Sampling(0.05)], ids=str)  # at 0.05 most prefixes are equal
@pytest.mark.parametrize("action", SHAPES, ids=str)
def test_rows_are_the_drafts_own(pair: ModelPair, action: tuple[int, int, int], sampling: Sampling) -> None:
    """Distributions after all inner nodes; and logits and hidden states after those that it has passed."""
    draft = CachedModel(pair.draft)
    root = sampling.probabilities(draft.extend(CONTEXT).logits_WV[-1])
    drafted = draft_tree(draft, root, Action(*action), sampling, torch.Generator().manual_seed(1))
    K, L1, L2 = action
    tree = drafted.tree
    assert int(tree.depths_N.max()) == L1 + L2
    assert len(tree.branch_nodes) == (K if K > 1 and L2 else 1)
    inner = [node for node in range(1, len(tree)) if tree.children(node)]
    assert set(drafted.row_of) == set(inner)
    assert torch.equal(drafted.probs_NV[0], root)
    if inner:
        chosen = inner[::-1]  # in any order
        for node, (probs_V, logits_V, hidden_D) in zip(chosen, drafted.rows(chosen), strict=True):
            own_logits_V, own_hidden_D = reference(pair, [tree.token(n) for n in tree.path_to(node)])
            assert torch.equal(probs_V, drafted.probs_NV[node])
            assert torch.allclose(probs_V, sampling.probabilities(own_logits_V), atol=2e-5)
            assert torch.allclose(logits_V, own_logits_V, atol=1e-4)
            assert torch.allclose(hidden_D, own_hidden_D, atol=1e-4)
    for node in range(1, len(tree)):
        assert tree.children(node) or not drafted.probs_NV[node].any()


def test_a_tree_takes_as_many_passes_as_it_is_deep(pair: ModelPair) -> None:
    draft, widths = CachedModel(pair.draft), list[int]()
    root = SAMPLING.probabilities(draft.extend(CONTEXT).logits_WV[-1])
    with pair.draft.register_forward_pre_hook(lambda _, inputs: widths.append(inputs[0].shape[1])):
        draft_tree(draft, root, Action(3, 2, 4), SAMPLING, torch.Generator().manual_seed(1))
    assert widths == [1, 1, 3, 3, 3]  # the root token has been passed: L1 + L2 in all


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
    assert draw_children(probs_V, 4, "greedy", generator, torch.arange(4.0)) == [0, 1, 2, 3]
    assert draw_children(torch.eye(4)[2], 3, "greedy", generator, torch.tensor([2.0, 1.0, 9.0, 3.0])) == [2, 3, 0]


def test_how_many_nodes_of_branches_differ(pair: ModelPair) -> None:
    """One at temperature 0. Else the first level has, on average, the tokens' chances to be drawn at all."""
    texts = [([*range(5, 60)], 3), ([7] * 40, 1)]
    assert different_nodes(pair.draft, texts, Sampling(0), 0) == [[1.0] * 8] * 3
    found_KD = torch.tensor(different_nodes(pair.draft, texts, Sampling(0.5), 0))
    assert (found_KD[:, 1:] >= found_KD[:, :-1]).all() and (found_KD[1:] >= found_KD[:-1]).all()
    expected: list[torch.Tensor] = []
    for tokens, start in texts:
        logits_TV = pair.draft(torch.tensor([tokens])).logits[0, start::EVERY]
        missed_TV = 1 - (logits_TV / 0.5).softmax(-1)
        expected += [torch.stack([(1 - missed_V**K).sum() for K in (2, 3, 4)]) for missed_V in missed_TV]
    # twelve roots of at most three nodes more or less: the standard error is below 0.3
    assert (found_KD[:, 0] - torch.stack(expected).mean(0)).abs().max() < 0.9
