"""Verifiers of greedy drafts: the k - 1 most likely tokens, and one that is drawn from the others.

`greedy` (MDSD, Hu et al. 2025, arXiv 2502.18779) is top-down; SpecHub (Sun et al. 2024, arXiv
2411.05289) is its case of pairs. `lifted_greedy` works bottom-up. With `m = w p` the target measure
of a node of weight `w`, `T` its fixed children and `q'` the law of the drawn child `Y`, outside T:

    beta = sum_off_T min(m, q'),   pi(Y) = min(1, m(Y) / q'(Y)),
    pi(t) = (1 - pi(Y)) m(t) / (1 - beta)  for t in T

so the flow is `m` on T and `min(m, q')` outside it, which is the most that any rule can take. These
weights are UniVer's (arXiv 2605.04543) for one sampled child: its `Z = 1 - w + sum [m - s]+` is
`1 - beta`.

Where `q` has no mass outside T, as at temperature 0, the last child is fixed, too: `q'` is then
certain of it.

Legend: M nodes taken at once, V vocabulary, k child-list entries.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from data_gen.verification.base import BottomUp, Split, TopDown, left_over
from data_gen.verification.distributions import NodeDistributions, divide
from data_gen.verification.selection import entry_weights
from selector.actions import GREEDY


class Drawn(NamedTuple):
    """The drawn child of greedy drafts, which is the last entry."""

    scale_M: Tensor  # q'/q outside the fixed children; 0 where the last child is fixed, too
    alive_M: Tensor  # min(1, m/q') of the drawn token
    beta_M: Tensor  # sum_off_T min(m, q')
    fixed_Mk: Tensor  # m of the fixed children, [M, k - 1]

    @classmethod
    def of(cls, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Drawn:
        off_M = node.draft_mass_off(entries_Mk[:, :-1])
        scale_M = divide(torch.ones_like(off_M), off_M)
        p_Mk, q_Mk = node.at(entries_Mk)
        m_Mk = weights_M.unsqueeze(-1) * p_Mk
        draft_Mk = scale_M.unsqueeze(-1) * q_Mk
        last_M = torch.where(off_M > 0, draft_Mk[:, -1], 1.0)
        on_fixed_M = m_Mk[:, :-1].minimum(draft_Mk[:, :-1]).sum(-1)
        beta_M = (weights_M - node.excess(weights_M, scale_M) - on_fixed_M).clamp(min=0)
        beta_M = torch.where(off_M > 0, beta_M, m_Mk[:, -1])
        alive_M = divide(m_Mk[:, -1], last_M).clamp(max=1)
        return cls(scale_M, alive_M, beta_M, m_Mk[:, :-1])

    def selected(self) -> Tensor:
        share_M = divide(1 - self.alive_M, 1 - self.beta_M)
        fixed_Mk = (share_M.unsqueeze(-1) * self.fixed_Mk).clamp(max=1)
        return torch.cat([fixed_Mk, self.alive_M.unsqueeze(-1)], dim=-1)

    def residual(self, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Tensor:
        """`(m - q')+` outside the children, [M, V]: nothing is left of a rejected child."""
        return node.residual(weights_M, self.scale_M).scatter_(-1, entries_Mk, 0.0)


class Greedy(TopDown):
    """Accept the drawn child with `min(1, p/q')`; else the token is drawn from `(p - q')+`, where T
    has all of `p`.

    The acceptance is optimal for such drafts: `p(T) + sum_off_T min(p, q')`.
    """

    name = "greedy"
    styles = (GREEDY,)

    def branching(self, node: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        return Drawn.of(node, node.ones(), entries_Mk).selected()

    def leftover(self, node: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        if entries_Mk.shape[-1] == 1:
            return node.residual(node.ones(), node.ones()).scatter_(-1, entries_Mk, 0.0)
        return Drawn.of(node, node.ones(), entries_Mk).residual(node, node.ones(), entries_Mk)


class LiftedGreedy(BottomUp):
    """Greedy's selection, bottom-up: children are visited as they were drafted, each entered with
    `pi` over what the children before it have left."""

    name = "lifted_greedy"
    styles = (GREEDY,)

    def split(self, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Split:
        drawn = Drawn.of(node, weights_M, entries_Mk)
        flow_M = drawn.fixed_Mk.sum(-1) + drawn.beta_M
        return Split(entry_weights(drawn.selected()), left_over(weights_M, flow_M))

    def remainder(self, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Tensor:
        return Drawn.of(node, weights_M, entries_Mk).residual(node, weights_M, entries_Mk)
