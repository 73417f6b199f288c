"""A new verifier, and the check that it keeps the target's distribution.

    .venv/bin/python docs/examples/new_verifier.py

The verifier is rejection sampling of a node's first child: it accepts the child's token x with
probability min(1, p(x) / q(x)), and otherwise draws a token from (p - q)+, normalised. A careless
variant draws from p instead, which is a common mistake.

Legend: M nodes at once, k children of each, N nodes of a tree, V vocabulary.
"""

from itertools import product

import torch
from torch import Tensor

from data_gen.trees import DraftTree
from data_gen.verification import get_verifier
from data_gen.verification.base import TopDown
from data_gen.verification.checking import check_law
from data_gen.verification.distributions import NodeDistributions


class FirstChild(TopDown):
    name = "first_child"

    def branching(self, node: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        """The probability that each child is accepted, [M, k]: only the first one can be."""
        accepted_Mk = self.accept(*node.at(entries_Mk))
        accepted_Mk[:, 1:] = 0
        return accepted_Mk

    def leftover(self, node: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        """What is drawn where no child is accepted, [M, V] up to a factor: (p - q)+."""
        return node.residual(node.ones(), node.ones())


class Careless(FirstChild):
    name = "careless"

    def leftover(self, node: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        return node.residual(node.ones(), 0 * node.ones())  # (p - 0)+ = p


# The check lists all drafts of small models, so it is exact: nothing is left to chance.
for mine in (FirstChild(), Careless()):
    fault = check_law(mine.law, "iid")
    print(f"{mine.name}: {fault or 'keeps the distribution of the target'}")

# A right verifier may still accept little. These are the expected tokens of a step in which two
# tokens are drafted side by side, over all such drafts.
torch.manual_seed(0)
target_probs_V, draft_probs_V = torch.randn(2, 8).softmax(-1)
for verifier in (FirstChild(), get_verifier("specinfer"), get_verifier("traversal")):
    expected = 0.0
    for first, second in product(range(8), repeat=2):
        tree = DraftTree.from_paths(trunk=[], branches=[[first], [second]])
        rows = [probs_V.expand(len(tree), -1) for probs_V in (target_probs_V, draft_probs_V)]
        probability = float(draft_probs_V[first] * draft_probs_V[second])
        expected += probability * verifier.block_efficiency(tree, *rows)
    print(f"{verifier.name}: {expected:.4f} tokens")

# It prints:
#
#     first_child: keeps the distribution of the target
#     careless: wrong on trees (K, L1, L2) = (1, 1, 0) of style iid over 2 tokens: the
#     text (0, 0) has probability 0.5528004763, the target gives it 0.5733562198
#     for example the tree with the branches (0,):
#       node 0, token -1: p = (0.9037, 0.0963), q = (0.5673, 0.4327)
#       node 1, token 0: p = (0.6345, 0.3655), q = (0.3118, 0.6882)
#     first_child: 1.7366 tokens
#     specinfer: 1.7728 tokens
#     traversal: 1.7728 tokens
