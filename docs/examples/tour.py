"""A first tour: draft a tree with the pair that comes with Espalier, verify it, and see that the
text keeps the target's distribution.

    .venv/bin/python docs/examples/tour.py

Legend: N nodes of a tree, V vocabulary.
"""

from itertools import product

import torch

from data_gen import (
    CachedModel,
    DraftTree,
    ModelPair,
    draft_tree,
    get_verifier,
    probabilities,
)
from selector import Action, Sampling

pair = ModelPair.load("smollm2", "pipelines/pair/shipped/draft", device="cpu")
sampling = Sampling(temperature=1.0, top_k=3)  # so few tokens that all drafts can be listed below
verifier = get_verifier("traversal")
generator = torch.Generator().manual_seed(2)
turn = {"role": "user", "content": "Give three tips for staying healthy."}
text = pair.tokenizer.apply_chat_template([turn], add_generation_prompt=True, tokenize=False)
*prompt, root = pair.tokenizer.encode(f"{text}Here are three tips")

# The draft model proposes a tree: one token, then two branches of two tokens each.
draft = CachedModel(pair.draft)
draft.fill(prompt)
draft_probs_V = probabilities(draft.extend([root]).logits_WV[-1], sampling)
drafted = draft_tree(draft, draft_probs_V, Action(K=2, L1=1, L2=2), sampling, generator)
tree = drafted.tree
for node in range(1, len(tree)):
    indent = "  " * int(tree.depths_N[node] - 1)
    print(indent + repr(pair.tokenizer.decode([tree.token(node)])))

# One forward pass of the target gives its distribution after every node of the tree.
target = CachedModel(pair.target)
target.fill(prompt)
tokens_N = tree.tokens_N.clone()
tokens_N[0] = root
output = target.forward(tokens_N, tree.depths_N, tree.ancestors_NN())
target_probs_NV = probabilities(output.logits_WV, sampling)

# The verifier accepts a path of the tree, and adds one token.
expected = verifier.block_efficiency(tree, target_probs_NV, drafted.probs_NV)
last_node, added = verifier.verify(tree, target_probs_NV, drafted.probs_NV, generator)
accepted = [tree.token(node) for node in tree.path_to(last_node)]
print(f"expected: {expected:.2f} tokens")
print("accepted:", repr(pair.tokenizer.decode(accepted)))
print("added:", repr(pair.tokenizer.decode([added])))

# The law of a verifier is exact. Summed over all drafts, here of two tokens side by side, the next
# token of the text has the target's probability, whatever the draft model proposes.
target_probs_V = target_probs_NV[0].double()
draft_probs_V = draft_probs_V.double()
next_probs_V = torch.zeros_like(target_probs_V)
for first, second in product(draft_probs_V.nonzero().flatten().tolist(), repeat=2):
    tree = DraftTree.from_paths(trunk=[], branches=[[first], [second]])
    rows = [probs_V.expand(len(tree), -1) for probs_V in (target_probs_V, draft_probs_V)]
    law_NV = draft_probs_V[first] * draft_probs_V[second] * verifier.law(tree, *rows)
    next_probs_V += law_NV[0]  # nothing is accepted, and the verifier's own token comes next
    for node in range(1, len(tree)):
        next_probs_V[tree.token(node)] += law_NV[node].sum()
for token in target_probs_V.nonzero().flatten().tolist():
    word = pair.tokenizer.decode([token])
    print(f"{word!r}: target {target_probs_V[token]:.6f}, law {next_probs_V[token]:.6f}")

# It prints:
#
#     ' for'
#       ' a'
#       ' planning'
#         ' simple'
#         ' and'
#     expected: 1.74 tokens
#     accepted: ' for'
#     added: ' staying'
#     ' to': target 0.434634, law 0.434634
#     ' for': target 0.360078, law 0.360078
#     ' that': target 0.205288, law 0.205288
