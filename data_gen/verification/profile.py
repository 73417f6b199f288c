"""Arithmetic on rows of probabilities that every verifier shares.

Every residual of these verifiers is `(a p - b q)+` with two scalars: subtracting a multiple of `q` from such a
residual, and scaling it, gives another one (algorithms sheet, section 5). So a rule carries `a` and `b` per row, and
touches the vocabulary only through `excess`.

Legend: M rows, V vocabulary, k child-list entries. All probabilities are float64.
"""

from __future__ import annotations

import torch
from torch import Tensor


def normalised(probs_V: Tensor) -> Tensor:
    """Rows [..., V] in float64, divided by their sum: float32 and bf16 rows do not sum to one exactly."""
    probs_V = probs_V.double()
    return probs_V / probs_V.sum(-1, keepdim=True)


def divide(numerator: Tensor, denominator: Tensor) -> Tensor:
    """The quotient of non-negative numbers, and 0 where the denominator is 0: what never happens gets weight 0."""
    return (numerator / denominator).nan_to_num_(nan=0.0, posinf=0.0)


class Profile:
    """The target's and the draft's distributions at M nodes: the only way a rule touches the vocabulary.

    It holds all rows and the numbers of those in question, so that a rule that needs a few probabilities copies none.
    """

    def __init__(self, p_NV: Tensor, q_NV: Tensor, nodes_M: Tensor) -> None:
        self.p_NV, self.q_NV, self.nodes_M = p_NV, q_NV, nodes_M

    def at(self, entries_Mk: Tensor) -> tuple[Tensor, Tensor]:
        """p and q of the given tokens, [M, k] each."""
        nodes_M1 = self.nodes_M.unsqueeze(-1)
        return self.p_NV[nodes_M1, entries_Mk], self.q_NV[nodes_M1, entries_Mk]

    def residual(self, a_M: Tensor, b_M: Tensor) -> Tensor:
        """`(a p - b q)+`, [M, V]."""
        p_MV, q_MV = self.p_NV[self.nodes_M], self.q_NV[self.nodes_M]
        return p_MV.mul_(a_M.unsqueeze(-1)).sub_(q_MV.mul_(b_M.unsqueeze(-1))).clamp_(min=0)

    def excess(self, a_M: Tensor, b_M: Tensor) -> Tensor:
        """`sum_x (a p(x) - b q(x))+`, [M]."""
        return self.residual(a_M, b_M).sum(-1)

    def ones(self) -> Tensor:
        return self.p_NV.new_ones(len(self.nodes_M))


def first_copies(entries_Mk: Tensor) -> Tensor:
    """For each entry, the position of the first entry with the same token, [M, k] int64."""
    equal_Mkk = entries_Mk.unsqueeze(-1) == entries_Mk.unsqueeze(-2)
    return equal_Mkk.to(torch.uint8).argmax(-1)


def pooled(weights_Mk: Tensor, entries_Mk: Tensor) -> Tensor:
    """The weights of equal tokens added up at their first entry, 0 at the others, [M, k]."""
    return torch.zeros_like(weights_Mk).scatter_add_(-1, first_copies(entries_Mk), weights_Mk)


def sample(probs_V: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """`count` i.i.d. draws from each row by inversion, int64 [..., count]; never a token of probability 0.

    Args:
        probs_V: float64 [..., V], not necessarily normalised.
    """
    cdf_V = probs_V.cumsum(-1)
    shape = (*probs_V.shape[:-1], count)
    u = torch.rand(shape, generator=generator, dtype=torch.float64, device=probs_V.device)
    # rounding may put u * total on the total itself, one past the last token with mass
    below_total = torch.nextafter(cdf_V[..., -1:], torch.zeros_like(cdf_V[..., -1:]))
    return torch.searchsorted(cdf_V, torch.minimum(u * cdf_V[..., -1:], below_total), right=True)
