from __future__ import annotations

import pytest
import torch

from data_gen.audit import RootedText, Variant, variant_efficiencies
from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.texts.written import Text, written_by_target
from data_gen.trees import Topology
from selector.actions import Action, ActionSpace

PROMPTS = [[5, 17, 203, 44, 91], [9], [3, 8], [250, 251, 17, 5]]
SAMPLING = Sampling(0.7)
SPACE = ActionSpace.default()
VERIFIERS = "specinfer", "traversal", "block"


def texts(pair: ModelPair, count: int, sampling: Sampling = SAMPLING) -> list[RootedText]:
    prompts = [PROMPTS[n % len(PROMPTS)] for n in range(count)]
    written = written_by_target(pair, prompts, SPACE.depth + 4, sampling, seed=3)
    return [RootedText(pair, text, sampling) for text in written]


@pytest.mark.parametrize("root", [0, 4])
def test_labels_along_texts_agree_with_drafted_trees(pair: ModelPair, root: int) -> None:
    """The mean difference of label and drafted tree at the same roots: |z| < 4.5 (false alarms: 7e-6 each)."""
    action, generator = Action(3, 1, 3), torch.Generator().manual_seed(1)
    iid = Variant("iid", VERIFIERS)
    differences = []
    for text in texts(pair, 120):
        label_V = SPACE.efficiencies(text.survivals(VERIFIERS, generator))[:, root, SPACE.index(action)]
        drafted = variant_efficiencies(text, root, iid, action, generator)
        differences.append(label_V - torch.tensor([drafted[name] for name in VERIFIERS], dtype=torch.float64))
    values_XV = torch.stack(differences)
    assert bool((values_XV.mean(0).abs() < 4.5 * values_XV.std(0) / len(values_XV) ** 0.5).all())


@pytest.mark.parametrize("topology", [None, Topology.balanced(2, 3)], ids=["delayed", "binary"])
def test_rows_of_a_drafted_tree_are_the_models_own(pair: ModelPair, topology: Topology | None) -> None:
    variant = Variant("hot", (), heat=1.4, topology=topology)
    for number, root in ((0, 0), (0, 3), (1, 0)):
        text = texts(pair, 2)[number]
        tree, q_NV = text.drafted(root, variant, Action(2, 1, 2), torch.Generator().manual_seed(1))
        p_NV = text.target_probs(tree, root)
        context = [*PROMPTS[number], *text.tokens_T[1 : root + 1].tolist()]
        for node in range(len(tree)):
            tokens = torch.tensor([[*context, *(tree.token(n) for n in tree.path_to(node))]])
            with torch.inference_mode():
                p_V, q_V = (model(tokens).logits[0, -1] for model in (pair.target, pair.draft))
            assert torch.allclose(p_NV[node], SAMPLING.probabilities(p_V), atol=1e-5)
            if tree.children(node):
                assert torch.allclose(q_NV[node], Sampling(0.7 * 1.4).probabilities(q_V), atol=1e-5)


def test_distances_belong_to_a_root_and_the_tokens_after_it(pair: ModelPair) -> None:
    text = texts(pair, 1)[0]
    distance_RD = text.distances()
    assert distance_RD.shape == (text.roots, SPACE.depth) == (5, 16)
    for root, depth in ((0, 0), (2, 7), (4, 15)):
        p_V, q_V = text.target_probs_TV[root + depth], text.draft_probs_TV[root + depth]
        assert float(distance_RD[root, depth]) == pytest.approx(float((p_V - q_V).abs().sum()), abs=1e-5)


def test_a_text_is_cut_before_what_the_target_would_not_say(pair: ModelPair) -> None:
    greedy = Sampling(0.0)
    (text,) = written_by_target(pair, PROMPTS[:1], SPACE.depth + 4, greedy, seed=1)
    tokens = list(text.tokens)
    tokens[-2] = (tokens[-2] + 1) % 300
    whole, cut = (RootedText(pair, Text(each, text.start), greedy) for each in (text.tokens, tokens))
    assert (whole.roots, cut.roots) == (5, 3)
    assert cut.survivals(VERIFIERS, torch.Generator()).shape == (3, 3, len(SPACE.sums_SA))


def test_a_text_without_look_ahead_has_no_roots(pair: ModelPair) -> None:
    assert RootedText(pair, Text(PROMPTS[0], 0), SAMPLING).roots == 0
