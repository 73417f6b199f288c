"""Samples trees from the draft.

A delayed tree takes `L1 + L2` forward passes, that over the root included: a node's token is
sampled from its parent's next-token distribution, so leaves need none. Branches are drafted side by
side and merged afterwards.

Legend: N tree nodes, W tokens of one forward pass, R rows of the draft's KV cache, K branches, V
    vocabulary, D depth.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from data_gen.models.pair import CachedModel, ModelRow
from data_gen.models.sampling import Sampling
from data_gen.trees import DraftTree
from data_gen.verification.distributions import most_likely, sample
from selector.actions import GREEDY, IID, Action, ActionSpace

EVERY = 8  # tokens between two roots at which branches are compared


@dataclass
class Draft:
    """A drafted tree and the draft's outputs at its nodes."""

    tree: DraftTree
    probs_NV: Tensor  # the draft's distribution after each node; zeros at leaves
    row_of: dict[int, int]  # row in the draft's KV cache of each node that has one, except the root
    _passed: list[ModelRow]  # by row

    def rows(self, nodes: Iterable[int]) -> list[ModelRow]:
        return [self._passed[self.row_of[node]] for node in nodes]


def draft_tree(
    draft: CachedModel,
    root_probs_V: Tensor,
    action: Action,
    sampling: Sampling,
    generator: torch.Generator,
    style: str = IID,
    text: Sequence[int] = (),
    root_logits_V: Tensor | None = None,
) -> Draft:
    """Draft a delayed tree; `draw_children` samples the first tokens of its branches.

    The draft's KV cache ends with the root, after which the draft has the given probabilities and
    logits; the tree's rows are appended to it. `text` holds the committed tokens, for a sampling
    that depends on them.
    """
    # a chain is a trunk alone
    L1, L2 = (action.L1 + action.L2, 0) if action.K == 1 else (action.L1, action.L2)
    trunk: list[int] = []
    passed: list[ModelRow] = []

    def extend(tokens_W: Tensor, visible_WR: Tensor, texts: list[list[int]]) -> None:
        offsets_W = torch.full((len(tokens_W),), len(texts[0]) - 1)
        rows = draft.forward(tokens_W, offsets_W, visible_WR).rows(
            sampling, lambda: [[*text, *path] for path in texts]
        )
        passed.extend(rows.each())

    while len(trunk) < L1:
        trunk.append(int(sample(passed[-1].probs_V if passed else root_probs_V, 1, generator)))
        if len(trunk) < L1 or L2 > 0:
            extend(torch.tensor(trunk[-1:]), torch.ones(1, len(trunk), dtype=torch.bool), [trunk])
    branches_KD = torch.zeros(1, 0, dtype=torch.int64)
    if L2 > 0:
        ends = (
            (passed[-1].probs_V, passed[-1].logits_V) if passed else (root_probs_V, root_logits_V)
        )
        branches_KD = torch.tensor(
            draw_children(ends[0], action.K, style, generator, ends[1])
        ).unsqueeze(-1)
    K = len(branches_KD)
    for depth in range(1, L2):
        extend(
            branches_KD[:, -1],
            _visible(L1, K, depth),
            [[*trunk, *branch] for branch in branches_KD.tolist()],
        )
        drawn_K1 = sample(torch.stack([row.probs_V for row in passed[-K:]]), 1, generator).cpu()
        branches_KD = torch.cat([branches_KD, drawn_K1], dim=-1)
    tree = DraftTree.from_paths(trunk, branches_KD.tolist())
    row_of = _rows_of(tree, L1, K)
    probs_NV = root_probs_V.new_zeros(len(tree), len(root_probs_V))
    probs_NV[0] = root_probs_V
    if row_of:
        probs_NV[list(row_of)] = torch.stack([passed[row].probs_V for row in row_of.values()])
    return Draft(tree, probs_NV, row_of, passed)


@torch.inference_mode()
def distinct_nodes(
    model: PreTrainedModel, texts: Sequence[tuple[list[int], int]], sampling: Sampling, seed: int
) -> list[list[float]]:
    """The mean number of distinct nodes that K branches of a draft have at each of their depths,
    for K from 2 on.

    `texts` are token ids and the position of the first root; branches are drafted at every
    `EVERY`-th one from it.
    """
    space, counts = ActionSpace.default(), []
    generator = torch.Generator(device=model.device).manual_seed(seed)
    for tokens, start in texts:
        draft = CachedModel(model)
        for root in range(start, len(tokens), EVERY):
            draft.fill(tokens[draft.committed : root])
            (probs_V,) = sampling.probabilities(draft.extend(tokens[root : root + 1]).logits_WV)
            drafted = draft_tree(
                draft, probs_V, Action(space.max_K, 0, space.max_L2), sampling, generator
            )
            draft.keep([])
            levels = list(zip(*drafted.tree.branch_nodes, strict=True))[1:]
            counts.append(
                [[len({*level[:K]}) for level in levels] for K in range(2, space.max_K + 1)]
            )
    means: list[list[float]] = torch.tensor(counts, dtype=torch.float64).mean(0).tolist()
    return means


def draft_lookup(proposal: Sequence[int], vocabulary: int, device: torch.device) -> Draft:
    """A chain that is copied from the text, by `LookupIndex.proposal`. Its tokens have draft
    probability 1, so each is accepted with its target probability."""
    tree = DraftTree.from_paths(list(proposal), [[]])
    probs_NV = torch.zeros(len(tree), vocabulary, device=device)
    probs_NV[range(len(proposal)), list(proposal)] = 1
    return Draft(tree, probs_NV, {}, [])


def draw_children(
    probs_V: Tensor,
    count: int,
    style: str,
    generator: torch.Generator,
    logits_V: Tensor | None = None,
) -> list[int]:
    """Tokens of a node's children, in order; fewer than `count` where distinct children run out of
    support and no logits rank the tokens of probability 0.

    The style is "iid"; "without_replacement", one draw after another; or "greedy", the `count - 1`
    most likely tokens and one draw from the others, or the next most likely one by the logits where
    the others have probability 0.
    """
    if style == IID:
        return sample(probs_V, count, generator).tolist()
    left_V = probs_V.clone()
    if style == GREEDY:
        likely = most_likely(probs_V, count, logits_V).tolist()
        if logits_V is None:
            likely = [token for token in likely if probs_V[token] > 0]
        left_V[likely[: count - 1]] = 0
        last = (
            sample(left_V, 1, generator).tolist()
            if bool((left_V > 0).any())
            else likely[count - 1 :]
        )
        return likely[: count - 1] + last
    tokens: list[int] = []
    while len(tokens) < count and bool((left_V > 0).any()):
        tokens.append(int(sample(left_V, 1, generator)))
        left_V[tokens[-1]] = 0
    return tokens


@cache
def _visible(L1: int, K: int, depth: int) -> Tensor:
    trunk = torch.ones(K, L1, dtype=torch.bool)
    return torch.cat([trunk, torch.eye(K, dtype=torch.bool).repeat(1, depth)], dim=1)


def _rows_of(tree: DraftTree, L1: int, K: int) -> dict[int, int]:
    trunk = tree.path_to(tree.branch_nodes[0][0])
    rows = {node: row for row, node in enumerate(trunk)}
    for k, nodes in enumerate(tree.branch_nodes):
        for depth, node in enumerate(nodes[1:-1]):
            rows.setdefault(node, L1 + depth * K + k)
    if len(tree.branch_nodes[0]) == 1 and trunk:
        del rows[trunk[-1]]  # a bare trunk ends in a leaf
    return rows
