"""Tokens of a text that the target cannot have sampled, and whether rounding explains them.

Forward passes over one token, many tokens and many texts differ in their last digits, so that a
text which the target wrote may hold a token of probability 0 at a tie.

Legend: B consecutive positions, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from data_gen.models.pair import ModelRows
from data_gen.models.sampling import Sampling, probabilities

# in float32 the logits of two forward passes that sum in different orders may differ by this much
SUMS = 1e-4
# of floating-point numbers at the best logit: rounding may move each of two logits by two
SPACINGS = 4
PASSES = 4  # ties by which two forward passes may differ, where one is over a batch


class ImpossibleToken(Exception):
    """A token of a text has probability 0 under the target; `at_a_tie` says whether rounding
    explains it."""

    def __init__(self, position: int, token: int, at_a_tie: bool) -> None:
        super().__init__(
            f"token {position} of the text ({token}) has probability 0 under the target"
        )
        self.position = position
        self.at_a_tie = at_a_tie


def check_possible(
    target: ModelRows, begin: int, following: Sequence[int], sampling: Sampling
) -> None:
    """ImpossibleToken for the first token of probability 0 among those that follow the rows of
    `target`, from position `begin` of the text on."""
    rows_BV = target.probs_NV[: len(following)]
    next_B1 = torch.tensor(following, dtype=torch.int64, device=rows_BV.device).unsqueeze(-1)
    impossible_B = rows_BV.gather(-1, next_B1)[:, 0] <= 0
    if bool(impossible_B.any()):
        at = int(impossible_B.nonzero()[0])
        edge = _at_the_edge(target.logits_NV[at], following[at], sampling)
        raise ImpossibleToken(begin + at, following[at], edge)


def tie(best: float, dtype: torch.dtype) -> float:
    """The largest difference of two logits that rounding explains, given the best logit and the
    dtype: 0.5 between 16 and 32 in bfloat16, whose numbers lie 0.125 apart there."""
    spacing = torch.finfo(dtype).eps * 2.0 ** (math.frexp(best)[1] - 1)
    return max(SUMS, SPACINGS * spacing)


def _at_the_edge(logits_V: Tensor, token: int, sampling: Sampling) -> bool:
    """Whether the token would be possible if its logit, and the nucleus, were a little larger."""
    edge = 1e-3
    if logits_V.dtype != torch.float32:
        edge = 32 * float(torch.finfo(logits_V.dtype).eps)
    # a batch and a text alone differ at large logits; a GPU adds up bfloat16 in parts, which are
    # rounded, too
    edge = max(edge, PASSES * tie(float(logits_V.max()), logits_V.dtype))
    raised_V = logits_V.float().clone()
    raised_V[token] += edge
    wider = replace(sampling, top_p=min(1.0, sampling.top_p + edge))
    return bool(probabilities(raised_V, wider)[token] > 0)
