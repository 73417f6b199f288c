"""NaiveTree: speculative sampling on the first child; its residual may still land on another one.

On a chain this is the algorithm of Leviathan et al. 2023 and Chen et al. 2023. At each node, from the root down:

    go to X1 with probability min(1, p(X1) / q(X1))
    else  Y ~ (p - q)+, normalised;  if Y is another child, go there;  else stop, Y is the extra token
"""

from __future__ import annotations

from torch import Tensor

from data_gen.verification.base import IID, WITHOUT_REPLACEMENT, TopDown
from data_gen.verification.profile import NodeDistributions, divide, is_copy


class NaiveTree(TopDown):
    """Accept `X1` with `min(1, p/q)`; else the token is drawn from `(p - q)+`, normalised. Only `X1` need be `q`'s."""

    name = "naive_tree"
    styles = (IID, WITHOUT_REPLACEMENT)

    def branching(self, profile: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        p_Mk, q_Mk = profile.at(entries_Mk)
        pull_Mk = divide(p_Mk, q_Mk).clamp(max=1)
        rejected_M1 = 1 - pull_Mk[:, :1]
        mass_M1 = profile.excess(profile.ones(), profile.ones()).unsqueeze(-1)
        pull_Mk[:, 1:] = rejected_M1 * divide((p_Mk - q_Mk).clamp(min=0), mass_M1)[:, 1:]
        # the residual lands on a token once, however often it was drafted
        return pull_Mk.masked_fill_(is_copy(entries_Mk), 0.0)

    def leftover(self, profile: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        return profile.cleared(profile.residual(profile.ones(), profile.ones()), entries_Mk)
