"""What the audit measures at a root, and the labels that `quick` takes along a text."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from data_gen.models.pair import ModelPair
from data_gen.models.sampling import Sampling
from data_gen.texts.written import Text, written_by_target
from data_gen.trees import Topology
from pipelines.quick.texts import survivals
from pipelines.studies.audit_trees import TREE, Drafts, RootedText, acceptances
from selector.actions import ActionSpace

PROMPTS = [[5, 17, 203, 44, 91], [9], [3, 8], [250, 251, 17, 5]]
SAMPLING = Sampling(0.7)
SPACE = ActionSpace.default()
VERIFIERS = "specinfer", "traversal", "block"


def written(pair: ModelPair, count: int, sampling: Sampling = SAMPLING) -> list[Text]:
    prompts = [PROMPTS[n % len(PROMPTS)] for n in range(count)]
    return written_by_target(pair, prompts, SPACE.depth + 4, sampling, seed=3)


@pytest.mark.parametrize("root", [0, 4])
def test_labels_along_texts_agree_with_drafted_trees(pair: ModelPair, root: int) -> None:
    """The mean difference of label and drafted tree at the same roots: |z| < 4.5 (false alarms: 7e-6 each)."""
    generator = torch.Generator().manual_seed(1)
    differences = []
    for text in written(pair, 120):
        labels_VRS = survivals(pair, text, SAMPLING, VERIFIERS, generator)
        assert labels_VRS is not None
        label_V = SPACE.efficiencies(labels_VRS)[:, root, SPACE.index(TREE)]
        drafted = RootedText(pair, text, SAMPLING).efficiencies(root, Drafts("iid", VERIFIERS), generator)
        differences.append(label_V - torch.tensor([drafted[name] for name in VERIFIERS], dtype=torch.float64))
    values_XV = torch.stack(differences)
    error_V = values_XV.std(0) / len(values_XV) ** 0.5
    assert bool((error_V > 0).all())
    assert bool((values_XV.mean(0).abs() < 4.5 * error_V).all())


BINARY = Topology.from_paths([list(path) for length in (1, 2, 3) for path in product(range(2), repeat=length)])


@pytest.mark.parametrize("topology", [None, BINARY], ids=["delayed", "binary"])
def test_rows_of_a_drafted_tree_are_the_models_own(pair: ModelPair, topology: Topology | None) -> None:
    drafts = Drafts("hot", (), heat=1.4, topology=topology)
    for number, root in ((0, 0), (0, 3), (1, 0)):
        text = written(pair, 2)[number]
        rooted = RootedText(pair, text, SAMPLING)
        tree, q_NV = rooted.drafted(root, drafts, torch.Generator().manual_seed(1))
        p_NV = rooted.target_probs(tree, root)
        context = text.tokens[: text.start + root + 1]
        for node in range(len(tree)):
            tokens = torch.tensor([[*context, *(tree.token(n) for n in tree.path_to(node))]])
            with torch.inference_mode():
                p_V, q_V = (model(tokens).logits[0, -1] for model in (pair.target, pair.draft))
            assert torch.allclose(p_NV[node], SAMPLING.probabilities(p_V), atol=1e-5)
            if tree.children(node):
                assert torch.allclose(q_NV[node], Sampling(0.7 * 1.4).probabilities(q_V), atol=1e-5)


def test_acceptance_is_read_off_the_law_of_one_level() -> None:
    """With 16 tokens and 200 sets of draws: the mean of `nss` is `sum p (1 - (1 - q)^k)`; nobody passes the optimum."""
    p_V, q_V = torch.randn(2, 16, generator=torch.Generator().manual_seed(2), dtype=torch.float64).softmax(-1)
    generator = torch.Generator().manual_seed(3)
    found: dict[tuple[str, int, str], list[float]] = {}
    for _ in range(200):
        for *key, value in acceptances(p_V, q_V, ("nss", "specinfer"), generator):
            found.setdefault((key[0], key[1], key[2]), []).append(value)
    mean = {key: torch.tensor(values, dtype=torch.float64) for key, values in found.items()}
    assert {style for style, _, _ in mean} == {"iid", "without_replacement", "greedy"}
    for (style, k, name), values in mean.items():
        slack = 4.5 * float(values.std()) / len(values) ** 0.5 + 1e-9
        assert float(values.mean()) < float(mean[style, k, "optimum"].mean()) + slack
        if name == "nss":
            expected = float((p_V * (1 - (1 - q_V) ** k)).sum())
            assert float(values.mean()) == pytest.approx(expected, abs=slack)


def test_a_text_is_cut_before_what_the_target_would_not_say(pair: ModelPair) -> None:
    greedy = Sampling(0.0)
    (text,) = written_by_target(pair, PROMPTS[:1], SPACE.depth + 4, greedy, seed=1)
    tokens = list(text.tokens)
    tokens[-2] = (tokens[-2] + 1) % 300
    whole, cut = (
        survivals(pair, Text(each, text.start), greedy, VERIFIERS, torch.Generator()) for each in (text.tokens, tokens)
    )
    assert whole is not None and whole.shape == (3, 5, len(SPACE.sums_SA))
    assert cut is not None and cut.shape == (3, 3, len(SPACE.sums_SA))
    early = [*text.tokens[: text.start + 1], (text.tokens[text.start + 1] + 1) % 300, *text.tokens[text.start + 2 :]]
    assert survivals(pair, Text(early, text.start), greedy, VERIFIERS, torch.Generator()) is None
