"""Ranks of tokens under the draft, of which shapes by rank are made.

All nodes of a shape are certain given the text, so the draft's probabilities play no part in
verification (`data_gen.verification.CERTAIN`).

Legend: N tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

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
