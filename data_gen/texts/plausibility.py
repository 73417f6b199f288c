"""Checks whether a text may be the target's own, by its impossible and its unlikely tokens.

Legend: B consecutive rows of a model, V vocabulary, N consecutive tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from data_gen.models.pair import ModelRows
from data_gen.models.sampling import Sampling

UNLIKELY = 1e-3  # less probable tokens are counted: a text of another model or sampling setting has too many
SUMS = 1e-4  # the logits of two passes that add the same numbers in another order may differ by so much, in float32
SPACINGS = 4  # of neighbouring numbers at the best logit: rounding may move each of two logits by two of them
FALSE_ALARMS = 1e-6  # the share of the target's own logs that are taken for foreign ones, at most


class ImpossibleToken(Exception):
    """A token of a text has probability 0 under the target. `at_a_tie` says whether rounding explains it: passes over
    one token, many tokens and many texts differ in their last digits."""

    def __init__(self, position: int, token: int, at_a_tie: bool) -> None:
        super().__init__(f"token {position} of the text ({token}) has probability 0 under the target")
        self.position, self.at_a_tie = position, at_a_tie


@dataclass
class Plausibility:
    """How many tokens of some texts were unlikely, and how many are expected to be.

    Under the target's own law, a token is unlikely with a probability m that its row gives. Let u be 1 for unlikely
    tokens and 0 for others. The products over all tokens of exp(u) / (1 + (exp(1) - 1) m) and of
    exp(-u) / (1 + (exp(-1) - 1) m) are martingales that begin with 1, however the texts depend on each other. By
    Ville's inequality each of them ever exceeds 2 / `FALSE_ALARMS` with a probability of `FALSE_ALARMS` / 2 at most. In
    the long run, the first one grows with 1.7 times as many unlikely tokens as expected, and the second one with 0.6
    times as many.
    """

    tokens: int = 0
    unlikely: int = 0
    expected: float = 0.0
    log_many: float = 0.0  # logarithms of the products
    log_few: float = 0.0

    def add(self, target: ModelRows, begin: int, following: Sequence[int], sampling: Sampling) -> None:
        """Add the tokens that follow some rows, from position `begin` of the text on; ImpossibleToken if one is."""
        rows_BV = target.probs_NV[: len(following)]
        next_B1 = torch.tensor(following, dtype=torch.int64, device=rows_BV.device).unsqueeze(-1)
        own_B = rows_BV.gather(-1, next_B1)[:, 0]
        if bool((own_B <= 0).any()):
            at = int((own_B <= 0).nonzero()[0])
            edge = _at_the_edge(target.logits_NV[at], following[at], sampling)
            raise ImpossibleToken(begin + at, following[at], edge)
        mass_B = (rows_BV * (rows_BV < UNLIKELY)).sum(-1, dtype=torch.float64)
        unlikely = int((own_B < UNLIKELY).sum())
        many, few = (float((math.expm1(sign) * mass_B).log1p().sum()) for sign in (1, -1))
        self.join(Plausibility(len(following), unlikely, float(mass_B.sum()), unlikely - many, -unlikely - few))

    def join(self, other: Plausibility) -> None:
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    @property
    def is_foreign(self) -> bool:
        """Whether the target did not write the texts; wrong for `FALSE_ALARMS` of its own logs at most."""
        return max(self.log_many, self.log_few) > math.log(2 / FALSE_ALARMS)

    def __str__(self) -> str:
        share, expected = self.unlikely / max(1, self.tokens), self.expected / max(1, self.tokens)
        return f"{share:.2%} of the tokens had a probability below {UNLIKELY:g}; {expected:.2%} are to be expected"


def tie(best: float, dtype: torch.dtype) -> float:
    """The largest difference of two logits that rounding explains, given the best logit and the passes' dtype: 0.5
    between 16 and 32 in bfloat16, whose numbers lie 0.125 apart there."""
    spacing = torch.finfo(dtype).eps * 2.0 ** (math.frexp(best)[1] - 1)
    return max(SUMS, SPACINGS * spacing)


def _at_the_edge(logits_V: Tensor, token: int, sampling: Sampling) -> bool:
    edge = 1e-3 if logits_V.dtype == torch.float32 else 32 * float(torch.finfo(logits_V.dtype).eps)
    edge = max(edge, tie(float(logits_V.max()), logits_V.dtype))  # a batch and a text alone differ at large logits
    logits_V = logits_V.double()
    if sampling.temperature == 0:
        return float(logits_V.max() - logits_V[token]) <= edge
    if sampling.cuts_nothing:
        return False  # no token is cut off, so the probability is below the smallest floating-point number
    if sampling.top_k > 0:
        least = float(logits_V.topk(min(sampling.top_k, len(logits_V))).values[-1])
        if logits_V[token] < least - edge:
            return False
        logits_V = logits_V.masked_fill(logits_V < least - edge, -torch.inf)
    probs_V = (logits_V / sampling.temperature).softmax(-1)
    before, own = float(probs_V[logits_V > logits_V[token]].sum()), float(probs_V[token])
    likely = own * math.exp(edge / sampling.temperature) >= sampling.min_p * float(probs_V.max())
    return before <= sampling.top_p + edge and likely and own > 0
