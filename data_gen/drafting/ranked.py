"""Shapes by rank, drafted: each node is its parent's next token of a certain rank under the draft.

A shape takes one forward pass of the draft for each level that has children; a lookup in the same
tree takes none, and where both begin alike they share nodes. All nodes are certain given the text,
so the draft's probabilities play no part in verification (`data_gen.verification.CERTAIN`).

Legend: N tokens or nodes, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from data_gen.drafting.sampled import Draft, Levels
from data_gen.models.pair import CachedModel
from data_gen.models.sampling import Sampling
from data_gen.trees import DraftTree
from selector.actions import Action, Ranks

LOWEST_RANK = 255  # of tokens that rank so low or lower, and of those that the draft cannot write
# Equal logits, which are common in bfloat16, are ranked by token id: so much is taken off a logit
# for each id.
STEP = 1e-12


def ranks_of(logits_NV: Tensor, tokens: Sequence[int]) -> list[int]:
    """The rank of one token in each of the first rows of logits: how many tokens come before it."""
    ranking_NV = ranking(logits_NV[: len(tokens)])
    token_N1 = torch.tensor(tokens, dtype=torch.int64, device=logits_NV.device).unsqueeze(-1)
    logit_N1 = ranking_NV.gather(-1, token_N1)
    rank_N = (ranking_NV > logit_N1).sum(-1)
    can_write_N = logit_N1[:, 0] > -torch.inf
    lowest = torch.full_like(rank_N, LOWEST_RANK)
    ranks: list[int] = torch.where(can_write_N, rank_N, lowest).clamp(max=LOWEST_RANK).tolist()
    return ranks


def most_likely(logits_V: Tensor, count: int) -> list[int]:
    """The tokens of the ranks 0, 1, .., `count - 1`; fewer where the draft can write fewer."""
    best = ranking(logits_V).topk(min(count, len(logits_V)))
    tokens: list[int] = best.indices[best.values > -torch.inf].tolist()
    return tokens


def ranking(logits_NV: Tensor) -> Tensor:
    """Distinct numbers, but for minus infinity, in the order of the logits; float64."""
    ids_V = torch.arange(logits_NV.shape[-1], dtype=torch.float64, device=logits_NV.device)
    return logits_NV.double() - STEP * ids_V


def draft_certain(
    draft: CachedModel,
    root_logits_V: Tensor | None,
    action: Action,
    sampling: Sampling,
    proposal: Sequence[int] = (),
    text: Sequence[int] = (),
) -> Draft:
    """Draft a shape by rank, a lookup, or both in one tree. The rows of nodes that have children in
    the shape are appended to the draft's KV cache, which ends with the root. Nodes are left out
    where the draft can write fewer tokens than there are ranks.

    Args:
        root_logits_V: the draft's logits after the root; None for a lookup.
        sampling: of the draft, whose distributions are kept for the features.
        proposal: the copied tokens (`LookupIndex.proposal`).
        text: the committed tokens, for a sampling that depends on them.
    """
    tree = DraftTree()
    levels = Levels(draft, tree, sampling, text)
    node_of: dict[tuple[int, ...], int] = {(): 0}
    logits_of: dict[int, Tensor] = {}
    if root_logits_V is not None:
        logits_of[0] = root_logits_V
    for children_of in _levels(action.ranks):
        parents = [path for path in children_of if path in node_of]
        inner = [node_of[path] for path in parents if path]
        if inner:
            rows = levels.extend(inner)
            logits_of = {node: row.logits_V for node, row in zip(inner, rows, strict=True)}
        for path in parents:
            likely = most_likely(logits_of[node_of[path]], children_of[path][-1] + 1)
            for rank in children_of[path]:
                if rank < len(likely):
                    node_of[*path, rank] = tree.add(node_of[path], likely[rank])
    node = 0
    for token in proposal:
        node = tree.add(node, token)
    return Draft(tree, torch.zeros(0), levels.row_of, levels.passed)


@cache
def _levels(ranks: Ranks) -> list[dict[tuple[int, ...], list[int]]]:
    """By depth, the ranks of each node's children, ascending."""
    levels: list[dict[tuple[int, ...], list[int]]] = []
    for path in ranks:
        while len(levels) < len(path):
            levels.append({})
        levels[len(path) - 1].setdefault(path[:-1], []).append(path[-1])
    return levels
