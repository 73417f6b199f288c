"""Selection rules, which say what child of a node takes its weight, and the two kinds of verifiers
that each gives.

A rule sees the target measure `m = w p` (mass `w`) and the drafted entries. Entries are alive
independently, with a probability that depends on the token alone, and one of the alive ones is
selected. Child `x` is selected with probability `pi(x)`, such that the flow `F(x) = E[pi(x)]` over
the draws stays below `m(x)`. Top-down, a token is drawn from `p - F` if no child is selected.
Bottom-up ("lifted"), `pi` gives the weights with which children are entered.

Legend: M nodes taken at once, V vocabulary, k child-list entries.
"""

from __future__ import annotations

from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from data_gen.verification.base import BottomUp, Split, TopDown, left_over
from data_gen.verification.distributions import (
    NodeDistributions,
    by_ratio,
    divide,
    is_copy,
    pooled,
)


class Selection(NamedTuple):
    chosen_Mk: Tensor  # P(an entry is selected)
    flow_M: Tensor  # mass(F)
    left_Mk: Tensor  # (m - F) at the entries


class Rule(Protocol):
    """For k >= 2 entries."""

    def select(
        self, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor
    ) -> Selection: ...

    def remainder(self, node: NodeDistributions, weights_M: Tensor, k: int) -> Tensor:
        """`m - F`, [M, V] in any precision."""


class TopDownRule(TopDown):
    """The selected child is yielded; if there is none, a draw from `p - F`, which may still be a
    child."""

    rule: ClassVar[Rule]

    def branching(self, node: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        chosen_Mk, flow_M, left_Mk = self.rule.select(node, node.ones(), entries_Mk)
        none_M1 = (1 - chosen_Mk.sum(-1, keepdim=True)).clamp(min=0)
        share_Mk = divide(left_Mk, (1 - flow_M).unsqueeze(-1))
        landed_Mk = none_M1 * share_Mk.masked_fill(is_copy(entries_Mk), 0.0)
        return pooled(chosen_Mk, entries_Mk) + landed_Mk

    def leftover(self, node: NodeDistributions, entries_Mk: Tensor) -> Tensor:
        if entries_Mk.shape[-1] == 1:
            return node.residual(node.ones(), node.ones()).scatter_(-1, entries_Mk, 0.0)
        left_MV = self.rule.remainder(node, node.ones(), entries_Mk.shape[-1])
        return left_MV.scatter_(-1, entries_Mk, 0.0)


class Lifted(BottomUp):
    """A rule, bottom-up: each distinct child is entered with `pi` over what the children before it
    have left."""

    rule: ClassVar[Rule]
    visits_by_ratio: ClassVar[bool] = True  # otherwise in order of first appearance

    def split(self, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Split:
        chosen_Mk, flow_M, _ = self.rule.select(node, weights_M, entries_Mk)
        pi_Mk = pooled(chosen_Mk, entries_Mk)
        final_M = left_over(weights_M, flow_M)
        if not self.visits_by_ratio:
            return Split(entry_weights(pi_Mk), final_M)
        order_Mk = by_ratio(node, entries_Mk)
        entry_Mk = torch.zeros_like(pi_Mk).scatter_(
            -1, order_Mk, entry_weights(pi_Mk.gather(-1, order_Mk))
        )
        return Split(entry_Mk, final_M, order_Mk)

    def remainder(self, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Tensor:
        return self.rule.remainder(node, weights_M, entries_Mk.shape[-1])


def entry_weights(pi_Mk: Tensor) -> Tensor:
    """`pi_j / (1 - sum_{i<j} pi_i)`, in the order of visits."""
    before_Mk = pi_Mk.cumsum(-1) - pi_Mk
    return divide(pi_Mk, (1 - before_Mk).clamp(min=0)).clamp_(max=1)
