"""What every verifier yields at the roots of one text: the measurements behind `make audit`.

Verifiers are compared by labels along the text (`text_labels`), which need no drafted tree. Other ways to draft have no
such labels: their trees are really drafted at the same roots, and measured exactly given the tree.

Legend: T tokens of a text from its first root on, R roots, S survivals, D depths, A actions, N nodes, V vocabulary,
M nodes whose children are drawn together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from data_gen.drafting.sampled import draft_topology, draft_tree, draw_children
from data_gen.models.pair import CachedModel, ModelPair
from data_gen.models.sampling import Sampling
from data_gen.text_labels.labels import TextLabeller, blocks
from data_gen.texts.written import Text
from data_gen.trees import DraftTree, Topology
from data_gen.verification import VERIFIERS, get_verifier, optimal_acceptance
from data_gen.verification.base import GREEDY, IID, WITHOUT_REPLACEMENT
from selector.actions import Action, ActionSpace

MOST_TOKENS = 1 << 14  # `alpha*` without replacement goes token by token: seconds a node beyond
DRAWS = 8  # child lists per node
SIBLINGS = 2  # draws of them per root: much of a label's noise is theirs, but rules that sort take a time for each
RULES = {IID: tuple(VERIFIERS), WITHOUT_REPLACEMENT: ("specinfer", "naive_tree", "traversal"), GREEDY: ("greedy",)}


@dataclass(frozen=True)
class Variant:
    """Another way to draft: a branching style, a draft temperature (as a multiple of the target's), or a shape."""

    name: str
    verifiers: tuple[str, ...]
    style: str = IID
    heat: float = 1.0
    topology: Topology | None = None


class RootedText:
    """A text with both models' caches over it, and their rows along it: what can be measured at its roots.

    Root r is the text's token `start + r`. As many tokens follow it as the deepest tree has levels.

    Attributes:
        tokens_T: the text from `start` on; row t of the tensors below is what a model says after token t.
        roots: how many roots the text has; 0 if it is too short.
    """

    @torch.inference_mode()
    def __init__(self, pair: ModelPair, text: Text, sampling: Sampling) -> None:
        self.start, self.sampling = text.start, sampling
        self.target, self.draft = CachedModel(pair.target), CachedModel(pair.draft)
        target_logits_TV, self.draft_logits_TV = (_from_start(model, text) for model in (self.target, self.draft))
        self.target_probs_TV = sampling.probabilities(target_logits_TV)
        self.draft_probs_TV = sampling.draft.probabilities(self.draft_logits_TV)
        self.tokens_T = torch.tensor(text.tokens[text.start :])
        self._cut()
        self.roots = max(0, len(self.tokens_T) - ActionSpace.default().depth)

    def _cut(self) -> None:
        """End the text before a token that the target here gives probability 0.

        The text was written in a batch, which rounds otherwise: at the edge of a nucleus, that can decide.
        """
        next_T1 = self.tokens_T[1:, None].to(self.target_probs_TV.device)
        possible_T = self.target_probs_TV[:-1].gather(-1, next_T1)[:, 0] > 0
        length = 1 + int(possible_T.long().cumprod(0).sum())
        self.tokens_T = self.tokens_T[:length]
        self.target_probs_TV, self.draft_probs_TV = self.target_probs_TV[:length], self.draft_probs_TV[:length]

    @torch.inference_mode()
    def survivals(self, verifiers: Sequence[str], generator: torch.Generator) -> Tensor:
        """`P(tau >= t | text)` at every root, float64 [verifier, R, S], in the order of `ActionSpace.survivals`."""
        labeller = TextLabeller(self.tokens_T, verifiers, SIBLINGS, generator)
        for rows in blocks(self.target_probs_TV, self.draft_probs_TV):
            labeller.add(*rows)
        return labeller.survivals().cpu()

    def distances(self) -> Tensor:
        """L1 distance of the models' rows at every root and along the tokens that follow, float64 [R, D]."""
        distance_T = (self.target_probs_TV - self.draft_probs_TV).abs().sum(-1, dtype=torch.float64)
        return distance_T[:-1].unfold(0, ActionSpace.default().depth, 1).cpu()

    def target_probs(self, tree: DraftTree, root: int) -> Tensor:
        """The target's distributions after every node of a tree, in one pass, [N, V]."""
        tokens_N = tree.tokens_N.clone()
        tokens_N[0] = self.tokens_T[root]
        device = self.target.model.device
        target = self.target.prefix(self.start + root)
        passed = target.forward(tokens_N.unsqueeze(0).to(device), tree.depths_N.to(device), tree.ancestors_NN())
        target.check()
        return self.sampling.probabilities(passed.logits_BWV[0])

    def drafted(
        self, root: int, variant: Variant, action: Action, generator: torch.Generator
    ) -> tuple[DraftTree, Tensor]:
        """One tree of a variant, of `action`'s shape unless it has its own; and the draft's rows after it, [N, V]."""
        own = self.sampling.draft
        sampling = replace(own, temperature=own.temperature * variant.heat)
        root_V = sampling.probabilities(self.draft_logits_TV[root])
        draft = self.draft.prefix(self.start + root + 1)
        if variant.topology is not None:
            return draft_topology(draft, root_V, variant.topology, sampling, generator, variant.style)
        result = draft_tree(draft, root_V, action, sampling, generator, variant.style)
        return result.tree, result.probs_NV


def _from_start(model: CachedModel, text: Text) -> Tensor:
    """Logits after the text's tokens from `start` on, [T, V]; the cache then holds the whole text."""
    if text.start > 0:
        model.fill(text.tokens[: text.start])
    logits_TV = model.extend(text.tokens[text.start :]).logits_BWV[0]
    model.check()
    return logits_TV


@torch.inference_mode()
def variant_efficiencies(
    text: RootedText, root: int, variant: Variant, action: Action, generator: torch.Generator
) -> dict[str, float]:
    """Block efficiency by verifier, exact given one tree of a variant."""
    tree, q_NV = text.drafted(root, variant, action, generator)
    p_NV = text.target_probs(tree, root)
    return {name: get_verifier(name, variant.style).block_efficiency(tree, p_NV, q_NV) for name in variant.verifiers}


def acceptances(p_V: Tensor, q_V: Tensor, generator: torch.Generator) -> dict[tuple[str, int, str], float]:
    """Acceptance at one node by (style, k, verifier), a mean over drawn children; "optimum" is `alpha*`."""
    result: dict[tuple[str, int, str], float] = {}
    for style, names in RULES.items():
        for k in range(2 if style == GREEDY else 1, ActionSpace.default().max_K + 1):
            if style != WITHOUT_REPLACEMENT or int((q_V > 0).sum()) <= MOST_TOKENS:
                result[style, k, "optimum"] = optimal_acceptance(p_V, q_V, k, style)
            lists = [draw_children(q_V, k, style, generator) for _ in range(DRAWS)]
            trees = [DraftTree.from_paths([], [[token] for token in tokens]) for tokens in lists]
            for name in names:
                verifier = get_verifier(name, style)
                stops = [verifier.stops(t, p_V.expand(len(t), -1), q_V.expand(len(t), -1))[0] for t in trees]
                result[style, k, name] = 1 - float(torch.stack(stops).mean())
    return result
