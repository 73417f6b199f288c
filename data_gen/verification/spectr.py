"""K-SEQ (SpecTr, Sun et al. 2023): top-down as published, and two new verifiers that lift it bottom-up.

At each node with k children, from the root down:

    r in [1, k] solves  1 - (1 - beta)^k = r beta,  where  beta = sum min(p / r, q)
    for x in the children, in order:  go there with probability min(1, p(x) / (r q(x)))
    else  Y ~ (p - r q)+, normalised;  if Y is a child, go there;  else stop, Y is the extra token

Bottom-up, the same selection gives the weights with which the children's subtrees are entered.

Legend: M nodes taken at once, V vocabulary, k child-list entries.
"""

from __future__ import annotations

import torch
from torch import Tensor

from data_gen.verification.distributions import NodeDistributions, divide, first_accepted
from data_gen.verification.selection import Lifted, Selection, SelectionRule, TopDownRule, any_alive

NEWTON_STEPS = 12  # from the left the steps shrink quadratically; 5 to 8 are needed in practice
UNSEEN_STEPS = 8  # where the size of a step cannot be read


class KSeq(SelectionRule):
    """An entry is alive with `a = min(1, m/(r q))`. With `beta` the alive mass of one draw, every alive token gets
    `f a q` of the flow, `f = (1 - (1 - beta)^k) / beta`; `r*` is the `r` at which `f = r`, so that `F = min(m, r q)`.

    For every `r` with `f <= r` the flow stays below `m`, so an inexact `r*` costs acceptance and not exactness.
    """

    def select(self, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Selection:
        p_Mk, q_Mk = node.at(entries_Mk)
        r_M, f_M, alive_M = solve(node, weights_M, node.count(entries_Mk))
        m_Mk, r_M1, f_M1 = weights_M.unsqueeze(-1) * p_Mk, r_M.unsqueeze(-1), f_M.unsqueeze(-1)
        a_Mk = divide(m_Mk, r_M1 * q_Mk).clamp_(max=1)
        return Selection(a_Mk, f_M * alive_M, (m_Mk - f_M1 * a_Mk * q_Mk).clamp(min=0))

    def remainder(self, node: NodeDistributions, weights_M: Tensor, entries_Mk: Tensor) -> Tensor:
        r_M, f_M, _ = solve(node, weights_M, node.count(entries_Mk))
        # m - f min(m/r, q) = (m - r q)+ + (1 - f/r) min(m, r q), whose second part vanishes at r*
        above_MV = node.residual(weights_M, r_M)
        missed_M = (1 - divide(f_M, r_M)).clamp(min=0)
        below_MV = node.residual(weights_M, 0 * r_M) - above_MV
        return above_MV + missed_M.unsqueeze(-1).to(above_MV.dtype) * below_MV

    def choose(self, node: NodeDistributions, alive_Mk: Tensor, entries_Mk: Tensor) -> Tensor:
        return first_accepted(alive_Mk)


def solve(node: NodeDistributions, weights_M: Tensor, k: float | Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`r`, the flow per alive draft mass `f <= r`, and the alive mass `beta` of one draw; [M] each.

    `r*` solves `g(r) = 1 - (1 - beta)^k - r beta = 0`, where `r beta = sum min(m, r q)`. It lies between k and the root
    for `r q >= m` everywhere. Newton's method goes from the left; one step to the right at the end makes `f <= r`.
    """
    beta_M = -torch.expm1(torch.log1p(-weights_M) / k)
    left_M = torch.where(weights_M > 0, divide(weights_M, beta_M), 1.0)
    r_M, solved = left_M, 64 * torch.finfo(node.rows.p_NV.dtype).eps
    for _ in range(NEWTON_STEPS if node.allows_host_sync else UNSEEN_STEPS):
        excess_M, slope_M = node.excess_and_slope(weights_M, r_M)
        taken_M = weights_M - excess_M
        beta_M = taken_M / r_M
        gap_M = _accepted(beta_M, k) - taken_M
        change_M = k * (1 - beta_M).clamp(min=0) ** (k - 1) * (slope_M - beta_M) / r_M - slope_M
        step_M = torch.where(change_M < 0, -gap_M / change_M, 0.0)
        r_M = (r_M + step_M).clamp_(max=k).maximum(left_M)
        # on a GPU a host synchronisation costs more than another step
        if node.allows_host_sync and not r_M.is_cuda and bool((step_M.abs() <= solved * r_M).all()):
            break
    r_M = (r_M + 2 * step_M.abs()).clamp_(max=k)
    beta_M = (weights_M - node.excess(weights_M, r_M)).clamp(min=0) / r_M
    return r_M, divide(_accepted(beta_M, k), beta_M).minimum(r_M), beta_M


def _accepted(beta_M: Tensor, k: float | Tensor) -> Tensor:
    return -torch.expm1(k * torch.log1p(-beta_M.clamp(max=1)))


class SharedKSeq(KSeq):
    def choose(self, node: NodeDistributions, alive_Mk: Tensor, entries_Mk: Tensor) -> Tensor:
        return any_alive(alive_Mk)


class SpecTr(TopDownRule):
    """Try the children in order, each with `min(1, p/(r* q))`; else draw from `(p - r* q)+`."""

    name = "spectr"
    rule = KSeq()


class LiftedSpecTr(Lifted):
    name = "lifted_spectr"
    rule = KSeq()
    visits_by_ratio = False


class LiftedUniform(Lifted):
    """A random alive entry is selected, and children are visited by descending `p/q`.

    The flow is K-SEQ's, so the verifier is lossless for the same reason. The yield of a subtree is concave in its entry
    weight, so it is better to share a flow than to concentrate it, unless one child has most of the tree's nodes.
    """

    name = "lifted_uniform"
    rule = SharedKSeq()
