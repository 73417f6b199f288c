"""K-SEQ, the rule of SpecTr (Sun et al. 2023), and the verifiers that it gives.

At each node with k children, from the root down:

    r in [1, k] solves  1 - (1 - beta)^k = r beta,  where  beta = sum min(p / r, q)
    for x in the children, in order:  go there with probability min(1, p(x) / (r q(x)))
    else  Y ~ (p - r q)+, normalised;  if Y is a child, go there;  else stop, Y is the extra token

The equation is solved in compiled code: with the prefix sums of `ranking` along a text, and in a
few passes over the vocabulary at a tree's nodes.

Legend: M nodes taken at once (questions), P rows, V vocabulary, S tokens, k child-list entries, n
quadrature nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import expm1, log1p

import numpy as np
import torch
from torch import Tensor

from data_gen.verification.distributions import (
    Array,
    HostRows,
    NodeDistributions,
    Row,
    divide,
    first_accepted,
    host,
)
from data_gen.verification.selection import Lifted, Selection, TopDownRule
from selector.jit import jit

MOST_STEPS = 100  # 3 or 4 are usual, and up to 20 where p and q agree on one token
ROUNDING = 16 * 2.0**-52  # to which sums over a vocabulary are known


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

    def remainder(self, node: NodeDistributions, weights_M: Tensor, k: int) -> Tensor:
        r_M, f_M, _ = solve(node, weights_M, k)
        # m - f min(m/r, q) = (m - r q)+ + (1 - f/r) min(m, r q), whose second part vanishes at r*
        above_MV = node.residual(weights_M, r_M)
        missed_M = (1 - divide(f_M, r_M)).clamp(min=0)
        below_MV = node.residual(weights_M, 0 * r_M) - above_MV
        return above_MV + missed_M.unsqueeze(-1).to(above_MV.dtype) * below_MV


def solve(node: NodeDistributions, weights_M: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    """`r`, the flow per alive draft mass `f <= r`, and the alive mass `beta` of one draw; [M]
    each."""
    solved_3M = _solved(node.on_host, host(weights_M), k)
    r_M, f_M, beta_M = torch.from_numpy(solved_3M).to(node.rows.device)
    return r_M, f_M, beta_M


@jit
def _solved(rows: HostRows, weights_M: Array, k: int) -> Array:
    ratio_PS, p_PS, q_PS, scale_2P, nodes_M = rows
    solved_3M = np.empty((3, len(nodes_M)))
    for m in range(len(nodes_M)):
        n = nodes_M[m]
        row = ratio_PS[n], p_PS[n], q_PS[n], scale_2P[0, n], scale_2P[1, n]
        r = _root(row, weights_M[m], k)
        taken, _ = _taken(row, weights_M[m], r)
        beta = taken / r
        f = min(_accepted(beta, k) / beta, r) if beta > 0 else 0.0
        solved_3M[:, m] = r, f, beta
    return solved_3M


@jit
def _root(row: Row, weight: float, k: int) -> float:
    """The root `r*` of `g(r) = 1 - (1 - beta)^k - r beta`, where `r beta = sum min(m, r q)`.

    It lies between k and the root for `r q >= m` everywhere. There `g` goes from `g >= 0` to `g <=
    0`, but is neither convex nor concave: where p and q agree on one token it is nearly flat at its
    left end, and Newton's step from there leaves the bracket. So a step that is not half as long as
    the one before is replaced by one to the middle of the bracket. The upper end of the last
    bracket is returned. There `g <= 0` and therefore `f <= r`, so that a text keeps its law however
    wide the bracket still is.
    """
    low = 1.0
    if 0 < weight < 1:
        low = weight / -expm1(log1p(-weight) / k)
    high = float(k)
    r = low
    last = high - low
    for _ in range(MOST_STEPS):
        taken, slope = _taken(row, weight, r)
        beta = taken / r
        gap = _accepted(beta, k) - taken
        if gap > 0:
            low = r
        else:
            high = r
        missed = ROUNDING * taken  # so much of the flow may be missed; `g` is known no better
        if high - low <= 3 * ROUNDING * high or -missed <= gap <= 0:
            break
        change = k * max(1 - beta, 0.0) ** (k - 1) * (slope - beta) / r - slope
        after = (low + high) / 2
        if change < 0:  # else `g` is flat
            # to the right of the root, and at least so far inside that both ends come closer
            newton = r - (gap + missed / 2) / change
            newton = min(max(newton, low * (1 + ROUNDING)), high * (1 - ROUNDING))
            if abs(newton - r) <= abs(last) / 2:
                after = newton
        last = after - r
        r = after
    return high


@jit
def _taken(row: Row, weight: float, r: float) -> tuple[float, float]:
    """`sum min(m, r q)`, and its slope in r: the draft's mass on the tokens with `r q < m`."""
    ratio_S, p_S, q_S, p_scale, q_scale = row
    if len(ratio_S) > 0:
        above = np.searchsorted(ratio_S, weight / r)
        return r * q_S[above] + weight * (p_S[-1] - p_S[above]), q_S[above]
    weight *= p_scale
    r *= q_scale
    taken = slope = 0.0
    for x in range(len(p_S)):
        m = weight * p_S[x]
        taken += min(m, r * q_S[x])
        slope += q_S[x] if r * q_S[x] < m else 0.0
    return taken, slope * q_scale


@jit
def _accepted(beta: float, k: int) -> float:
    return -expm1(k * log1p(-beta)) if beta < 1 else 1.0


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
