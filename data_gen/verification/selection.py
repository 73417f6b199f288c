"""Selection rules, which say what child of a node takes its weight, and the two kinds of verifiers
that each gives.

A rule sees the target measure `m = w p` (mass `w`) and the drafted entries. Entries are alive
independently, with a probability that depends on the token alone, and one of the alive ones is
selected. Child `x` is selected with probability `pi(x)`, such that the flow `F(x) = E[pi(x)]` over
the draws stays below `m(x)`. Top-down, a token is drawn from `p - F` if no child is selected.
Bottom-up ("lifted"), `pi` gives the weights with which children are entered.

*K-SEQ* (SpecTr, Sun et al. 2023). At each node with k children, from the root down:

    r in [1, k] solves  1 - (1 - beta)^k = r beta,  where  beta = sum min(p / r, q)
    for x in the children, in order:  go there with probability min(1, p(x) / (r q(x)))
    else  Y ~ (p - r q)+, normalised;  if Y is a child, go there;  else stop, Y is the extra token

*Priority* is in `priority`.

Legend: M nodes taken at once (questions), V vocabulary, k child-list entries, n quadrature nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from data_gen.verification.base import BottomUp, Split, TopDown, left_over
from data_gen.verification.distributions import (
    NodeDistributions,
    by_ratio,
    divide,
    first_accepted,
    is_copy,
    pooled,
)

MOST_STEPS = 100  # of `solve`; 3 or 4 are usual, and up to 20 where p and q agree on one token
GPU_STEPS = 24  # on a GPU, where to read the size of a bracket costs more than another step
ROUNDING = 16  # units in the last place to which sums over a vocabulary are known


class Selection(NamedTuple):
    chosen_Mk: Tensor  # P(an entry is selected)
    flow_M: Tensor  # mass(F)
    left_Mk: Tensor  # (m - F) at the entries


class Rule(Protocol):
    def select(self, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Selection:
        """For k >= 2 entries."""

    def remainder(self, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Tensor:
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
        return self.rule.remainder(node, node.ones(), entries_Mk).scatter_(-1, entries_Mk, 0.0)


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
        return self.rule.remainder(node, weights_M, entries_Mk)


def entry_weights(pi_Mk: Tensor) -> Tensor:
    """`pi_j / (1 - sum_{i<j} pi_i)`, in the order of visits."""
    before_Mk = pi_Mk.cumsum(-1) - pi_Mk
    return divide(pi_Mk, (1 - before_Mk).clamp(min=0)).clamp_(max=1)


class KSeq:
    """An entry is alive with `a = min(1, m/(r q))`. With `beta` the alive mass of one draw, every
    alive token gets `f a q` of the flow, `f = (1 - (1 - beta)^k) / beta`; `r*` is the `r` at which
    `f = r`, so that `F = min(m, r q)`.

    For every `r` with `f <= r` the flow stays below `m`, so an inexact `r*` costs acceptance and
    not exactness. `shares` gives P(an entry is selected), [M, k], from P(it is alive).
    """

    def __init__(self, shares: Callable[[Tensor], Tensor] = first_accepted) -> None:
        self.shares = shares

    def select(self, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Selection:
        p_Mk, q_Mk = node.at(entries_Mk)
        r_M, f_M, alive_M = solve(node, weights_M, entries_Mk.shape[-1])
        m_Mk = weights_M.unsqueeze(-1) * p_Mk
        a_Mk = divide(m_Mk, r_M.unsqueeze(-1) * q_Mk).clamp_(max=1)
        left_Mk = (m_Mk - f_M.unsqueeze(-1) * a_Mk * q_Mk).clamp(min=0)
        return Selection(self.shares(a_Mk), f_M * alive_M, left_Mk)

    def remainder(self, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Tensor:
        r_M, f_M, _ = solve(node, weights_M, entries_Mk.shape[-1])
        # m - f min(m/r, q) = (m - r q)+ + (1 - f/r) min(m, r q), whose second part vanishes at r*
        above_MV = node.residual(weights_M, r_M)
        missed_M = (1 - divide(f_M, r_M)).clamp(min=0)
        below_MV = node.residual(weights_M, 0 * r_M) - above_MV
        return above_MV + missed_M.unsqueeze(-1).to(above_MV.dtype) * below_MV


def solve(node: NodeDistributions, weights_M: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """`r`, the flow per alive draft mass `f <= r`, and the alive mass `beta` of one draw; [M] each.

    `r*` solves `g(r) = 1 - (1 - beta)^k - r beta = 0`, where `r beta = sum min(m, r q)`. It lies
    between k and the root for `r q >= m` everywhere. There `g` goes from `g >= 0` to `g <= 0`, but
    is neither convex nor concave: where p and q agree on one token it is nearly flat at its left
    end, and Newton's step from there leaves the bracket. So a step that is not half as long as the
    one before is replaced by one to the middle of the bracket. The upper end of the last bracket is
    returned. There `g <= 0` and therefore `f <= r`, so that a text keeps its law however wide the
    bracket still is.
    """
    beta_M = -torch.expm1(torch.log1p(-weights_M) / k)
    low_M = torch.where(weights_M > 0, divide(weights_M, beta_M), 1.0)
    high_M = torch.full_like(low_M, k)
    r_M = low_M
    last_M = high_M - low_M
    steps = GPU_STEPS if r_M.is_cuda else MOST_STEPS
    least = ROUNDING * torch.finfo(node.rows.p_NV.dtype).eps
    for _ in range(steps):
        excess_M, slope_M = node.excess_and_slope(weights_M, r_M)
        taken_M = weights_M - excess_M
        beta_M = taken_M / r_M
        gap_M = _accepted(beta_M, k) - taken_M
        low_M = torch.where(gap_M > 0, r_M, low_M)
        high_M = torch.where(gap_M > 0, high_M, r_M)
        missed_M = least * taken_M  # so much of the flow may be missed; `g` is known no better
        is_narrow_M = high_M - low_M <= 3 * least * high_M
        is_close_M = is_narrow_M | ((gap_M <= 0) & (gap_M >= -missed_M))
        if not r_M.is_cuda and bool(is_close_M.all()):
            break
        change_M = k * (1 - beta_M).clamp(min=0) ** (k - 1) * (slope_M - beta_M) / r_M - slope_M
        # to the right of the root; infinite where `g` is flat
        newton_M = r_M - (gap_M + missed_M / 2) / change_M
        # at least so far inside that the bracket closes from both sides
        newton_M = newton_M.maximum(low_M * (1 + least)).minimum(high_M * (1 - least))
        is_short_M = (change_M < 0) & ((newton_M - r_M).abs() <= last_M.abs() / 2)
        next_M = torch.where(is_short_M, newton_M, (low_M + high_M) / 2)
        last_M = next_M - r_M
        r_M = next_M
    beta_M = (weights_M - node.excess(weights_M, high_M)).clamp(min=0) / high_M
    return high_M, divide(_accepted(beta_M, k), beta_M).minimum(high_M), beta_M


def _accepted(beta_M: Tensor, k: int) -> Tensor:
    return -torch.expm1(k * torch.log1p(-beta_M.clamp(max=1)))


def any_alive(alive_Mk: Tensor) -> Tensor:
    """P(entry is drawn uniformly from the alive ones), [M, k].

    It is `a_i E[1 / (1 + alive others)] = a_i int_0^1 prod_{j != i} (1 - a_j + a_j t) dt`, and
    Gauss-Legendre quadrature with k/2 nodes is exact for a polynomial of degree k - 1.
    """
    nodes_n, weights_n = _quadrature((alive_Mk.shape[-1] + 1) // 2, alive_Mk.device)
    a_Mk1 = alive_Mk.unsqueeze(-1)
    factors_Mkn = 1 - a_Mk1 + a_Mk1 * nodes_n
    others_Mkn = factors_Mkn.prod(1, keepdim=True) / factors_Mkn  # a factor is at least its t > 0
    return alive_Mk * (others_Mkn @ weights_n)


@cache
def _quadrature(count: int, device: torch.device) -> tuple[Tensor, Tensor]:
    nodes, weights = np.polynomial.legendre.leggauss(count)
    nodes_n = torch.from_numpy((nodes + 1) / 2).to(device)
    weights_n = torch.from_numpy(weights / 2).to(device)
    return nodes_n, weights_n


class SpecTr(TopDownRule):
    name = "spectr"
    rule = KSeq()


class LiftedSpecTr(Lifted):
    name = "lifted_spectr"
    rule = KSeq()
    visits_by_ratio = False


class LiftedUniform(Lifted):
    """A random alive entry is selected, and children are visited by descending `p/q`.

    The flow is K-SEQ's, so the verifier is lossless for the same reason. The yield of a subtree is
    concave in its entry weight, so it is better to share a flow than to concentrate it, unless one
    child has most of the tree's nodes.
    """

    name = "lifted_uniform"
    rule = KSeq(any_alive)
