"""A new verifier, and the check that it keeps the target's distribution.

    .venv/bin/python docs/examples/new_verifier.py

It tries one branch alone. From the root on, it accepts the next token x of the branch with
probability min(1, p(x) / q(x)). At the first token that it rejects, it adds one drawn from
(p - q)+, normalised. A careless variant draws that one from p, which is a common mistake.

Legend: N nodes of a tree, V vocabulary.
"""

from itertools import product

import torch
from torch import Tensor

from data_gen import DraftTree, check_verifier, get_verifier


def first_branch(tree: DraftTree, target_probs_NV: Tensor, draft_probs_NV: Tensor) -> Tensor:
    """The law of the verifier: P(last accepted node, added token), [N, V]."""
    law_NV = torch.zeros_like(target_probs_NV)
    node = 0
    reached = 1.0  # P(all tokens up to the node are accepted)
    while children := tree.children(node):
        p_V = target_probs_NV[node]
        q_V = draft_probs_NV[node]
        token = tree.token(children[0])
        accepted = min(1.0, float(p_V[token] / q_V[token]))
        if accepted < 1:
            left_V = (p_V - q_V).clamp(min=0)
            law_NV[node] = reached * (1 - accepted) * left_V / left_V.sum()
        node = children[0]
        reached *= accepted
    law_NV[node] = reached * target_probs_NV[node]
    return law_NV


def careless(tree: DraftTree, target_probs_NV: Tensor, draft_probs_NV: Tensor) -> Tensor:
    law_NV = first_branch(tree, target_probs_NV, draft_probs_NV)
    return law_NV.sum(-1, keepdim=True) * target_probs_NV


# The check lists all drafts of small models, so it is exact: nothing is left to chance.
for law in (first_branch, careless):
    fault = check_verifier(law)
    print(f"{law.__name__}: {fault or 'keeps the distribution of the target'}")

# A right verifier may still accept little. These are the expected tokens of a step in which two
# tokens are drafted side by side, over all such drafts.
torch.manual_seed(0)
target_probs_V, draft_probs_V = torch.randn(2, 8).softmax(-1)
laws = {"first_branch": first_branch}
laws |= {name: get_verifier(name).law for name in ("specinfer", "traversal")}
for name, law in laws.items():
    expected = 0.0
    for first, second in product(range(8), repeat=2):
        tree = DraftTree.from_paths(trunk=[], branches=[[first], [second]])
        target_probs_NV = target_probs_V.expand(len(tree), -1)
        draft_probs_NV = draft_probs_V.expand(len(tree), -1)
        stops_N = law(tree, target_probs_NV, draft_probs_NV).sum(-1)  # P(last accepted node)
        tokens = float((stops_N * (tree.depths_N + 1)).sum())
        expected += float(draft_probs_V[first] * draft_probs_V[second]) * tokens
    print(f"{name}: {expected:.4f} tokens")

# It prints:
#
#     first_branch: keeps the distribution of the target
#     careless: wrong on trees (K, L1, L2) = (1, 1, 0) of style iid over 2 tokens: the
#     text (0, 0) has probability 0.5528004763, the target gives it 0.5733562198
#     for example the tree with the branches (0,):
#       node 0, token -1: p = (0.9037, 0.0963), q = (0.5673, 0.4327)
#       node 1, token 0: p = (0.6345, 0.3655), q = (0.3118, 0.6882)
#     first_branch: 1.7366 tokens
#     specinfer: 1.7728 tokens
#     traversal: 1.7728 tokens
