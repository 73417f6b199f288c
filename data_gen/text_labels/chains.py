"""Chains along a text, for which p and q of the text's own tokens are all that is needed.

A draft of t tokens is the text with probability `prod q`, where the text had `prod p`. Top-down it
is then accepted with `prod min(1, p/q)`. Bottom-up the entry weights are `w <- min(1, w p/q)`, and
`w_t prod q/p` is the smallest of 1 and the running products of q/p.

Legend: T positions of a text, D depths.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from data_gen.verification.base import BottomUp, TopDown
from data_gen.verification.distributions import divide


def tokens_ahead(probs_T: Tensor, depth: int) -> Tensor:
    """The probabilities of the `depth` tokens after each position, [T, D]; 0 beyond the text."""
    return pad(probs_T, (0, depth)).unfold(0, depth, 1)[: len(probs_T)]


def running_products(factors_TD: Tensor) -> Tensor:
    """Products of the first 0, 1, .., D factors, [T, D + 1]."""
    return pad(factors_TD.cumprod(-1), (1, 0), value=1.0)


def entry_weights(p_TD: Tensor, q_TD: Tensor) -> Tensor:
    """The entry weights after 0, 1, .., D drafted tokens, `w <- min(1, w p/q)`; [T, D + 1]."""
    weights = [p_TD.new_ones(len(p_TD))]
    for ratio_T in divide(p_TD, q_TD).unbind(-1):
        weights.append((weights[-1] * ratio_T).clamp(max=1))
    return torch.stack(weights, dim=-1)


def acceptances(verifier: TopDown | BottomUp, p_TD: Tensor, q_TD: Tensor) -> Tensor:
    """P(a chain along the text is accepted, if it is drafted) by its length, [T, D + 1]."""
    if isinstance(verifier, TopDown):
        return running_products(verifier.accept(p_TD, q_TD))
    return entry_weights(p_TD, q_TD)
