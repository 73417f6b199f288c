"""Selection rules, which say what child of a node takes its weight, and the two verifiers that each rule gives.

A rule sees the target measure `m = w p` (mass `w`) and the drafted entries. It selects child `x` with probability
`pi(x)`, such that the flow `F(x) = E[pi(x)]` over the draws stays below `m(x)`. Top-down, a token is drawn from `p - F`
if no child is selected. Bottom-up ("lifted"), `pi` gives the children's entry weights.

Legend: M nodes taken at once, V vocabulary, k child-list entries, n quadrature nodes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cache
from typing import ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from data_gen.verification.base import BottomUp, Split, TopDown, left_over
from data_gen.verification.distributions import NodeDistributions, by_ratio, divide, is_copy, pooled


class Selection(NamedTuple):
    alive_Mk: Tensor  # P(an entry is alive), each independently: only alive entries can be selected
    flow_M: Tensor  # mass(F)
    left_Mk: Tensor  # (m - F) at the entries


class SelectionRule(ABC):
    """Entries are alive independently, with a probability that depends on the token alone; at most one is selected."""

    @abstractmethod
    def select(self, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Selection: ...

    @abstractmethod
    def remainder(self, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Tensor: ...

    @abstractmethod
    def choose(self, node: NodeDistributions, alive_Mk: Tensor, entries_Mk: Tensor) -> Tensor: ...


class TopDownRule(TopDown):
    """The selected child is yielded; if there is none, a draw from `p - F`, which may still be a child."""

    rule: ClassVar[SelectionRule]

    def branching(self, node: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        alive_Mk, flow_M, left_Mk = self.rule.select(node, node.ones(), entries_Mk)
        none_M1 = (1 - alive_Mk).prod(-1, keepdim=True)
        landed_Mk = none_M1 * divide(left_Mk, (1 - flow_M).unsqueeze(-1)).masked_fill(is_copy(entries_Mk), 0.0)
        return pooled(self.rule.choose(node, alive_Mk, entries_Mk), entries_Mk) + landed_Mk

    def leftover(self, node: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        if entries_Mk.shape[-1] == 1:
            return node.cleared(node.residual(node.ones(), node.ones()), entries_Mk)
        return node.cleared(self.rule.remainder(node, node.ones(), entries_Mk), entries_Mk)


class Lifted(BottomUp):
    """A rule, bottom-up: each distinct child is entered with `pi` over what the children before it have left."""

    rule: ClassVar[SelectionRule]
    visits_by_ratio: ClassVar[bool] = True  # otherwise in order of first appearance

    def split(self, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Split:
        alive_Mk, flow_M, _ = self.rule.select(node, weights_M, entries_Mk)
        pi_Mk = pooled(self.rule.choose(node, alive_Mk, entries_Mk), entries_Mk)
        final_M = left_over(weights_M, flow_M)
        if not self.visits_by_ratio:
            return Split(entry_weights(pi_Mk), final_M)
        order_Mk = by_ratio(node, entries_Mk)
        entry_Mk = torch.zeros_like(pi_Mk).scatter_(-1, order_Mk, entry_weights(pi_Mk.gather(-1, order_Mk)))
        return Split(entry_Mk, final_M, order_Mk)

    def remainder(self, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Tensor:
        return self.rule.remainder(node, weights_M, entries_Mk)


def entry_weights(pi_Mk: Tensor) -> Tensor:
    """`pi_j / (1 - sum_{i<j} pi_i)`, in the order of visits."""
    before_Mk = pi_Mk.cumsum(-1) - pi_Mk
    return divide(pi_Mk, (1 - before_Mk).clamp(min=0)).clamp_(max=1)


def any_alive(alive_Mk: Tensor) -> Tensor:
    """P(entry is drawn uniformly from the alive ones), [M, k].

    It is `a_i E[1 / (1 + alive others)] = a_i int_0^1 prod_{j != i} (1 - a_j + a_j t) dt`, and Gauss-Legendre
    quadrature with k/2 nodes is exact for a polynomial of degree k - 1.
    """
    nodes_n, weights_n = _quadrature((alive_Mk.shape[-1] + 1) // 2, alive_Mk.device)
    a_Mk1 = alive_Mk.unsqueeze(-1)
    factors_Mkn = 1 - a_Mk1 + a_Mk1 * nodes_n
    others_Mkn = factors_Mkn.prod(1, keepdim=True) / factors_Mkn  # a factor is at least its t > 0
    return alive_Mk * (others_Mkn @ weights_n)


@cache
def _quadrature(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    nodes, weights = np.polynomial.legendre.leggauss(count)
    return torch.from_numpy((nodes + 1) / 2).to(device), torch.from_numpy(weights / 2).to(device)
