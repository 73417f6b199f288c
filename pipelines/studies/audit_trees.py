"""The yield of every verifier at one root of a text: block efficiencies on drafted trees, and acceptance at the root.

Legend: T tokens of a text from its first root on, N tree nodes, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from data_gen.drafting.sampled import draft_topology, draft_tree, draw_children
from data_gen.models.pair import CachedModel, ModelPair
from data_gen.models.sampling import Sampling
from data_gen.texts.written import Text
from data_gen.trees import DraftTree, Topology
from data_gen.verification import get_verifier, optimal_acceptance
from data_gen.verification.base import GREEDY, IID, WITHOUT_REPLACEMENT
from selector.actions import Action

TREE = Action(4, 0, 8)
MOST_TOKENS = 1 << 14  # `alpha*` without replacement is computed token by token, which takes seconds beyond this
DRAWS = 8  # child lists for each node, over which acceptance is averaged
STYLED = {WITHOUT_REPLACEMENT: ("specinfer", "naive_tree", "traversal"), GREEDY: ("greedy",)}


@dataclass(frozen=True)
class Drafts:
    """One way to draft, and the verifiers to compare on its trees.

    Attributes:
        style: how siblings are drawn.
        heat: the draft's temperature as a multiple of the target's.
        topology: the tree's shape; `TREE` if None.
    """

    name: str
    verifiers: tuple[str, ...]
    style: str = IID
    heat: float = 1.0
    topology: Topology | None = None


class RootedText:
    """A text, both models' caches over it, and their rows along it; root r is the text's token `start + r`."""

    @torch.inference_mode()
    def __init__(self, pair: ModelPair, text: Text, sampling: Sampling) -> None:
        self.text, self.sampling = text, sampling
        self.target, self.draft = CachedModel(pair.target), CachedModel(pair.draft)
        target_logits_TV, self.draft_logits_TV = (_from_start(model, text) for model in (self.target, self.draft))
        self.target_probs_TV = sampling.probabilities(target_logits_TV)
        self.draft_probs_TV = sampling.draft.probabilities(self.draft_logits_TV)

    def target_probs(self, tree: DraftTree, root: int) -> Tensor:
        """The target's distributions after every node of a tree, in one pass, [N, V]."""
        tokens_N = tree.tokens_N.clone()
        tokens_N[0] = self.text.tokens[self.text.start + root]
        device = self.target.model.device
        target = self.target.prefix(self.text.start + root)
        passed = target.forward(tokens_N.unsqueeze(0).to(device), tree.depths_N.to(device), tree.ancestors_NN())
        target.check()
        return self.sampling.probabilities(passed.logits_BWV[0])

    def drafted(self, root: int, drafts: Drafts, generator: torch.Generator) -> tuple[DraftTree, Tensor]:
        """One drafted tree, and the draft's distributions after its nodes, [N, V]."""
        own = self.sampling.draft
        sampling = replace(own, temperature=own.temperature * drafts.heat)
        root_V = sampling.probabilities(self.draft_logits_TV[root])
        draft = self.draft.prefix(self.text.start + root + 1)
        if drafts.topology is not None:
            return draft_topology(draft, root_V, drafts.topology, sampling, generator, drafts.style)
        result = draft_tree(draft, root_V, TREE, sampling, generator, drafts.style)
        return result.tree, result.probs_NV

    @torch.inference_mode()
    def efficiencies(self, root: int, drafts: Drafts, generator: torch.Generator) -> dict[str, float]:
        """Block efficiency by verifier, exact given one drafted tree."""
        tree, q_NV = self.drafted(root, drafts, generator)
        p_NV = self.target_probs(tree, root)
        return {name: get_verifier(name, drafts.style).block_efficiency(tree, p_NV, q_NV) for name in drafts.verifiers}


def _from_start(model: CachedModel, text: Text) -> Tensor:
    """Logits after the text's tokens from `start` on, [T, V]; the whole text is then cached."""
    if text.start > 0:
        model.fill(text.tokens[: text.start])
    logits_TV = model.extend(text.tokens[text.start :]).logits_BWV[0]
    model.check()
    return logits_TV


@torch.inference_mode()
def acceptances(
    p_V: Tensor, q_V: Tensor, verifiers: tuple[str, ...], generator: torch.Generator
) -> list[tuple[str, int, str, float]]:
    """(style, children, verifier, acceptance) at one node: a mean over drawn children, exact given them.

    The verifier "optimum" has `alpha*`.
    """
    result = []
    for style, names in ((IID, verifiers), *STYLED.items()):
        for k in range(2 if style == GREEDY else 1, TREE.K + 1):
            drawn = [draw_children(q_V, k, style, generator) for _ in range(DRAWS)]
            trees = [DraftTree.from_paths([], [[token] for token in tokens]) for tokens in drawn]
            for name in names:
                verifier = get_verifier(name, style)
                stops = [verifier.stops(t, p_V.expand(len(t), -1), q_V.expand(len(t), -1))[0] for t in trees]
                result.append((style, k, name, 1 - float(torch.stack(stops).mean())))
            if style != WITHOUT_REPLACEMENT or int((q_V > 0).sum()) <= MOST_TOKENS:
                result.append((style, k, "optimum", optimal_acceptance(p_V, q_V, k, style)))
    return result
